"""Prompts of token ids, hashed as the router hashes a completions call with token ids.

What many prompts begin with is hashed only once: a prompt is a `Text` and a tail, and its key continues the text's key,
or that of the prompt that it follows.
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
"""Stand-ins for those ids of emulated answers that do not fit into the four bytes of a token on the wire."""


class Text:
    """Token ids that prompts may begin with."""

    __slots__ = ("_blocks", "hashed", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = tuple(tokens)
        self.hashed = _HASHER.prompt(_packed(self.tokens), len(self.tokens))
        self._blocks: dict[int, bytes] = {}
        """Hashes of its full blocks, by tokens per block; computed on first use."""

    def block_key(self, tail: Sequence[int], sizes: Iterable[int]) -> BlockKey:
        """Return the key of this text followed by `tail`, in blocks of each of these sizes (tokens)."""
        return BlockKey(len(self.tokens) + len(tail), {size: self._block_hashes(tail, size) for size in sizes})

    def _block_hashes(self, tail: Sequence[int], size: int) -> bytes:
        if size not in self._blocks:
            self._blocks[size] = BLOCK_HASHER.chain(ROOT, self.tokens, size)
        own = self._blocks[size]
        rest = (*self.tokens[len(own) // HASH_BYTES * size :], *tail)
        return own + BLOCK_HASHER.chain(own[-HASH_BYTES:] or ROOT, rest, size)


class Texts:
    """Numbered texts, each generated on first use."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[int], Text]) -> None:
        self._make = make
        self._made: dict[int, Text] = {}

    def __getitem__(self, number: int) -> Text:
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]


class Prompt:
    """A call's prompt: a text that others may share, and what follows it."""

    __slots__ = ("_hashed", "_hashed_tail", "_text", "tail")

    def __init__(self, text: Text, tail: tuple[int, ...]) -> None:
        self._text = text
        self.tail = tail
        self._hashed = text.hashed
        self._hashed_tail = 0
        """Tokens of the tail covered by the hash; all of them once the key has been read."""

    def __len__(self) -> int:
        return len(self._text.tokens) + len(self.tail)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The engine's input; built at every read."""
        return self._text.tokens + self.tail

    @property
    def key(self) -> PromptKey:
        """The router's input."""
        if self._hashed_tail < len(self.tail):
            rest = self.tail[self._hashed_tail :]
            self._hashed = self._hashed.continued(_packed(rest), len(rest))
            self._hashed_tail = len(self.tail)
        return self._hashed.key

    def block_key(self, sizes: Iterable[int]) -> BlockKey:
        """Return the router's second input, for workers whose KV events it follows."""
        return self._text.block_key(self.tail, sizes)

    def followed_by(self, more: tuple[int, ...]) -> "Prompt":
        """Return a prompt that continues this one, with its answer or another question."""
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
    """Encode the tokens in four bytes each, as on the wire."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:  # the tokens include an answer's
        return struct.pack(f"<{len(tokens)}I", *map(_CODES.get, tokens, tokens))


EMPTY: Final = Text()
