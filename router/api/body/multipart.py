"""Forms with files (RFC 7578), as audio comes: read as far as needed, and changed nowhere else.

python-multipart finds the parts, as it does in the engines, so that no name can be hidden from the router alone.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD_LIMIT: Final = 4096
"""Bytes of a field's value; longer ones are no names or flags."""
MAX_PARTS: Final = 1000
"""As Starlette, on which the engines are built, takes at most."""


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
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        return
    reading = _PartCollector(body)
    try:
        parser = MultipartParser(boundary, reading.callbacks())
        parser.logger.disabled = True  # it warns of what it did not expect, with which clients could fill the log
        parser.write(body)
    except FormParserError:
        return
    yield from reading.fields


class _PartCollector:
    """What the parser has found so far of a body that it is given in one piece."""

    def __init__(self, body: bytes) -> None:
        self.fields: list[Part] = []
        self._body = body
        self._count = 0
        self._begin()

    def callbacks(self) -> "MultipartCallbacks":
        """By the parser's names."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._name,
            "on_header_value": self._value,
            "on_header_end": self._end_header,
            "on_part_data": self._data,
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._header = self._content = self._disposition = b""
        self._headers_end = self._length = 0

    def _name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _value(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]
        self._headers_end = end

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._content
        self._header = self._content = b""

    def _data(self, _: bytes, start: int, end: int) -> None:
        self._length += end - start  # no place in the body: what looked like a boundary comes from elsewhere

    def _end(self) -> None:
        self._count += 1
        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name")
        if name is None or b"filename" in options or self._count > MAX_PARTS:
            return
        start = self._body.index(b"\r\n\r\n", self._headers_end) + 4
        self.fields.append(Part(name.decode(errors="replace"), start, start + self._length))
