"""Records the token ids of one stream, so that another engine can continue it exactly where it broke off."""

from collections.abc import Iterable
from typing import Any, Final

RECORD_LIMIT: Final = 2**20
"""Bytes of ids at most, of prompt and answer together. A longer stream can be continued by its text only."""


class TokenRecord:
    """The token ids of prompt and answer, kept as decimal digits, each id followed by a comma.

    A token whose text has not been sent yet, such as half a character, is left for the next engine to sample again.
    """

    __slots__ = ("_complete", "_output", "_pending", "_prompt")

    def __init__(self) -> None:
        self._prompt = b""
        self._output = bytearray()
        self._pending = bytearray()
        """Ids since the last text."""
        self._complete = True

    def set_prompt(self, ids: object) -> None:
        """Set the token ids of the prompt. Later calls are ignored."""
        if not self._prompt and isinstance(ids, list):
            self._prompt = _digits(ids)
            self._check()

    def add(self, with_text: bytes | None, pending: bytes = b"") -> None:
        """Add ids of the answer from some chunks: those up to their last text, and those after it.

        `with_text` is None if there was text without ids; the record is then given up.
        """
        self.add_all([(with_text, pending)])

    def add_all(self, parts: Iterable[tuple[bytes | None, bytes]]) -> None:
        """Add ids as `add` does, for each of these parts in order."""
        if not self._complete:
            return
        for with_text, pending in parts:
            if with_text is None:
                self._give_up()
                return
            if with_text:
                self._output += self._pending
                self._output += with_text
                self._pending.clear()
            self._pending += pending
        self._check()

    def add_list(self, ids: object, *, text: bool) -> None:
        """Add the ids of one chunk. `text`: whether the chunk has text."""
        if isinstance(ids, list):
            digits = _digits(ids)
            self.add(digits if text else b"", b"" if text else digits)
        elif text:
            self._give_up()

    def drop_pending(self) -> None:
        """Drop the ids without text: the next engine samples those tokens again."""
        self._pending.clear()

    @property
    def ids(self) -> tuple[list[int], list[int]] | None:
        """The ids of the prompt and of the answer up to the last text; None unless all of them are known."""
        if not (self._complete and self._prompt):
            return None
        return _numbers(self._prompt), _numbers(bytes(self._output))

    def _check(self) -> None:
        if len(self._prompt) + len(self._output) > RECORD_LIMIT:
            self._give_up()

    def _give_up(self) -> None:
        self._complete = False
        self._prompt = b""
        self._output.clear()
        self._pending.clear()


def _digits(ids: Iterable[Any]) -> bytes:
    return b"".join([b"%d," % each for each in ids if type(each) is int])


def _numbers(digits: bytes) -> list[int]:
    return [int(each) for each in digits.split(b",") if each.strip()]
