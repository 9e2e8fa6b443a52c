"""A long whole answer on its way to the client: what is worth reading of it, without the members that make it long.

What is dropped are lists of numbers: log probabilities, token ids, embeddings. The rest is the JSON of a short answer,
read as one when the last byte has passed.
"""

import re
from typing import Final

OUTLINE_BYTES: Final = 2**20
"""Of the rest; an answer with more than that is not read, but for the usage near its end."""
TAIL_BYTES: Final = 64 * 1024
DROPPED_MEMBERS: Final = (
    *("logprobs", "prompt_logprobs", "top_logprobs", "token_ids", "prompt_token_ids"),
    *("output_ids", "input_ids", "tokens", "embedding"),
)
"""Members that are dropped: none that a family reads of its answers."""
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_DROPPED: Final = re.compile(b'"(?:' + "|".join(DROPPED_MEMBERS).encode() + rb')"\s*+:\s*+(?=[\[{"])')
"""A raw quote cannot stand inside a string, so what looks like the name of a member is one."""
_LONGEST_NAME: Final = 64
"""Bytes, with the white space around the colon; a name with more of it is not dropped."""
_SCALARS: Final = rb'[^"{}\[\]]++|' + _STRING
_ENTRY: Final = rb"\{(?:" + _SCALARS + rb'|\[[^"{}\[\]]*+\])*+\}'
_ENTRIES: Final = rb"\[(?:" + _SCALARS + rb"|" + _ENTRY + rb")*+\]"
# An entry of log probabilities, with lists of others in it, goes as one; what is nested otherwise, bracket by bracket.
_PIECE: Final = re.compile(
    b"|".join((rb"\{(?:" + _SCALARS + rb"|" + _ENTRIES + rb")*+\}", _ENTRIES, _STRING, rb'["{}\[\]]')),
    re.DOTALL,
)
_REST_OF_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class Outline:
    """Takes an answer block by block; its work on a block is in proportion to that."""

    __slots__ = ("_carry", "_depth", "_in_string", "_kept", "_too_long", "tail")

    def __init__(self) -> None:
        self._kept = bytearray()
        self._too_long = False
        self._carry = b""
        """The end of the last block, which may be a part of a name or of an escape."""
        self._depth = 0
        """Of the brackets that are open in the member that is being dropped."""
        self._in_string = False
        """Whether that member's bytes are at the middle of a string."""
        self.tail = b""
        """The last bytes of the answer."""

    def feed(self, block: bytes) -> None:
        """Take more of the answer."""
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
        """The answer without what was dropped; None where the rest is too long."""
        self._kept += self._carry
        return None if self._too_long else bytes(self._kept)

    def _keep(self, data: bytes, at: int) -> int:
        """Keep what comes up to the next member to be dropped; where that begins to be dropped."""
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
        """Drop what comes up to the end of the member; where that is, or the end of the data."""
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
            if bracket == ord('"'):  # its end is not here
                self._in_string = True
                self._carry = _open_escape(data)
                return len(data)
            self._depth += 1 if bracket in b"{[" else -1
            if not self._depth:
                return piece.end()
        return len(data)


def _open_escape(data: bytes) -> bytes:
    """The backslash at the end of a string that goes on, if it escapes what comes next."""
    return b"\\" if (len(data) - len(data.rstrip(b"\\"))) % 2 else b""
