"""Flags, environment and YAML: precedence, lists, and one line for each mistake."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from router.config.sections import SECTIONS
from router.config.settings import Settings
from router.config.sources import ABOUT, Key, add_flags, keys, load
from router.core.policies.registry import PARAMETERS
from router.errors import ConfigError
from router.runtime.command_line import Parser


def parser() -> Parser:
    made = Parser(prog="d2lpm serve", usage="%(prog)s [FLAG ...]", epilog=ABOUT, allow_abbrev=False)
    add_flags(made)
    return made


def settings(*flags: str, environment: Mapping[str, str] | None = None) -> Settings:
    return load(vars(parser().parse_args(flags)), environment or {})


def mistake(*flags: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the one-line error with which this command line and environment are refused."""
    with pytest.raises(ConfigError) as caught:
        settings(*flags, environment=environment)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "router.yaml"


def urls(given: Settings) -> list[str]:
    return [worker.url for worker in given.worker]


def test_nothing_given_is_the_default() -> None:
    """Without a flag, a variable or a file, each setting has its default."""
    assert settings() == Settings()


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(file: Path) -> None:
    """The precedence applies to each key separately."""
    file.write_text("port: 1\nmax_queued: 1\nseed: 1\n")
    environment = {"D2LPM_PORT": "2", "D2LPM_MAX_QUEUED": "2", "D2LPM_CONFIG": str(file)}
    given = settings("--port", "3", environment=environment)
    assert (given.port, given.max_queued, given.seed, given.max_inflight) == (3, 2, 1, Settings().max_inflight)


def test_groups_are_merged_by_parameter(file: Path) -> None:
    """A flag for one parameter of a group keeps the file's values of the others."""
    file.write_text("d2lpm: {quantum: 1, load_slack: 1}\n")
    given = settings(
        "--config", str(file), "--d2lpm.quantum", "3", environment={"D2LPM_D2LPM__CHARGE_FULL_INPUT": "yes"}
    )
    assert given.parameters()["d2lpm"] == PARAMETERS["d2lpm"](quantum=3.0, load_slack=1, charge_full_input=True)


def test_a_flag_repeated_is_a_list() -> None:
    """Each repetition is one entry, whatever characters it contains."""
    assert urls(settings("--worker", "http://a", "--worker", "http://b:2")) == ["http://a", "http://b:2"]


def test_a_better_list_replaces_the_one_below(file: Path) -> None:
    """Lists are not merged: workers on the command line replace those of the file."""
    file.write_text("worker:\n  - http://a\n  - url: http://b\n    id: bee\n")
    config = ("--config", str(file))
    assert [worker.id for worker in settings(*config).worker] == ["a", "bee"]
    variable = {"D2LPM_WORKER": "http://c, http://d"}
    assert urls(settings(*config, environment=variable)) == ["http://c", "http://d"]
    assert urls(settings(*config, "--worker", "http://e", environment=variable)) == ["http://e"]


@pytest.mark.parametrize(("text", "value"), [("on", True), ("off", False), ("true", True), ("no", False)])
def test_a_switch_is_the_same_in_every_source(text: str, value: bool, file: Path) -> None:
    """Every source reads the same words as true and false, whatever YAML itself takes for a boolean."""
    file.write_text(f"access_log: {text}\n")
    assert settings("--config", str(file)).access_log is value
    assert settings(environment={"D2LPM_ACCESS_LOG": text}).access_log is value
    assert settings("--access-log" if value else "--no-access-log").access_log is value


def test_a_word_that_yaml_takes_for_something_else_stays_a_word(file: Path) -> None:
    """`off` is read as a window and not as false, and a secret of digits keeps its leading zero."""
    file.write_text("window: off\nhash_secret: 0123012301230123\n")
    given = settings("--config", str(file))
    assert given.window == "off"
    assert given.hash_secret is not None
    assert given.hash_secret.get_secret_value() == "0123012301230123"


def test_an_empty_variable_is_not_set() -> None:
    """A variable with an empty value counts as not set, because compose files pass unset variables on as empty ones."""
    assert settings(environment={"D2LPM_PORT": "", "D2LPM_WORKER": ""}) == Settings()


def test_an_empty_file_sets_nothing(file: Path) -> None:
    """A file with nothing but comments sets nothing."""
    file.write_text("# port: 1\n")
    assert settings("--config", str(file)).port == Settings().port


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--prot", "1"], "--prot 1; did you mean --port?"),
        (["--por", "1"], "--por 1; did you mean --port?"),
        (["--polcy=vtc"], "--polcy=vtc; did you mean --policy?"),
        (["--port"], "--port"),
        (["--port", "x"], "--port: must be a whole number"),
        (["--port", "70000"], "--port: must be at most 65535"),
        (["--queue-ttl", "x"], "--queue-ttl: must be a number"),
        (["--cors-origins", "a"], "--cors-origins: entry 1: must be an origin such as https://chat.example, or *"),
        (["--dlpm-home.quantum", "-3"], "--dlpm-home.quantum: quantum must be positive"),
        (["--d2lpm.quantum", "much"], "--d2lpm.quantum"),
        (["--d2lpm.quanta", "1"], "--d2lpm.quanta 1; did you mean --d2lpm.quantum?"),
        (["--worker", "http://a", "--worker", "b:1"], "--worker: entry 2: url"),
        (["--worker", "http://a:1,http://b:1"], "--worker: entry 1: url: not a URL like http://host:8000"),
        (["--worker", "http://a b"], "--worker: entry 1: url: not a URL like http://host:8000"),
        (["--brh.predictor", "oracle"], "brh.predictor: oracle needs the true lengths of answers"),
        (["--policy", "fair"], "--policy: there is no policy 'fair' (there are "),
        (["--policy", "DLPM-home"], "'DLPM-home'; did you mean dlpm_home? (there are "),
        (["--policy", "dlpm"], "'dlpm'; did you mean d2lpm+dlpm?"),
        (["--policy", "dlmp"], "'dlmp'; did you mean d2lpm+dlpm?"),
        (["--policy", "rr"], "'rr'; did you mean rr+dlpm?"),
        (["--policy", "rr+dlmp"], "--policy: unknown order 'dlmp'; did you mean dlpm? (known: dlpm, "),
        (["--policy", "consistent_hsah+vtc"], "unknown placement 'consistent_hsah'; did you mean consistent_hash?"),
        (["--policy", "rr+first"], "--policy: unknown order 'first' (known: dlpm, "),
        (["--policy", "consistent_hsah+dlmp"], "did you mean consistent_hash+dlpm?"),
        (["--access-log=maybe"], "--access-log"),
        (["--hash-secret", "short"], "--hash-secret"),
        (["--processes", "0"], "--processes: must be auto or a whole number from 1 on"),
        (["--ranks", "two"], "--ranks: must be auto, off or a whole number from 1 on"),
        (["--trusted-header", "X Client"], "--trusted-header: entry 1: "),
        (["--trusted-header", "x-client:"], "--trusted-header: entry 1: "),
        (["--host", ""], "--host: it has no value; leave it out for the default"),
        (["--state", ""], "--state: it has no value; leave it out for the default"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], named: str) -> None:
    """The line names the flag as the user wrote it."""
    assert named in mistake(*flags)


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("D2LPM_PROT", "1", "D2LPM_PROT; did you mean D2LPM_PORT?"),
        ("D2LPM_PORT", "x", "D2LPM_PORT: "),
        ("D2LPM_ACCESS_LOG", "perhaps", "D2LPM_ACCESS_LOG: must be yes or no"),
        ("D2LPM_ADMIN_KEY", "short", "D2LPM_ADMIN_KEY: must have at least 16 characters, not 5"),
        ("D2LPM_DLPM__QUANTUM", "x", "D2LPM_DLPM__QUANTUM: "),
        ("D2LPM_DLPM__QUANTA", "1", "D2LPM_DLPM__QUANTA"),
        ("D2LPM_DLPM", "1", "D2LPM_DLPM"),
        ("D2LPM_IDENTITY", "key,passport", "D2LPM_IDENTITY: entry 2: "),
        ("D2LPM_WORKER", "tcp://a:1", "D2LPM_WORKER: entry 1: url"),
        # What Kubernetes sets for Services named d2lpm, d2lpm-admin and d2lpm-d2lpm-router.
        ("D2LPM_PORT", "tcp://10.96.3.7:8000", "D2LPM_PORT is set by Kubernetes for a Service: set enableServiceLinks"),
        ("D2LPM_SERVICE_HOST", "10.96.3.7", "D2LPM_SERVICE_HOST is set by Kubernetes"),
        ("D2LPM_ADMIN_SERVICE_PORT_ADMIN", "9000", "D2LPM_ADMIN_SERVICE_PORT_ADMIN is set by Kubernetes"),
        ("D2LPM_PORT_8000_TCP_ADDR", "10.96.3.7", "D2LPM_PORT_8000_TCP_ADDR is set by Kubernetes"),
        ("D2LPM_D2LPM_ROUTER_SERVICE_HOST", "10.96.3.7", "D2LPM_D2LPM_ROUTER_SERVICE_HOST is set by Kubernetes"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, named: str) -> None:
    """An unknown variable with the prefix of the router is a mistake, also one that Kubernetes sets for a Service."""
    assert named in mistake(environment={variable: value, "HOME": "/", "d2lpm_port": "x"})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-queued: 1", "max-queued; did you mean max_queued?"),
        ("port: x", "router.yaml: port: "),
        ("dlpm: {quanta: 1}", "router.yaml: unknown key dlpm.quanta; did you mean dlpm.quantum?"),
        ("dlpm: {quantum: x}", "router.yaml: dlpm.quantum: "),
        ("dlpm: 1", "router.yaml: dlpm: "),
        ("worker: http://a", "router.yaml: worker: must be a list: [A, B], or a line for each entry"),
        ("alias: {a: b}", "router.yaml: alias: must be a list: [A, B], or a line for each entry"),
        ("worker: [{url: http://a, key: x}]", "router.yaml: worker: entry 1: unknown key key; did you mean api_key?"),
        ("dlmp: {quantum: 1}", "router.yaml: unknown key dlmp; did you mean dlpm?"),
        ("window: lerned", "router.yaml: window: must be learned, fixed or off; did you mean learned?"),
        ("identity: [key, adress]", "did you mean address?"),
        ("port: {a: 1}", "router.yaml: port: "),
        ("dlpm: {quantum: -3}", "router.yaml: dlpm.quantum: quantum must be positive"),
        ("port: 1\nhost:\n", "router.yaml: host: it has no value; leave it out for the default"),
        ("- port", "router.yaml: not a mapping"),
        ("port: [1", "router.yaml: line 1: "),
        ("\x01", "router.yaml"),
        ("? [a]\n: b", "router.yaml"),
        ("port: 1\nhost: a\nport: 2", "router.yaml: line 3: duplicate name port"),
        ("dlpm: {quantum: 1, quantum: 2}", "router.yaml: line 1: duplicate name quantum"),
    ],
)
def test_a_wrong_file_is_named(text: str, named: str, file: Path) -> None:
    """The line names the file and the key in it."""
    file.write_text(text)
    assert named in mistake("--config", str(file))


def test_a_missing_file_is_named(file: Path) -> None:
    """A missing file is named also if the environment gives it, and a directory is refused like a missing file."""
    assert f"{file}: No such file" in mistake("--config", str(file))
    assert f"{file}: No such file" in mistake(environment={"D2LPM_CONFIG": str(file)})
    assert "Is a directory" in mistake("--config", str(file.parent))


def test_a_mistake_does_not_repeat_a_secret(file: Path) -> None:
    """The message does not repeat a secret's value, because it may end in a log."""
    file.write_text("worker: [{url: 'http://hush@a', api_key: hush}]\nhash_secret: hush\n")
    assert "hush" not in mistake("--config", str(file))


def test_every_setting_is_a_key_and_a_flag() -> None:
    """The command line is derived from the model: every setting has a flag, groups one level deep."""
    paths = [key.path for key in keys()]
    assert {path[0] for path in paths} == set(Settings.model_fields)
    assert len(paths) == len(set(paths))
    assert {key.flag for key in keys()} >= {"--max-queued", "--d2lpm.charge-full-input"}


def test_every_setting_is_in_one_section() -> None:
    """Every setting belongs to one section of the help text and of the commented file."""
    placed = [name for section in SECTIONS for name in (*section.basic, *section.advanced)]
    assert sorted(placed) == sorted(key.path[0] for key in keys() if len(key.path) == 1)


def test_help_all_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag is shown with its help text and default, percent signs included."""
    with pytest.raises(SystemExit):
        parser().parse_args(["--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    for key in keys():
        assert key.about, key.flag
        assert " ".join(key.about.split()) in text
        assert key.flag in text
    assert text.count("(default: ") == len([key for key in keys() if key.default not in (None, ())])


def test_help_lists_the_basic_settings_on_one_screen() -> None:
    """The short help fits on one screen and shows only what most operators set."""
    text = parser().format_help()
    basic = {name for section in SECTIONS for name in section.basic}
    for key in keys():
        assert (f"{key.flag} " in text) == (key.path[0] in basic), key.flag
    assert len(text.splitlines()) <= 60


def test_help_shows_a_percent_sign_as_it_is() -> None:
    """A percent sign in a help text is printed as it is, although argparse formats with it."""
    made = Parser(prog="d2lpm")
    made.add_argument("--share", help=Key(("share",), float, 95.0, "A share in %.").help)
    assert "A share in %. (default: 95.0)" in made.format_help()
