"""Bodies that would harm: token ids that end an SGLang server, and bodies that take too much memory once parsed."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from router.errors import BadRequest, TooManyMembers

TOKEN_ID_MEMBERS: Final = ("prompt", "input", "input_ids", "query", "items", "documents", "text_1", "text_2")
"""Body members in which engines take token ids for a text: one list, or a list of lists."""
BIAS: Final = "logit_bias"
"""Its keys are token ids."""


def largest_id(fields: Mapping[str, Any]) -> int:
    """The largest token id in a body; -1 where it names none. Raises BadRequest for one below 0."""
    largest = -1
    for name in TOKEN_ID_MEMBERS:
        for ids in _lists(fields.get(name)):
            if min(ids) < 0:
                raise _outside(name)
            largest = max(largest, max(ids))  # noqa: PLW3301 - a list may be long
    bias = fields.get(BIAS)
    for key in bias if isinstance(bias, dict) else ():
        if (digits := key.strip().removeprefix("-").removeprefix("+")).isdecimal():
            if key.strip().startswith("-"):
                raise _outside(BIAS)
            largest = max(largest, int(digits[:20]))
    return largest


def check_vocabulary(largest: int, size: int | None) -> None:
    """Raises BadRequest for an id that is not in a vocabulary of this size; None for one that is not known."""
    if size is not None and largest >= size:
        raise BadRequest(f"Token ids must be below {size}, the size of the vocabulary.", code="invalid_value")


def _lists(value: object) -> Iterator[list[int]]:
    """The lists of whole numbers in a member, which is one or has some."""
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
"""What Python's objects take, without what is in them; an item is a number, or a short text."""
OBJECT_BYTES_LIMIT: Final = 96 * 2**20
"""Bytes of objects, beside those of their texts."""
STEP_BYTES: Final = 2**20
"""Bytes that are counted at once: some tenths of a millisecond for which Python's lock is held."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def check_weight(body: bytes) -> None:
    """Raise TooManyMembers for JSON that would take more than `OBJECT_BYTES_LIMIT` bytes of objects when it is parsed."""
    if _weight(body, 0, len(body)) <= OBJECT_BYTES_LIMIT or body.lstrip(b" \t\r\n")[:1] not in (b"{", b"["):
        return
    # Only what stands outside strings is structure, as code inside of them is not. Looked for in small steps, as each
    # holds Python's lock.
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
