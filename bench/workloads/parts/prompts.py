"""Prompts of token ids, hashed as the router hashes a completions call that brings token ids.

What many prompts begin with is hashed once: a prompt is a `Text` and a tail, and its key continues the text's, or that
of the prompt which it followed.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

from router.core.model.block_key import HASH_BYTES, ROOT, BlockHasher, BlockKey
from router.core.model.prompt_key import PromptHasher, PromptKey
from workers.engine.tokenizer import VOCABULARY

BLOCK_HASHER: Final = BlockHasher(b"the bench's secret")
_HASHER: Final = PromptHasher(b"the bench's secret")
_CODES: Final = {token: 1 << 31 | number for number, token in enumerate(dict.fromkeys(VOCABULARY)) if token >> 32}
"""What stands for those of the emulated answers' ids that are wider than the four bytes of a token on the wire."""


class Text:
    """Token ids that prompts may begin with."""

    __slots__ = ("_blocks", "hashed", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = tuple(tokens)
        self.hashed = _HASHER.prompt(_packed(self.tokens), len(self.tokens))
        self._blocks: dict[int, bytes] = {}
        """Hashes of its full blocks, by the tokens in a block; computed when first asked for."""

    def block_key(self, tail: Sequence[int], sizes: Iterable[int]) -> BlockKey:
        """The key, in blocks of so many tokens, of this text followed by `tail`."""
        return BlockKey(len(self.tokens) + len(tail), {size: self._block_hashes(tail, size) for size in sizes})

    def _block_hashes(self, tail: Sequence[int], size: int) -> bytes:
        if size not in self._blocks:
            self._blocks[size] = BLOCK_HASHER.chain(ROOT, self.tokens, size)
        own = self._blocks[size]
        rest = (*self.tokens[len(own) // HASH_BYTES * size :], *tail)
        return own + BLOCK_HASHER.chain(own[-HASH_BYTES:] or ROOT, rest, size)


class Texts:
    """Numbered texts, each made up when it is first asked for."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[int], Text]) -> None:
        self._make = make
        self._made: dict[int, Text] = {}

    def __getitem__(self, number: int) -> Text:
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]


class Prompt:
    """What a call asks: a text that others may share, and what follows it."""

    __slots__ = ("_hashed", "_hashed_tail", "_text", "tail")

    def __init__(self, text: Text, tail: tuple[int, ...]) -> None:
        self._text = text
        self.tail = tail
        self._hashed = text.hashed
        self._hashed_tail = 0
        """So many tokens of the tail are in that; all of them once the key was asked for."""

    def __len__(self) -> int:
        return len(self._text.tokens) + len(self.tail)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the engine is given; built anew at every call."""
        return self._text.tokens + self.tail

    @property
    def key(self) -> PromptKey:
        """What the router is given."""
        if self._hashed_tail < len(self.tail):
            rest = self.tail[self._hashed_tail :]
            self._hashed = self._hashed.continued(_packed(rest), len(rest))
            self._hashed_tail = len(self.tail)
        return self._hashed.key

    def block_key(self, sizes: Iterable[int]) -> BlockKey:
        """What the router is given beside, of workers whose KV events it follows."""
        return self._text.block_key(self.tail, sizes)

    def followed_by(self, more: tuple[int, ...]) -> "Prompt":
        """Continue it with what comes next: its answer, another question."""
        longer = Prompt(self._text, self.tail + more)
        longer._hashed, longer._hashed_tail = self._hashed, self._hashed_tail
        return longer


def random_tokens(random: Random, count: int) -> tuple[int, ...]:
    """Draw token ids below 2^31."""
    drawn = int.from_bytes(random.randbytes(4 * count), "little") & int.from_bytes(
        b"\xff\xff\xff\x7f" * count, "little"
    )
    return struct.unpack(f"<{count}I", drawn.to_bytes(4 * count, "little"))


def _packed(tokens: Sequence[int]) -> bytes:
    """Four bytes a token, as on the wire."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:  # an answer is among them
        return struct.pack(f"<{len(tokens)}I", *map(_CODES.get, tokens, tokens))


EMPTY: Final = Text()
