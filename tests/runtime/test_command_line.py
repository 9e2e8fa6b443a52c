"""A command line's mistakes: one error that names the nearest flag, subcommand or choice."""

import pytest

from router.errors import ConfigError
from router.runtime.command_line import Parser


def parser() -> Parser:
    made = Parser(prog="one", allow_abbrev=False)
    made.add_argument("--quick", action="store_true")
    commands = made.add_subparsers(metavar="COMMAND", required=True)
    two = commands.add_parser("measure", allow_abbrev=False)
    two.add_argument("--dialect", choices=["vllm", "sglang"])
    two.add_argument("--seconds", type=float)
    return made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mesure"], "there is no 'mesure'; did you mean measure? (choose from measure)"),
        (["zzz"], "there is no 'zzz' (choose from measure)"),
        (["measure", "--dialect", "vlm"], "there is no 'vlm'; did you mean vllm? (choose from vllm, sglang)"),
        (["measure", "--secnds", "3"], "unrecognized arguments: --secnds 3; did you mean --seconds?"),
        (["measure", "--secnds=3"], "unrecognized arguments: --secnds=3; did you mean --seconds?"),
        (["--quik", "measure"], "unrecognized arguments: --quik; did you mean --quick?"),
        (["measure", "extra"], "unrecognized arguments: extra"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_names_the_nearest_word(arguments: list[str], message: str) -> None:
    """For a mistake behind a subcommand, its own flags are searched; nothing is suggested where nothing is near."""
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(arguments)
    assert str(caught.value).endswith(message)


def test_a_right_command_line_is_parsed() -> None:
    """The flags of both parsers arrive."""
    given = parser().parse_args(["--quick", "measure", "--dialect", "sglang", "--seconds", "3"])
    assert (given.quick, given.dialect, given.seconds) == (True, "sglang", 3.0)
