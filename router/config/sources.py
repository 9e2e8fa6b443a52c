"""Reads settings from flags, the environment and a YAML file, in this order of precedence.

Every source yields text by key, together with the operator's own spelling of that key; only the settings model turns
text into values. So `off` means the same in all three sources, and an error quotes what the operator wrote.
"""

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from router.auth.identity import IdentitySource
from router.config.sections import SECTIONS
from router.config.settings import Settings
from router.errors import ConfigError
from router.runtime import yaml_file
from router.runtime.mistakes import did_you_mean, place_in, what_is_wrong

PREFIX: Final = "D2LPM_"
_SERVICE_LINK: Final = re.compile(r"D2LPM_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_[0-9]+_(TCP|UDP)(_\w+)?)")
"""Variables that Kubernetes adds to a pod for each Service whose name begins with d2lpm."""
ABOUT: Final = (
    "Each flag is also an environment variable (--max-queued: D2LPM_MAX_QUEUED, --dlpm.quantum: D2LPM_DLPM__QUANTUM) "
    "and a key of the --config file (max_queued; quantum under dlpm). Flags override variables, and variables the file."
    " In a variable, commas separate the values of a repeatable flag."
)
_METAVARS: Final = {
    "admin_host": "ADDRESS",
    "admin_key": "KEY",
    "alias": "NAME=MODEL",
    "allowed_hosts": "NAME",
    "cluster": "URL|kubernetes",
    "cluster_address": "HOST:PORT",
    "cluster_store": "URL",
    "cors_origins": "ORIGIN",
    "decode": "URL",
    "hash_secret": "KEY",
    "host": "ADDRESS",
    "identity": "|".join(IdentitySource),
    "kubernetes_api": "URL",
    "kubernetes_namespace": "NAME",
    "policy": "NAME",
    "prefill": "URL",
    "processes": "N|auto",
    "ranks": "N|auto|off",
    "session_labels": "NAME",
    "trusted_header": "NAME",
    "trusted_proxy": "ADDRESS",
    "worker": "URL",
    "worker_api_key": "KEY",
    "worker_dns": "URL",
    "worker_kubernetes": "SELECTOR",
}
"""What the help text shows for the value of a setting whose type does not say enough."""

KeyPath = tuple[str, ...]
"""The name of a setting, or the name of a group and of a parameter in it."""


@dataclass(frozen=True, slots=True)
class Key:
    """One setting with its names in each source."""

    path: KeyPath
    annotation: object
    default: object
    about: str

    @property
    def flag(self) -> str:
        return "--" + ".".join(self.path).replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + "__".join(self.path).upper()

    @property
    def is_list(self) -> bool:
        return get_origin(self.annotation) is tuple

    @property
    def help(self) -> str:
        """Help text with the default, if there is one, escaped for argparse."""
        default = "" if self.default in (None, ()) else f" (default: {_shown(self.default)})"
        return f"{self.about}{default}".replace("%", "%%")


@dataclass(frozen=True, slots=True)
class Given:
    """The value that a source holds for a key, and the spelling of the key there."""

    value: object
    spelling: str


def keys() -> Iterator[Key]:
    """Yield all settings, the policy parameters last."""
    for name, field in Settings.model_fields.items():
        if not is_dataclass(field.annotation):
            yield Key((name,), field.annotation, field.default, field.description or "")
    for name, kind in groups().items():
        types, about = get_type_hints(kind), _docstrings(kind)
        for parameter in fields(kind):
            yield Key((name, parameter.name), types[parameter.name], parameter.default, about.get(parameter.name, ""))


def groups() -> dict[str, type]:
    """Return the classes of policy parameters by the name of their group."""
    annotations = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {name: kind for name, kind in annotations.items() if isinstance(kind, type) and is_dataclass(kind)}


def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field in the source of a class and its bases: a dataclass does not keep them."""
    about = {}
    for each in reversed(kind.__mro__):
        if is_dataclass(each):
            about.update(_own_docstrings(each))
    return about


def _own_docstrings(kind: type) -> dict[str, str]:
    definition = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(str(text.value.value))
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def add_flags(parser: argparse.ArgumentParser, *, full: bool = False) -> None:
    """Add a flag for each setting; the flags that the operator gives are in the namespace under their own spelling.

    The help text lists the basic settings only, unless `full`; `--help-all` lists all of them.
    """
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show all settings and exit")
    by_path = {key.path: key for key in keys()}
    for section in SECTIONS:
        group = parser.add_argument_group(section.title)
        for name in (*section.basic, *section.advanced):
            _add_flag(group, by_path[name,], shown=full or name in section.basic)
    for name, kind in groups().items():
        group = parser.add_argument_group(f"Parameters of {name}", inspect.getdoc(kind) if full else None)
        for path, key in by_path.items():
            if len(path) == 2 and path[0] == name:
                _add_flag(group, key, shown=full)


class HelpAll(argparse.Action):
    """Print the help text with all settings, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - argparse's signature
        values: object,  # noqa: ARG002
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        everything = type(parser)(
            prog=parser.prog,
            usage=parser.usage,
            description=parser.description,
            epilog=parser.epilog,
            formatter_class=parser.formatter_class,
        )
        add_flags(everything, full=True)
        everything.print_help()
        parser.exit()


def _add_flag(group: argparse._ArgumentGroup, key: Key, *, shown: bool) -> None:
    about = key.help if shown else argparse.SUPPRESS
    if key.annotation is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(key.flag, dest=key.flag, help=about, action=action, default=argparse.SUPPRESS)
    else:
        group.add_argument(
            key.flag,
            dest=key.flag,
            help=about,
            action="append" if key.is_list else "store",
            metavar=_metavar(key),
            default=argparse.SUPPRESS,
        )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _metavar(key: Key) -> str:
    if get_origin(key.annotation) is Literal:
        return "|".join(get_args(key.annotation))
    if (name := _METAVARS.get(key.path[-1])) is not None:
        return name
    kinds = get_args(key.annotation) or (key.annotation,)
    return next((word for kind, word in ((Path, "PATH"), (int, "N"), (float, "X")) if kind in kinds), "TEXT")


def load(flags: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
    """Merge the settings of all sources; `flags` is the namespace of a parser made by `add_flags`.

    Raises ConfigError with one line that names the mistake and where it stands.
    """
    given = _from_environment(environment) | _from_flags(flags)
    config = given.get(("config",))
    if config is not None:
        given = _from_file(str(config.value)) | given
    for entry in given.values():
        if entry.value == "":  # would be all addresses of this machine as a host, and this folder as a path
            raise ConfigError(f"{entry.spelling}: it has no value; leave it out for the default")
    try:
        return Settings.model_validate(_nested(given))
    except ValidationError as error:
        raise ConfigError(_first_line(error, given)) from None


def _from_flags(flags: Mapping[str, object]) -> dict[KeyPath, Given]:
    return {key.path: Given(flags[key.flag], key.flag) for key in keys() if key.flag in flags}


def _from_environment(environment: Mapping[str, str]) -> dict[KeyPath, Given]:
    """Read the variables. An empty one counts as unset: a compose file passes those without a value as empty."""
    known = {key.variable: key for key in keys()}
    given = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        if _SERVICE_LINK.fullmatch(variable) or (variable.endswith("_PORT") and text.startswith("tcp://")):
            raise ConfigError(
                f"{variable} is set by Kubernetes for a Service: set enableServiceLinks: false in the pod"
            )
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{did_you_mean(variable, known)}")
        if text:
            key = known[variable]
            value = [entry.strip() for entry in text.split(",")] if key.is_list else text
            given[key.path] = Given(value, variable)
    return given


def read_yaml(path: str) -> object:
    """Read a YAML file with every scalar as its text. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return yaml_file.read(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _from_file(path: str) -> dict[KeyPath, Given]:
    document = read_yaml(path)
    known = {".".join(key.path): key for key in keys()}
    given = {}
    for name, value in _flat(document, path):
        if name not in known:
            raise ConfigError(f"{path}: unknown key {name}{did_you_mean(name, [*known, *groups()])}")
        given[known[name].path] = Given(value, f"{path}: {name}")
    return given


def _flat(document: object, path: str) -> Iterator[tuple[str, object]]:
    if document is None:
        return
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: not a mapping of keys to values")
    for name, value in document.items():
        if name not in groups():
            yield str(name), value
        elif isinstance(value, dict):
            yield from ((f"{name}.{parameter}", inner) for parameter, inner in value.items())
        else:
            raise ConfigError(f"{path}: {name}: not a mapping of parameters to values")


def _nested(given: Mapping[KeyPath, Given]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for path, entry in given.items():
        if len(path) == 1:
            tree[path[0]] = entry.value
        else:
            group = tree.setdefault(path[0], {})
            assert isinstance(group, dict)
            group[path[1]] = entry.value
    return tree


def _first_line(error: ValidationError, given: Mapping[KeyPath, Given]) -> str:
    first = error.errors(include_url=False)[0]
    location = tuple(map(str, first["loc"]))
    path = max((path for path in given if location[: len(path)] == path), key=len, default=())
    if path:
        return f"{given[path].spelling}: {refusal(error, len(path))}"
    # The parameters of a policy are checked together: the message names those that do not fit.
    named = set(re.findall(r"\w+", first["msg"]))
    for path, entry in given.items():
        if path[:-1] == location and path[-1] in named:
            return f"{entry.spelling}: {refusal(error, len(location))}"
    return refusal(error)


def refusal(error: ValidationError, skipped: int = 0) -> str:
    """Return the first mistake that the model found and its location, without the value, which could be a secret.

    `skipped`: how many leading parts of the location to leave out.
    """
    first = error.errors(include_url=False)[0]
    return ": ".join([*place_in(first["loc"][skipped:]), what_is_wrong(first)])
