"""Server-sent events: splits bytes into events, whatever blocks they arrive in, and reads the data of an event.

An event is kept as the bytes that arrived. The format is that of WHATWG HTML, section 9.2: lines end in LF, CRLF or
CR, a blank line ends an event, and a byte order mark at the start is ignored.
"""

import re
from typing import Final

from router.errors import WorkerBroke

EVENT_LIMIT: Final = 16 * 2**20
"""Bytes of one event at most. Events with log probabilities or long tool calls stay far below."""

PLAIN_EVENT: Final = b"data: %b\n\n"
"""An event with one data line, which must not contain a line end."""
BLANK: Final = frozenset({b"\n\n", b"\r\n\r\n"})
"""Empty events. They are recognised by a lookup, as a worker may send very many."""
_FIELDS: Final = frozenset({b"", b"data", b"event", b"id", b"retry"})
"""The field names of the standard. The empty name is that of a comment."""
_BOM: Final = b"\xef\xbb\xbf"
# A CR at the very end may be half of a CRLF, so it ends an event only once the next byte has arrived.
_BLANK_LINE: Final = re.compile(rb"(?>\r\n|\n|\r)(?:\r\n|\n|\r(?=[^\n]))")


class EventSplitter:
    """Splits a stream of bytes after each blank line. The events and `rest()` together are the bytes fed in."""

    __slots__ = ("_limit", "_searched", "tail")

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self.tail = bytearray()
        """The bytes after the last complete event; while it is empty, the next byte begins an event."""
        self._searched = 0

    def feed(self, block: bytes) -> list[bytes]:
        """Add a block and return the events that are complete now, each with the blank line that ends it.

        Raises WorkerBroke if an event exceeds the limit.
        """
        if not self.tail:
            data = block
        else:
            self.tail += block
            if not _BLANK_LINE.search(self.tail, self._searched):
                return self._hold()
            data = bytes(self.tail)
        events, rest = _cut(data)
        self.tail[:] = rest
        self._hold()
        return events

    def rest(self) -> bytes:
        """Remove and return the bytes after the last complete event."""
        rest = bytes(self.tail)
        self.tail.clear()
        self._searched = 0
        return rest

    def _hold(self) -> list[bytes]:
        if len(self.tail) > self._limit:
            raise WorkerBroke(f"A worker sent an event of more than {self._limit} bytes.")
        # A blank line takes at most four bytes, three of which may have arrived.
        self._searched = max(0, len(self.tail) - 3)
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


def plain_data(block: bytes) -> list[bytes] | None:
    """Return the data of each event in this block; None unless the block is complete events of one `data: ...` line
    each.

    Engines send nothing else except comments. Lines must end in LF, and the block must not contain CR.
    """
    if not block.startswith(b"data: ") or not block.endswith(b"\n\n") or block.find(b"\r") >= 0:
        return None
    data = block[6:-2].split(b"\n\ndata: ")
    return data if b"".join(data).find(b"\n") < 0 else None


def event_data(event: bytes) -> bytes | None:
    """Return the `data` lines of one event, joined by LF. None if it has no such line, like a comment."""
    if plain := plain_data(event):
        return plain[0]
    lines = [value for line in event.removeprefix(_BOM).splitlines() if (value := _data_of(line)) is not None]
    return b"\n".join(lines) if lines else None


def is_event(event: bytes) -> bool:
    """Return whether every line is a comment or a field of the standard."""
    lines = event.removeprefix(_BOM).splitlines()
    return all(not line or line.partition(b":")[0] in _FIELDS for line in lines)


def with_data(event: bytes, data: bytes) -> bytes:
    """Replace the data lines of `event`, in the place of the last one. Other lines and the line ends stay."""
    if plain_data(event) and b"\n" not in data:
        return PLAIN_EVENT % data
    mark = _BOM if event.startswith(_BOM) else b""
    lines = event.removeprefix(_BOM).splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if _data_of(line) is not None)
    end = lines[last][len(lines[last].rstrip(b"\r\n")) :]
    new = (end or b"\n").join([b"data: " + line for line in data.split(b"\n")]) + end
    before = [line for line in lines[:last] if _data_of(line) is None]
    return mark + b"".join([*before, new, *lines[last + 1 :]])


def _data_of(line: bytes) -> bytes | None:
    name, _, value = line.partition(b":")
    if name.rstrip(b"\r\n") != b"data":
        return None
    return value.removeprefix(b" ").rstrip(b"\r\n")
