"""Shortens a long answer (not streamed) while it passes through, so that the router can parse it at its end.

The outline leaves out members with lists of numbers: log probabilities, token ids, embeddings. What remains is the
JSON of a short answer, which is parsed as such once the last byte has passed.
"""

import re
from typing import Final

OUTLINE_BYTES: Final = 2**20
"""Bytes of the outline at most. Of an answer with a longer outline only the usage near its end is read."""
TAIL_BYTES: Final = 64 * 1024
DROPPED_MEMBERS: Final = (
    *("logprobs", "prompt_logprobs", "top_logprobs", "token_ids", "prompt_token_ids"),
    *("output_ids", "input_ids", "tokens", "embedding"),
)
"""Members that are left out. No family of endpoints reads any of them."""
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_DROPPED: Final = re.compile(b'"(?:' + "|".join(DROPPED_MEMBERS).encode() + rb')"\s*+:\s*+(?=[\[{"])')
"""A string cannot contain an unescaped quote, so what looks like a member's name is one."""
_LONGEST_NAME: Final = 64
"""Bytes of a name and the white space around its colon. A member with more white space is kept."""
_SCALARS: Final = rb'[^"{}\[\]]++|' + _STRING
_ENTRY: Final = rb"\{(?:" + _SCALARS + rb'|\[[^"{}\[\]]*+\])*+\}'
_ENTRIES: Final = rb"\[(?:" + _SCALARS + rb"|" + _ENTRY + rb")*+\]"
# An entry of log probabilities, which may contain lists of others, is skipped in one match; other nesting bracket by
# bracket.
_PIECE: Final = re.compile(
    b"|".join((rb"\{(?:" + _SCALARS + rb"|" + _ENTRIES + rb")*+\}", _ENTRIES, _STRING, rb'["{}\[\]]')),
    re.DOTALL,
)
_REST_OF_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class Outline:
    """Builds the outline of an answer block by block, in time proportional to each block's size."""

    __slots__ = ("_carry", "_depth", "_in_string", "_kept", "_too_long", "tail")

    def __init__(self) -> None:
        self._kept = bytearray()
        self._too_long = False
        self._carry = b""
        """The end of the last block if it may be part of a name or of an escape."""
        self._depth = 0
        """Number of open brackets in the member that is being left out."""
        self._in_string = False
        """Whether the current position is inside a string of the member that is being left out."""
        self.tail = b""
        """The last bytes of the answer, at most `TAIL_BYTES`."""

    def feed(self, block: bytes) -> None:
        """Add a block of the answer."""
        self.tail = (self.tail + block[-TAIL_BYTES:])[-TAIL_BYTES:]
        if self._too_long:
            return
        data, at = self._carry + block, 0
        self._carry = b""
        while at < len(data):
            at = self._drop(data, at) if self._depth or self._in_string else self._keep(data, at)
        if len(self._kept) > OUTLINE_BYTES:
            self._too_long = True
            self._kept.clear()

    def close(self) -> bytes | None:
        """End the answer and return its outline; None if that is too long."""
        self._kept += self._carry
        return None if self._too_long else bytes(self._kept)

    def _keep(self, data: bytes, at: int) -> int:
        """Keep data up to the value of the next member to leave out. Returns the position inside that value."""
        found = _DROPPED.search(data, at)
        if found is None:
            end = max(at, len(data) - _LONGEST_NAME)
            self._kept += data[at:end]
            self._carry = data[end:]
            return len(data)
        self._kept += data[at : found.end()] + b"null"
        self._in_string = data[found.end()] == ord('"')
        self._depth = 0 if self._in_string else 1
        return found.end() + 1

    def _drop(self, data: bytes, at: int) -> int:
        """Skip data to the end of the member being left out. Returns its position, or the end of the data."""
        if self._in_string:
            rest = _REST_OF_STRING.match(data, at)
            if rest is None:
                self._carry = _open_escape(data)
                return len(data)
            self._in_string = False
            at = rest.end()
            if not self._depth:
                return at
        for piece in _PIECE.finditer(data, at):
            if piece.end() - piece.start() > 1:
                continue
            bracket = data[piece.start()]
            if bracket == ord('"'):  # the string continues in the next block
                self._in_string = True
                self._carry = _open_escape(data)
                return len(data)
            self._depth += 1 if bracket in b"{[" else -1
            if not self._depth:
                return piece.end()
        return len(data)


def _open_escape(data: bytes) -> bytes:
    """Return the backslash that ends the data if it escapes the first character of the next block, else nothing."""
    return b"\\" if (len(data) - len(data.rstrip(b"\\"))) % 2 else b""
