"""Rejects harmful bodies: with token ids that crash an SGLang server, or too large in memory once parsed."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from router.errors import BadRequest, TooManyMembers

TOKEN_ID_MEMBERS: Final = ("prompt", "input", "input_ids", "query", "items", "documents", "text_1", "text_2")
"""Body members in which engines accept token ids in place of text: one list, or a list of lists."""
BIAS: Final = "logit_bias"
"""A body member whose keys are token ids."""
_WITH_IDS: Final = frozenset({*TOKEN_ID_MEMBERS, BIAS})


def largest_id(fields: Mapping[str, Any]) -> int:
    """The largest token id in a body; -1 if it has none. Raises BadRequest if one is negative."""
    largest = -1
    if _WITH_IDS.isdisjoint(fields):
        return largest
    for name in TOKEN_ID_MEMBERS:
        for ids in _lists(fields.get(name)):
            if min(ids) < 0:
                raise _outside(name)
            largest = max(largest, max(ids))  # noqa: PLW3301 - avoids copying a long list
    bias = fields.get(BIAS)
    for key in bias if isinstance(bias, dict) else ():
        if (digits := key.strip().removeprefix("-").removeprefix("+")).isdecimal():
            if key.strip().startswith("-"):
                raise _outside(BIAS)
            largest = max(largest, int(digits[:20]))
    return largest


def check_vocabulary(largest: int, size: int | None) -> None:
    """Raise BadRequest if the largest id is outside a vocabulary of `size` tokens. None: the size is not known."""
    if size is not None and largest >= size:
        raise BadRequest(f"Token ids must be below {size}, the size of the vocabulary.", code="invalid_value")


def _lists(value: object) -> Iterator[list[int]]:
    """The lists of integers in a member: the member itself, or its items."""
    if not isinstance(value, list) or not value:
        return
    if all(type(item) is int for item in value):
        yield value
    for item in value:
        if isinstance(item, list) and item and all(type(each) is int for each in item):
            yield item


def _outside(name: str) -> BadRequest:
    return BadRequest(f"`{name}` has a negative token id.", param=name, code="invalid_value")


OBJECT_BYTES: Final = 240
LIST_BYTES: Final = 72
ITEM_BYTES: Final = 48
"""Bytes of a Python object without its contents. An item is a number or a short text."""
OBJECT_BYTES_LIMIT: Final = 96 * 2**20
"""Bytes of parsed objects at most, not counting their texts."""
STEP_BYTES: Final = 2**20
"""Bytes counted in one step, during which the GIL is held for some tenths of a millisecond."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def check_weight(body: bytes) -> None:
    """Raise TooManyMembers if the objects of this JSON would take more than `OBJECT_BYTES_LIMIT` once parsed."""
    if _weight(body, 0, len(body)) <= OBJECT_BYTES_LIMIT or body.lstrip(b" \t\r\n")[:1] not in (b"{", b"["):
        return
    # Brackets and commas inside strings, such as code, are not structure and must not count. Each step holds the GIL,
    # so steps are small.
    weight = before = 0
    for string in _STRING.finditer(body):
        weight += ITEM_BYTES + _weight(body, before, string.start())
        before = string.end()
        if weight > OBJECT_BYTES_LIMIT:
            raise TooManyMembers
    if weight + _weight(body, before, len(body)) > OBJECT_BYTES_LIMIT:
        raise TooManyMembers


def _weight(body: bytes, start: int, end: int) -> int:
    if end - start > STEP_BYTES:
        return sum([_weight(body, at, min(at + STEP_BYTES, end)) for at in range(start, end, STEP_BYTES)])
    return (
        OBJECT_BYTES * body.count(b"{", start, end)
        + LIST_BYTES * body.count(b"[", start, end)
        + ITEM_BYTES * body.count(b",", start, end)
    )
