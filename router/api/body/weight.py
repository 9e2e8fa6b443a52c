"""How much memory a body takes once it is parsed, without parsing it.

A short member costs many times its bytes: sixteen megabytes of `{"":0},` become half a gigabyte of objects.
"""

import re
from typing import Final

from router.errors import TooManyMembers

OBJECT_BYTES: Final = 240
LIST_BYTES: Final = 72
ITEM_BYTES: Final = 48
"""What Python's objects take, without what is in them; an item is a number, or a short text."""
MOST: Final = 96 * 2**20
"""Bytes of objects, beside those of their texts."""
STEP: Final = 2**20
"""Bytes that are counted at once: some tenths of a millisecond for which Python's lock is held."""
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def check_weight(body: bytes) -> None:
    """Raise TooManyMembers for JSON that would take more than `MOST` bytes of objects when it is parsed."""
    if _weight(body, 0, len(body)) <= MOST or body.lstrip(b" \t\r\n")[:1] not in (b"{", b"["):
        return
    # Only what stands outside strings is structure, as code inside of them is not. Looked for in small steps, as each
    # holds Python's lock.
    weight = before = 0
    for string in _STRING.finditer(body):
        weight += ITEM_BYTES + _weight(body, before, string.start())
        before = string.end()
        if weight > MOST:
            raise TooManyMembers
    if weight + _weight(body, before, len(body)) > MOST:
        raise TooManyMembers


def _weight(body: bytes, start: int, end: int) -> int:
    if end - start > STEP:
        return sum([_weight(body, at, min(at + STEP, end)) for at in range(start, end, STEP)])
    return (
        OBJECT_BYTES * body.count(b"{", start, end)
        + LIST_BYTES * body.count(b"[", start, end)
        + ITEM_BYTES * body.count(b",", start, end)
    )
