"""Named sets of parameters on a command line: `NAME` or `NAME:parameter=value,parameter=value`."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_spec(text: str, table: Mapping[str, T]) -> T:
    """The entry of `table` with this name, some of its parameters replaced.

    Raises ValueError for a name or a parameter that is not there, or a value that it cannot have.
    """
    name, _, assignments = text.partition(":")
    if name not in table:
        raise ValueError(f"unknown name {name!r}, known: {', '.join(table)}")
    return changed(table[name], dict(split(each) for each in assignments.split(",") if each))


def split(assignment: str) -> tuple[str, str]:
    """Parameter and value. Raises ValueError where there is no `=`."""
    parameter, equals, value = assignment.partition("=")
    if not equals:
        raise ValueError(f"{assignment!r} is not parameter=value")
    return parameter.strip(), value.strip()


def changed(instance: T, values: Mapping[str, str]) -> T:
    """A copy of a dataclass's instance with these values. Raises ValueError as `parse_spec` does."""
    assert is_dataclass(instance)
    assert not isinstance(instance, type)
    hints = get_type_hints(type(instance))
    known = [field.name for field in fields(instance)]
    for parameter in values:
        if parameter not in known:
            raise ValueError(f"unknown parameter {parameter!r}, known: {', '.join(known) or 'none'}")
    return replace(instance, **{name: _value(name, text, hints[name]) for name, text in values.items()})


def _value(name: str, text: str, kind: Any) -> object:
    try:
        return _parsed(text, kind)
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is no value for {name}") from None


def _parsed(text: str, kind: Any) -> object:
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, UnionType):
        if NoneType in arguments and text.lower() == "none":
            return None
        return _parsed(text, next(each for each in arguments if each is not NoneType))
    if origin is tuple:
        return tuple(_parsed(each, arguments[0]) for each in text.split("/"))
    if origin is Literal:
        return {each: each for each in arguments}[text]
    if kind is bool:
        return _BOOLEANS[text.lower()]
    return kind(text)
