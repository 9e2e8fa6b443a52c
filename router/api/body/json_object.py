"""JSON objects as bytes: parsing one, and editing single members, which leaves all other bytes unchanged. Pure.

The functions that edit require valid JSON whose root is an object; the caller has parsed it.
"""

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, Final

import orjson

from router.errors import WorkerBroke

# Possessive quantifiers do not backtrack, so hostile input takes linear time and constant stack.
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_KEY: Final = re.compile(rb"[\s,]*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_SCALAR: Final = re.compile(_STRING + rb"|[^\s,{}\[\]]++", re.DOTALL)
STEP_BYTES: Final = 2**20
"""Bytes copied in one step."""
_EMPTY: Final = re.compile(rb"\s*+}")
_TO_BRACKET: Final = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+[{}\[\]]", re.DOTALL)


def load(body: bytes) -> dict[str, Any] | None:
    """Parse a JSON object. Returns None for anything else."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a worker's answer. Raises WorkerBroke unless it is a JSON object."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise WorkerBroke("A worker's answer is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise WorkerBroke("A worker's answer is not a JSON object.")
    return fields


def text_or_empty(value: object) -> str:
    """Return a string unchanged, and an empty string for anything else, which may be nested too deeply to serialise."""
    return value if isinstance(value, str) else ""


def member_span(data: bytes, key: str) -> tuple[int, int] | None:
    """Return the start of the key and the end of the value of a top-level member; None if there is none.

    Of repeated members, the last counts, as in parsers.
    """
    span = _span_near_end(data, orjson.dumps(key))
    if span is None:
        for name, start, end in _members(data):
            if name == key:
                span = (start, end)
    return span


def _span_near_end(data: bytes, name: bytes) -> tuple[int, int] | None:
    """A shortcut for members after the long ones, where engines and client libraries put most members edited here.

    An unescaped quote after a comma or brace opens a string. A brace and the data from that quote on form a valid
    object only if the string is a key of the root object: in an inner object a brace would be left over. Without
    a backslash in the rest, the same key cannot follow in another spelling.
    """
    start = data.rfind(name)
    if start < 0 or not data[max(0, start - 16) : start].rstrip().endswith((b",", b"{")) or b"\\" in data[start:]:
        return None
    try:
        orjson.loads(b"{" + data[start:])
    except orjson.JSONDecodeError:
        return None
    match = _KEY.match(data, start)
    return (start, _value_end(data, match.end())) if match else None


def member_value(data: bytes, key: str) -> bytes | None:
    """Return the value of a top-level member, as it stands in the data; None if there is none."""
    span = member_span(data, key)
    if span is None:
        return None
    name = _KEY.match(data, span[0])
    assert name is not None, "a member begins with its key"
    return data[name.end() : span[1]]


def cut_member(data: bytes, key: str) -> bytes:
    """Remove a top-level member and its comma from `data`. Returns `data` unchanged if there is no such member."""
    span = member_span(data, key)
    if span is None:
        return data
    before, after = data[: span[0]].rstrip(), data[span[1] :].lstrip()
    if before.endswith(b","):
        return before[:-1] + data[span[1] :]
    return data[: span[0]] + (after[1:] if after.startswith(b",") else after)


def cut_members(data: bytes, names: Container[str]) -> bytes:
    """Remove all top-level members of these names, in one pass however often they are repeated."""
    kept = [data[start:end] for name, start, end in _members(data) if name not in names]
    return data[: data.index(b"{") + 1] + b",".join(kept) + b"}"


def replace_member(data: bytes, key: str, value: bytes) -> bytes:
    """Replace the value of a top-level member by another, given as JSON. Raises KeyError if there is no such member."""
    span = member_span(data, key)
    if span is None:
        raise KeyError(key)
    return data[: span[0]] + orjson.dumps(key) + b":" + value + data[span[1] :]


def insert_members(data: bytes, values: Mapping[str, bytes]) -> bytes:
    """Insert top-level members, given as JSON, at the front of `data`, without a check for duplicates."""
    return insert_first(data, join_members(values)) if values else data


def join_members(values: Mapping[str, bytes]) -> bytes:
    """Join members, given as JSON, as they stand between the braces of an object."""
    return b",".join([orjson.dumps(key) + b":" + value for key, value in values.items()])


def insert_first(data: bytes, new: bytes) -> bytes:
    """Insert joined members, at least one, at the front of `data`, without a check for duplicates."""
    at = data.find(b"{") + 1
    comma = b"" if _EMPTY.match(data, at) else b","
    if len(data) <= STEP_BYTES:
        return b"".join((data[:at], new, comma, data[at:]))
    # Each slice holds the GIL, so slices are small. Joining many bytes releases it.
    rest = [data[start : start + STEP_BYTES] for start in range(at, len(data), STEP_BYTES)]
    return b"".join((data[:at], new, comma, *rest))


def put_members(data: bytes, values: Mapping[str, bytes], members: Container[str]) -> bytes:
    """Set top-level members to values given as JSON. `members`: the names of the members that `data` has."""
    new = {}
    for key, value in values.items():
        if key in members:
            data = replace_member(data, key, value)
        else:
            new[key] = value
    return insert_members(data, new)


def _members(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of every top-level member, without commas and outer white space."""
    at = data.index(b"{") + 1
    while match := _KEY.match(data, at):
        at = _value_end(data, match.end())
        yield orjson.loads(match[1]), match.start(1), at


def _value_end(data: bytes, at: int) -> int:
    if data[at] not in b"{[":
        scalar = _SCALAR.match(data, at)
        return scalar.end() if scalar else len(data)
    depth = 0
    for match in _TO_BRACKET.finditer(data, at):
        depth += 1 if data[match.end() - 1] in b"{[" else -1
        if depth == 0:
            return match.end()
    return len(data)
