"""Where settings come from: flags, else the environment, else a YAML file, else their defaults.

Every source gives what it holds as text by key, with the operator's own spelling of that key; the model alone
turns text into values. So `off` means the same in all three, and an error names what was written.
"""

import argparse
import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Final, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml
from pydantic import ValidationError

from router.config.settings import Settings
from router.errors import ConfigError
from router.runtime import yaml_file as plain_yaml

PREFIX: Final = "D2LPM_"
ABOUT: Final = (
    f"Each setting is also an environment variable, like {PREFIX}MAX_QUEUED or {PREFIX}DLPM__QUANTUM, and a key of "
    "the YAML file that --config names, like max_queued, or quantum under dlpm. A flag counts before a variable, a "
    "variable before the file. A list is a flag repeated, or a variable with commas, and replaces the list below it."
)

KeyPath = tuple[str, ...]
"""The name of a setting, or the names of a group and of a parameter in it."""


@dataclass(frozen=True, slots=True)
class Key:
    """One setting, as the sources see it."""

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
        """Its text and default, as argparse wants them."""
        return f"{self.about} (default: {_shown(self.default)})".replace("%", "%%")


@dataclass(frozen=True, slots=True)
class Given:
    """What a source says about a key, and how it is spelled there."""

    value: object
    spelling: str


def keys() -> Iterator[Key]:
    """All settings, those of the groups last."""
    for name, field in Settings.model_fields.items():
        if not is_dataclass(field.annotation):
            yield Key((name,), field.annotation, field.default, field.description or "")
    for name, kind in groups().items():
        types, about = get_type_hints(kind), _docstrings(kind)
        for parameter in fields(kind):
            yield Key((name, parameter.name), types[parameter.name], parameter.default, about.get(parameter.name, ""))


def groups() -> dict[str, type]:
    """The settings that are groups of parameters."""
    annotations = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {name: kind for name, kind in annotations.items() if isinstance(kind, type) and is_dataclass(kind)}


def _docstrings(kind: type) -> dict[str, str]:
    """The text right below each field in the source of a class or of a class above it: a dataclass does not keep it."""
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser a flag for each setting; those that the operator sets are in its namespace under the flag."""
    sections = {name: parser.add_argument_group(name, inspect.getdoc(kind)) for name, kind in groups().items()}
    for key in keys():
        section = sections.get(key.path[0], parser)
        if key.annotation is bool:
            section.add_argument(
                key.flag, dest=key.flag, help=key.help, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS
            )
        else:
            section.add_argument(
                key.flag,
                dest=key.flag,
                help=key.help,
                action="append" if key.is_list else "store",
                metavar=_metavar(key.annotation),
                default=argparse.SUPPRESS,
            )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _metavar(annotation: object) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    return {int: "N", float: "X"}.get(annotation, "TEXT") if isinstance(annotation, type) else "TEXT"


def load(flags: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
    """The settings from all sources; `flags` is a namespace of a parser that has been through `add_flags`.

    Raises ConfigError, with one line that names what is wrong, and where it was written.
    """
    given = _from_environment(environment) | _from_flags(flags)
    config = given.get(("config",))
    if config is not None:
        given = _from_file(str(config.value)) | given
    try:
        return Settings.model_validate(_nested(given))
    except ValidationError as error:
        raise ConfigError(_first_line(error, given)) from None


def _from_flags(flags: Mapping[str, object]) -> dict[KeyPath, Given]:
    return {key.path: Given(flags[key.flag], key.flag) for key in keys() if key.flag in flags}


def _from_environment(environment: Mapping[str, str]) -> dict[KeyPath, Given]:
    """A variable that is empty counts as not set, as it is in a compose file without a value for it."""
    known = {key.variable: key for key in keys()}
    given = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{_instead(variable, known)}")
        if text:
            key = known[variable]
            value = [entry.strip() for entry in text.split(",")] if key.is_list else text
            given[key.path] = Given(value, variable)
    return given


def read_yaml(path: str) -> object:
    """A file's document, every scalar as its text. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return plain_yaml.read(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def _from_file(path: str) -> dict[KeyPath, Given]:
    document = read_yaml(path)
    known = {".".join(key.path): key for key in keys()}
    given = {}
    for name, value in _flat(document, path):
        if name not in known:
            raise ConfigError(f"{path}: unknown key {name}{_instead(name, known)}")
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


def _instead(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; is it {close[0]}?" if close else ""


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
    location = tuple(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
    path = max((path for path in given if location[: len(path)] == path), key=len, default=())
    where = [given[path].spelling] if path else []
    return ": ".join([*where, refusal(error, len(path))])


def refusal(error: ValidationError, skipped: int = 0) -> str:
    """The first thing that a model refuses and where, without the value, which may be a secret.

    `skipped`: how much of where it is need not be told.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    said = first["msg"].removeprefix("Value error, ")
    # Of a secret's characters pydantic says "items".
    if first["type"] == "too_short" and first["ctx"]["field_type"] == "Value":
        said = "Value should have at least {min_length} characters, not {actual_length}".format_map(first["ctx"])
    return ": ".join([*map(str, first["loc"][skipped:]), said])


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where its base prints the usage and ends the program."""

    def error(self, message: str) -> NoReturn:
        """See the class."""
        raise ConfigError(message)
