"""Server-sent events: bytes into events, however they are cut, and the data of one event.

Events are kept as the bytes that came (WHATWG HTML, section 9.2): lines end in LF, CRLF or CR, a blank line ends an
event, and a byte order mark at the start counts for nothing.
"""

import re
from typing import Final

from router.errors import WorkerBroke

EVENT_LIMIT: Final = 16 * 2**20
"""Bytes of one event; logprobs and long tool calls stay far below."""

BLANK: Final = frozenset({b"\n\n", b"\r\n\r\n"})
"""Events of nothing: to be passed over quickly, since a worker may send very many."""
_FIELDS: Final = frozenset({b"", b"data", b"event", b"id", b"retry"})
"""Names of a line's field; a comment has none."""
_BOM: Final = b"\xef\xbb\xbf"
# A CR at the very end may be half of a CRLF, so it ends an event only when the next byte is there.
_BLANK_LINE: Final = re.compile(rb"(?>\r\n|\n|\r)(?:\r\n|\n|\r(?=[^\n]))")


class EventSplitter:
    """Cuts a stream of bytes after each blank line; what was fed equals what came out and `rest()`."""

    __slots__ = ("_limit", "_searched", "_tail")

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._tail = bytearray()
        self._searched = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is held: what comes next begins an event."""
        return not self._tail

    def feed(self, block: bytes) -> list[bytes]:
        """The events that are complete now, each with the blank line that ends it.

        Raises WorkerBroke where an event grows beyond the limit.
        """
        if not self._tail:
            data = block
        else:
            self._tail += block
            if not _BLANK_LINE.search(self._tail, self._searched):
                return self._hold()
            data = bytes(self._tail)
        events, rest = _cut(data)
        self._tail[:] = rest
        self._hold()
        return events

    def rest(self) -> bytes:
        """What came after the last complete event; the splitter forgets it."""
        rest = bytes(self._tail)
        self._tail.clear()
        self._searched = 0
        return rest

    def _hold(self) -> list[bytes]:
        if len(self._tail) > self._limit:
            raise WorkerBroke(f"A worker sent an event of more than {self._limit} bytes.")
        # A blank line takes at most four bytes, so three of them may be here.
        self._searched = max(0, len(self._tail) - 3)
        return []


def _cut(data: bytes) -> tuple[list[bytes], bytes]:
    if b"\r" not in data:
        *bodies, rest = data.split(b"\n\n")
        return [body + b"\n\n" for body in bodies], rest
    events = []
    start = 0
    for blank in _BLANK_LINE.finditer(data):
        events.append(data[start : blank.end()])
        start = blank.end()
    return events, data[start:]


def event_data(event: bytes) -> bytes | None:
    """The joined `data` lines of one event; None where it has none, as a comment."""
    if plain := plain_data(event):
        return plain[0]
    lines = [value for line in event.removeprefix(_BOM).splitlines() if (value := _data_of(line)) is not None]
    return b"\n".join(lines) if lines else None


def is_event(event: bytes) -> bool:
    """Whether every line of it is a field of the standard's, or a comment."""
    lines = event.removeprefix(_BOM).splitlines()
    return all(not line or line.partition(b":")[0] in _FIELDS for line in lines)


def with_data(event: bytes, data: bytes) -> bytes:
    """`event` with its data lines replaced, in the place of the last; its other lines and its line ends stay."""
    if plain_data(event) and b"\n" not in data:
        return plain_event(data)
    mark = _BOM if event.startswith(_BOM) else b""
    lines = event.removeprefix(_BOM).splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if _data_of(line) is not None)
    end = lines[last][len(lines[last].rstrip(b"\r\n")) :]
    new = (end or b"\n").join([b"data: " + line for line in data.split(b"\n")]) + end
    before = [line for line in lines[:last] if _data_of(line) is None]
    return mark + b"".join([*before, new, *lines[last + 1 :]])


def plain_data(block: bytes) -> list[bytes] | None:
    """The data of each event of this block; None unless these are whole events of one line `data: ...` each.

    That is all that engines send but comments: each ended by LF, and no CR anywhere.
    """
    if not block.startswith(b"data: ") or not block.endswith(b"\n\n") or block.find(b"\r") >= 0:
        return None
    data = block[6:-2].split(b"\n\ndata: ")
    return data if b"".join(data).find(b"\n") < 0 else None


def plain_event(data: bytes) -> bytes:
    """The plain event with this data, which is of one line."""
    return b"data: %b\n\n" % data


def _data_of(line: bytes) -> bytes | None:
    name, _, value = line.partition(b":")
    if name.rstrip(b"\r\n") != b"data":
        return None
    return value.removeprefix(b" ").rstrip(b"\r\n")
