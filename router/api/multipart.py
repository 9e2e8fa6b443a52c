"""Forms with files (RFC 7578), as audio comes: read as far as needed, and changed nowhere else."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

FIELD_LIMIT: Final = 4096
"""Bytes of a field's value; longer ones are no names or flags."""
_BOUNDARY: Final = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_NAME: Final = re.compile(rb'[;\s]name="?([^";\r\n]*)"?', re.IGNORECASE)


class Part(NamedTuple):
    """A field without a file, and where its value stands in the body."""

    name: str
    start: int
    end: int


def is_form(content_type: str) -> bool:
    """Whether a body of this type is such a form."""
    return media_type(content_type) == "multipart/form-data"


def media_type(content_type: str) -> str:
    """Without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def form_fields(body: bytes, content_type: str) -> dict[str, str]:
    """The short fields without files; of a repeated one the last. What is no form has none."""
    return {
        part.name: body[part.start : part.end].decode(errors="replace")
        for part in _parts(body, content_type)
        if part.end - part.start <= FIELD_LIMIT
    }


def replace_field(body: bytes, content_type: str, name: str, value: str) -> bytes:
    """`body` with another value for each field of this name."""
    pieces: list[bytes] = []
    at = 0
    for part in _parts(body, content_type):
        if part.name == name:
            pieces += (body[at : part.start], value.encode())
            at = part.end
    return b"".join([*pieces, body[at:]])


def _parts(body: bytes, content_type: str) -> Iterator[Part]:
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        return
    mark = b"--" + (boundary[1] or boundary[2]).encode()
    at = body.find(mark)
    while at >= 0:
        after = body.find(b"\r\n" + mark, at)
        head = body.find(b"\r\n\r\n", at)
        if after < 0 or not at < head < after:
            return
        lines = body[at + len(mark) : head]
        if (name := _NAME.search(lines)) is not None and b"filename" not in lines.lower():
            yield Part(name[1].decode(errors="replace"), head + 4, after)
        at = after + 2
