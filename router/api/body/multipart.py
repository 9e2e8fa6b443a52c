"""Reads and edits fields of forms with files (RFC 7578), such as audio uploads. All other bytes stay unchanged.

The parser is python-multipart, as in the engines, so that a field which an engine reads cannot be hidden from the
router.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.errors import BadRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD_LIMIT: Final = 4096
"""Bytes of a field's value at most. Longer values are not names or flags and are ignored."""
MAX_PARTS: Final = 1000
"""Fields at most, and files: the limits of Starlette, on which the engines are built."""
NAMING_BYTES: Final = 2**17
"""Bytes at most of all headers that name the parts: reading them takes up to 0.7 µs per byte."""
UTF_8: Final = (b"utf-8", b"utf8")


class Part(NamedTuple):
    """A field without a file, and the position of its value in the body."""

    name: str
    start: int
    end: int


def is_form(content_type: str) -> bool:
    """Return whether a body of this content type is a form with files."""
    return media_type(content_type) == "multipart/form-data"


def media_type(content_type: str) -> str:
    """Return the media type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def form_fields(body: bytes, content_type: str) -> dict[str, str]:
    """Return the short fields without files; of a repeated field the last. Empty if the body is not a valid form.

    Raises BadRequest for a form in which the router could miss a field: with more parts than engines accept, or in a
    character set in which its names may look different.
    """
    return {
        part.name: body[part.start : part.end].decode(errors="replace")
        for part in _parts(body, content_type)
        if part.end - part.start <= FIELD_LIMIT
    }


def replace_field(body: bytes, content_type: str, name: str, value: str) -> bytes:
    """Replace the value of every field with this name."""
    pieces: list[bytes] = []
    at = 0
    for part in _parts(body, content_type):
        if part.name == name:
            pieces += (body[at : part.start], value.encode())
            at = part.end
    return b"".join([*pieces, body[at:]])


def put_field(body: bytes, content_type: str, name: str, value: str) -> bytes:
    """Replace the value of every field with this name, or insert such a field if there is none."""
    if name in {part.name for part in _parts(body, content_type)}:
        return replace_field(body, content_type, name, value)
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    first = body.lstrip(b"\r\n")  # as parsers skip line ends before the first boundary
    if not boundary or not first.startswith(b"--" + boundary):
        return body
    head = b'--%b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n' % (boundary, name.encode())
    return b"".join((head, value.encode(), b"\r\n", first))


def _parts(body: bytes, content_type: str) -> Iterator[Part]:
    options = parse_options_header(content_type)[1]
    if options.get(b"charset", UTF_8[0]).lower() not in UTF_8:
        raise BadRequest("A form must be UTF-8, without another charset.", code="unsupported_content_type")
    boundary = options.get(b"boundary")
    if not boundary:
        return
    collector = _PartCollector(body)
    try:
        parser = MultipartParser(boundary, collector.callbacks())
        parser.logger.disabled = True  # else clients could fill the log with its warnings
        parser.write(body)
    except FormParserError:
        return
    yield from collector.fields


class _PartCollector:
    """Collects the parts that the parser finds in a body, which it gets in one piece."""

    def __init__(self, body: bytes) -> None:
        self.fields: list[Part] = []
        self._body = body
        self._fields_seen = self._others_seen = self._naming_bytes = 0
        self._begin()

    def callbacks(self) -> "MultipartCallbacks":
        """Return the callbacks under the parser's names for them."""
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
            self._naming_bytes += len(self._content)
            if self._naming_bytes > NAMING_BYTES:
                raise BadRequest("The names of the form's fields and files are too long.", code="invalid_value")
        self._header = self._content = b""

    def _data(self, _: bytes, start: int, end: int) -> None:
        self._length += end - start  # `start` is no position in the body: for a false boundary `data` is another buffer

    def _end(self) -> None:
        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name")
        is_field = name is not None and b"filename" not in options
        self._fields_seen += is_field
        self._others_seen += not is_field
        if max(self._fields_seen, self._others_seen) > MAX_PARTS:  # the rest is not read: it may be 300,000 parts
            raise BadRequest(f"A form can have {MAX_PARTS} fields and {MAX_PARTS} files at most.", code="invalid_value")
        if name is None or not is_field:
            return
        start = self._body.index(b"\r\n\r\n", self._headers_end) + 4
        self.fields.append(Part(name.decode(errors="replace"), start, start + self._length))
