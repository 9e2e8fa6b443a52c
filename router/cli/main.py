"""The command `d2lpm`. Each subcommand is a module of this package, which is imported only when it is called."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Final, NoReturn, Protocol, cast

from router.cli.compiled import is_compiled
from router.errors import ConfigError
from router.runtime.command_line import INTERRUPTED, Parser

DEMO: Final = "demo"
DEMO_PROGRAM: Final = "import sys; from bench.__main__ import main; main(['demo', *sys.argv[1:]], program='d2lpm')"
"""Runs the demo, a separate program that this package does not import."""
PROCESS: Final = "process"
"""The command by which `serve --processes` starts its processes; of no use to others, so no help text names it."""
COMMANDS: Final[Mapping[str, str]] = {
    "serve": "route calls to workers",
    "replay": "feed a journal to a new scheduler and compare its commands",
    "check": "check a settings file and the flags of its workers",
    "config": "print the settings as a file with comments",
    "keys": "manage clients, their keys and their shares",
    "top": "show the clients and workers of a running router",
    "cluster": "show who leads a cluster, and hand leadership over",
    DEMO: "try the policies side by side on emulated workers",
}
"""Each subcommand with its help text. All but the demo have a module of their name in this package."""


class Command(Protocol):
    """A module that is a subcommand."""

    def configure(self, parser: Parser) -> None:
        """Add its arguments, and set `run`, which takes the options and returns the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    The code is 2, after one line on standard error, for a mistake in a setting or a file.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [DEMO]:
        _demo(given[1:])
    try:
        options = vars(_parser(given[0] if given else "").parse_args(given))
        run: Callable[[Mapping[str, object]], int] = options["run"]
        return run(options)
    except ConfigError as error:
        print("d2lpm:", *str(error).split(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser(called: str) -> Parser:
    """Return the parser of all subcommands; only the one that is called has its arguments."""
    parser = Parser(prog="d2lpm", description="A fair router that keeps prefix caches warm.", allow_abbrev=False)
    code = " compiled" if is_compiled() else ""
    parser.add_argument("--version", action="version", version=f"d2lpm {version('d2lpm-router')}{code}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        described = f"{about[0].upper()}{about[1:]}."
        subparser = commands.add_parser(name, help=about, description=described, allow_abbrev=False)
        if name == called:
            cast(Command, import_module(f"router.cli.{name}")).configure(subparser)
    if called == PROCESS:
        cast(Command, import_module(f"router.cli.{PROCESS}")).configure(commands.add_parser(PROCESS))
    return parser


def _demo(flags: Sequence[str]) -> NoReturn:
    """Replace this process with the demo, which says `d2lpm` in its texts."""
    os.execv(sys.executable, [sys.executable, "-c", DEMO_PROGRAM, *flags])
