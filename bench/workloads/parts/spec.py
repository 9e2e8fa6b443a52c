"""Named sets of parameters on a command line: `NAME` or `NAME:parameter=value,parameter=value`.

Several values of one parameter are joined by slashes, and so are the fields of a parameter that is a small dataclass.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from router.runtime.mistakes import unknown

T = TypeVar("T")

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_spec(text: str, table: Mapping[str, T]) -> T:
    """Return the entry of `table` with this name, with some of its parameters replaced.

    Raises ValueError if a name or parameter is unknown or a value invalid.
    """
    name, _, assignments = text.partition(":")
    if name not in table:
        raise ValueError(unknown("name", name, table))
    return changed(table[name], dict(split(each) for each in assignments.split(",") if each))


def split(assignment: str) -> tuple[str, str]:
    """Split into parameter and value. Raises ValueError if there is no `=`."""
    parameter, equals, value = assignment.partition("=")
    if not equals:
        raise ValueError(f"{assignment!r} is not parameter=value")
    return parameter.strip(), value.strip()


def changed(instance: T, values: Mapping[str, str]) -> T:
    """Return a copy of a dataclass instance with these values; `part.parameter` is a parameter of its field `part`.

    Raises ValueError as `parse_spec` does.
    """
    assert is_dataclass(instance)
    assert not isinstance(instance, type)
    hints = get_type_hints(type(instance))
    known = [field.name for field in fields(instance)]
    given: dict[str, object] = {}
    inner: dict[str, dict[str, str]] = {}
    for path, text in values.items():
        name, dot, rest = path.partition(".")
        if name not in known or (dot and not is_dataclass(getattr(instance, name))):
            raise ValueError(unknown("parameter", path, known))
        if dot:
            inner.setdefault(name, {})[rest] = text
        else:
            given[name] = _value(name, text, hints[name])
    given |= {name: changed(given.get(name, getattr(instance, name)), each) for name, each in inner.items()}
    return replace(instance, **given)


def _value(name: str, text: str, kind: Any) -> object:
    try:
        return _parsed(text, kind)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{text!r} is no value for {name}") from None


def _parsed(text: str, kind: Any) -> object:
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, UnionType):
        if NoneType in arguments and text.lower() == "none":
            return None
        return _parsed(text, next(each for each in arguments if each is not NoneType))
    if origin is tuple:
        return tuple(_parsed(each, arguments[0]) for each in text.split("/"))
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(*_of_fields(text.split("/"), kind))
    return _single(text, kind)


def _single(text: str, kind: Any) -> object:
    if get_origin(kind) is Literal:
        return {each: each for each in get_args(kind)}[text]
    if kind is bool:
        return _BOOLEANS[text.lower()]
    return kind(text)


def _of_fields(values: Sequence[str], kind: type) -> Iterator[object]:
    """Return the values of the first fields of a dataclass. Raises ValueError if there are more values than fields."""
    hints = get_type_hints(kind)
    kinds = [hints[field.name] for field in fields(kind)]
    return (_parsed(value, each) for value, each in zip(values, kinds[: len(values)], strict=True))
