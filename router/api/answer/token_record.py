"""The token ids of one stream, kept so that another engine can go on with it exactly where it broke off."""

from collections.abc import Iterable
from typing import Any, Final

RECORD_LIMIT: Final = 2**20
"""Bytes of ids, prompt and answer together; a longer stream is gone on with by its text."""


class TokenRecord:
    """What an engine told of the tokens of its prompt and of its answer, as decimal digits each with a comma behind.

    A token whose text is not out yet, as half a character, is left for the next engine to choose again.
    """

    __slots__ = ("_complete", "_output", "_pending", "_prompt")

    def __init__(self) -> None:
        self._prompt = b""
        self._output = bytearray()
        self._pending = bytearray()
        """Ids since the last text."""
        self._complete = True

    def set_prompt(self, ids: object) -> None:
        """The tokens of the prompt; only the first telling counts."""
        if not self._prompt and isinstance(ids, list):
            self._prompt = _digits(ids)
            self._check()

    def add(self, said: bytes | None, silent: bytes = b"") -> None:
        """More of the answer: the ids up to the last text of a few chunks, and those behind it; None for text alone."""
        if self._complete and said is None:
            self._give_up()
        elif self._complete:
            if said:
                self._output += self._pending
                self._output += said
                self._pending.clear()
                self._check()
            self._pending += silent

    def add_list(self, ids: object, *, text: bool) -> None:
        """The ids of one chunk, which has text or not."""
        if isinstance(ids, list):
            digits = _digits(ids)
            self.add(digits if text else b"", b"" if text else digits)
        elif text:
            self._give_up()

    def drop_pending(self) -> None:
        """Forget what has no text: it will be chosen again."""
        self._pending.clear()

    @property
    def ids(self) -> tuple[list[int], list[int]] | None:
        """Prompt and answer up to the last text; None where not all of it was told."""
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
