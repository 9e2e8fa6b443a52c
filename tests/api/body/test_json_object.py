import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.body.json_object import cut_member, insert_members, member_span, put_members, replace_member

KEYS = st.sampled_from(["usage", "choices", 'a"usage', "us\\age", "\u00fc", "", ',"usage":', "{", "]"])
TEXTS = st.one_of(st.text(max_size=8), KEYS, st.sampled_from(['"usage":{', "\\", '\\"', "}],", "\n\n", "data: x"]))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=6)


@st.composite
def objects(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """An object and one of the many ways to write it."""
    value = draw(OBJECTS)
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")]))
    text = json.dumps(
        value,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
        separators=separators,
    )
    return value, (draw(st.sampled_from(["", " \n"])) + text + draw(st.sampled_from(["", "\n "]))).encode()


@given(objects(), KEYS)
def test_span_is_exactly_the_member(written: tuple[dict[str, Any], bytes], key: str) -> None:
    """The span of a member, put into braces, is an object with that member alone; a missing one has no span."""
    value, data = written
    span = member_span(data, key)
    if key in value:
        assert span is not None
        assert json.loads(b"{" + data[slice(*span)] + b"}") == {key: value[key]}
    else:
        assert span is None


@given(objects(), KEYS)
def test_cut_removes_one_run_of_bytes(written: tuple[dict[str, Any], bytes], key: str) -> None:
    """A cut leaves the object without the member, with the other bytes unchanged."""
    value, data = written
    rest = cut_member(data, key)
    assert json.loads(rest) == {name: kept for name, kept in value.items() if name != key}
    start = next((at for at, (old, new) in enumerate(zip(data, rest, strict=False)) if old != new), len(rest))
    assert data.endswith(rest[start:])
    assert key in value or rest == data


@given(objects(), KEYS, VALUES)
def test_replaced_value_changes_nothing_else(written: tuple[dict[str, Any], bytes], key: str, new: object) -> None:
    """A member is replaced in its place, and the bytes on both sides of it stay."""
    value, data = written
    if key not in value:
        with pytest.raises(KeyError):
            replace_member(data, key, b"0")
        return
    span = member_span(data, key)
    assert span is not None
    replaced = replace_member(data, key, json.dumps(new).encode())
    assert json.loads(replaced) == {**value, key: new}
    assert replaced.startswith(data[: span[0]])
    assert replaced.endswith(data[span[1] :])


@given(objects(), st.integers(min_value=0, max_value=100))
def test_inserted_member_goes_to_the_front(written: tuple[dict[str, Any], bytes], spaces: int) -> None:
    """New members stand first, in their order, and every other byte stays, in an empty object too."""
    value, data = written
    data = data.replace(b"{", b"{" + b" " * spaces, 1)
    inserted = insert_members(data, {"new": b"[1]", "more": b"2"})
    assert list(json.loads(inserted).items()) == [("new", [1]), ("more", 2), *value.items()]
    assert inserted.replace(b'"new":[1],"more":2' + (b"," if value else b""), b"", 1) == data
    assert insert_members(data, {}) == data


def test_put_replaces_a_member_or_inserts_it() -> None:
    """An existing member is replaced in its place; a new one is inserted in front."""
    for data, put in (
        (b'{"a":1,"b":2}', b'{"c":4,"a":1,"b":3}'),
        (b'{"a":1}', b'{"b":3,"c":4,"a":1}'),
        (b'{"c":1, "b":2}', b'{"c":4, "b":3}'),
    ):
        assert put_members(data, {"b": b"3", "c": b"4"}, orjson.loads(data)) == put


def test_key_that_ends_like_another_is_not_taken_for_it() -> None:
    """An escaped quote inside a key does not begin a key."""
    assert member_span(b'{"a":1,"b\\"usage":2}', "usage") is None


def test_last_of_repeated_members_counts() -> None:
    """Of several members with one name the span is that of the last, which is the one that parsers take."""
    data = b'{"a":1,"b":2,"\\u0061":3}'
    assert orjson.loads(data)["a"] == 3
    span = member_span(data, "a")
    assert span is not None
    assert data[slice(*span)] == b'"\\u0061":3'


def test_deep_and_long_values_are_skipped() -> None:
    """Depth costs no stack, and hostile runs of quotes and backslashes cost no more than their length."""
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"b":1}'
    assert member_span(deep, "b") == (len(deep) - 6, len(deep) - 1)
    long = orjson.dumps({"a": '\\"' * 200_000, "b": 1})
    assert member_span(long, "b") == (len(long) - 6, len(long) - 1)


def test_a_member_is_put_before_millions_of_bytes() -> None:
    """The rest is unchanged to the byte."""
    data = b' {"a":"' + bytes(range(65, 91)) * 120_000 + b'"} '
    same = insert_members(data, {"new": b"1"}) == data.replace(b"{", b'{"new":1,', 1)
    assert same  # on a plain comparison, pytest would take minutes to show how megabytes differ
