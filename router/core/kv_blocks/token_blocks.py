"""The second key space: which worker holds which blocks of tokens, exactly, as the workers' own KV events report.

A hash covers all tokens before it (`block_key`), so a worker's match is the number of a prompt's hashes, from the first
on, that it holds. Nothing is estimated and nothing is evicted here: blocks come and go as the worker reports, with one
exception. The blocks of a dispatched request will be stored before a later request is prefilled, but the events come
late. So the blocks of a request are expected at its worker until it has ended, and after that until the worker's next
event.

A worker of whose events some were missed is followed but not complete: it may hold more than is known here.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from router.core.model.block_key import BlockKey
from router.core.model.events import BlocksChanged, BlocksFollowed
from router.core.model.request import Request, WorkerId

MAX_EXPIRING: Final = 1024
"""Ended requests of a worker whose blocks may still be expected; those of further requests are dropped at once."""


@dataclass(slots=True, eq=False)
class ExpectedBlocks:
    """The blocks that one attempt will store at its worker."""

    held: "WorkerBlocks" = field(repr=False)
    hashes: tuple[bytes, ...]
    """One run of blocks per prompt."""


@dataclass(slots=True, eq=False)
class WorkerBlocks:
    """What one worker holds and is about to hold."""

    block_tokens: int
    ranks: int
    complete: bool
    blocks: dict[int, set[int]] = field(default_factory=dict)
    """By data-parallel rank; each rank has its own cache."""
    expected: Counter[int] = field(default_factory=Counter)
    """How many requests will store a block, or have stored it."""
    expecting: dict[ExpectedBlocks, None] = field(default_factory=dict)
    """The blocks of the requests that run there."""
    expiring: list[bytes] = field(default_factory=list)
    """Blocks of ended requests, expected until the worker's next event."""

    @property
    def size(self) -> int:
        return sum(map(len, self.blocks.values()))

    def cached_tokens(self, hashes: list[int]) -> int:
        """Return how many tokens of a prompt with these blocks a prefill there would find cached.

        For several ranks this is their mean, because the engine picks the rank regardless of the prompt.
        """
        leading = 0
        for held in self.blocks.values():
            whole = held.issuperset(hashes)  # fast, and often true
            leading += len(hashes if whole else list(takewhile(held.__contains__, hashes)))
        if self.ranks == 1 and self.expected:
            held = self.blocks.get(0, set())
            while leading < len(hashes) and (hashes[leading] in self.expected or hashes[leading] in held):
                leading += 1
        return leading * self.block_tokens // self.ranks

    def stop_expecting(self, hashes: bytes) -> None:
        """Expect these blocks of one request less."""
        expected = self.expected
        for hash_ in _split(hashes):
            if expected[hash_] > 1:
                expected[hash_] -= 1
            else:
                del expected[hash_]


class TokenBlocks:
    """The blocks of all followed workers, at most `limit` in all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[WorkerId, WorkerBlocks] = {}
        self._size = 0
        self.changes = 0
        """Counts changes: while it stays the same, so do all answers."""

    @property
    def blocks(self) -> int:
        """Blocks held, over all workers."""
        return self._size

    def __bool__(self) -> bool:
        """Return whether any worker is followed."""
        return bool(self._held)

    def complete(self, worker: WorkerId) -> bool:
        """Return whether all that a worker holds is known."""
        held = self._held.get(worker)
        return held is not None and held.complete

    def follow(self, event: BlocksFollowed) -> None:
        """Follow a worker's events, or with new parameters; its known blocks stay if the block size does."""
        self.changes += 1
        held = self._held.get(event.worker)
        if held is None or held.block_tokens != event.block_tokens:
            self.unfollow(event.worker)
            self._held[event.worker] = WorkerBlocks(event.block_tokens, event.ranks, event.complete)
        else:
            held.ranks, held.complete = event.ranks, event.complete

    def change(self, event: BlocksChanged) -> None:
        """Apply a worker's events; does nothing if the worker is not followed.

        A worker whose blocks exceed the limit is no longer followed.
        """
        held = self._held.get(event.worker)
        if held is None:
            return
        self.changes += 1
        before = held.size
        blocks = held.blocks.setdefault(event.rank, set())
        if event.cleared:
            blocks.clear()
        blocks.difference_update(_split(event.removed))
        blocks.update(_split(event.stored))
        self._size += held.size - before
        for hashes in held.expiring:
            held.stop_expecting(hashes)
        held.expiring.clear()
        if self._size > self._limit:
            self.unfollow(event.worker)

    def clear(self, worker: WorkerId) -> None:
        """Forget all blocks of a worker, because its cache is empty."""
        held = self._held.get(worker)
        if held is not None:
            self.changes += 1
            self._size -= held.size
            held.blocks.clear()

    def unfollow(self, worker: WorkerId) -> None:
        """Stop following a worker."""
        held = self._held.pop(worker, None)
        if held is not None:
            self.changes += 1
            self._size -= held.size
            held.expecting.clear()

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        """Return the input tokens of the request that each followed worker holds, 0 included."""
        found: dict[WorkerId, int] = {}
        if not self._held or not request.blocks:
            return found
        known = request.blocks[0].hashes
        usable = {size: [_usable(key, size) for key in request.blocks] for size in known}
        for worker, held in self._held.items():
            if held.block_tokens in usable:
                found[worker] = sum([held.cached_tokens(hashes) for hashes in usable[held.block_tokens]])
        return found

    def expect(self, request: Request, worker: WorkerId) -> ExpectedBlocks | None:
        """Expect the blocks of a request at the worker that it is sent to; None if the worker is not followed or the
        blocks are not known.
        """
        held = self._held.get(worker)
        if held is None or held.ranks > 1 or not request.blocks:
            return None
        expected = ExpectedBlocks(held, tuple([key.hashes.get(held.block_tokens, b"") for key in request.blocks]))
        self.changes += 1
        held.expecting[expected] = None
        for each in expected.hashes:
            held.expected.update(_split(each))
        return expected

    def end(self, expected: ExpectedBlocks, *, stored: bool) -> None:
        """End the expectations of one attempt. `stored`: whether its blocks are stored, as far as is known.

        Does nothing if its worker is not followed any more, or in another way.
        """
        held = expected.held
        if expected not in held.expecting:
            return
        del held.expecting[expected]
        self.changes += 1
        for hashes in expected.hashes:
            if stored and len(held.expiring) < MAX_EXPIRING:
                held.expiring.append(hashes)
            else:
                held.stop_expecting(hashes)

    def check_integrity(self) -> None:
        """Raise AssertionError if counts and contents contradict each other. O(blocks)."""
        assert self._size == sum(held.size for held in self._held.values()), "the count of blocks is wrong"
        assert self._size <= self._limit, "there are more blocks than the limit"
        for held in self._held.values():
            expected = Counter(hash_ for hashes in _expected_hashes(held) for hash_ in _split(hashes))
            assert expected == held.expected, "the expected blocks are not those of the requests"


def _expected_hashes(held: WorkerBlocks) -> Iterator[bytes]:
    yield from held.expiring
    for each in held.expecting:
        yield from each.hashes


def _usable(key: BlockKey, size: int) -> list[int]:
    """Return the full blocks of a prompt that a prefill may find: never the last token, since its logits are needed."""
    return _split(key.hashes[size])[: (key.tokens - 1) // size]


def _split(hashes: bytes) -> list[int]:
    """Split hashes into integers: sets of these are smaller and faster than sets of bytes."""
    return memoryview(hashes).cast("Q").tolist()
