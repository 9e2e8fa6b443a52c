"""What a publisher's engine calls its blocks, and what we call them: events in, changes of the token blocks out."""

from collections.abc import Iterable
from typing import NamedTuple

from router.core.kv_blocks.kv_events import CacheEvent, Cleared, EngineHash, KvEventFault, Removed, Stored
from router.core.model.block_key import HASH_BYTES, ROOT, BlockHasher


class BlockChange(NamedTuple):
    """What a batch of events comes to, in the order in which it is to be done; of no hash both."""

    cleared: bool
    removed: bytes
    """Hashes, 8 bytes each."""
    stored: bytes


class TooManyBlocks(Exception):
    """A publisher names more blocks than are kept."""


class BlockNames:
    """The blocks that one publisher has stored and not removed.

    An engine may store a content several times, in as many blocks; it is there until each of them is removed. But vLLM
    also tells of hits as if they were stored, where a client asks for that (`kv_cache_report_mode` of its request).
    Such a report begins at the head of a prompt; what is stored does so only if its first block was not found, which
    for one that was there happens to prompts of a single block alone.
    """

    def __init__(self, hasher: BlockHasher, limit: int) -> None:
        """`limit`: blocks with different content."""
        self._hasher = hasher
        self._limit = limit
        self._hashes: dict[EngineHash, bytes | None] = {}
        """None for those that are apart, and all that follow on them."""
        self._copies: dict[EngineHash, int] = {}
        """Beyond the first."""
        self.block_tokens: int | None = None
        """Told by the first event that stores any."""
        self.faults: list[KvEventFault] = []
        """What was wrong since this was last emptied."""

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> bytes:
        """Of all blocks that can be matched, in no order that means anything."""
        return b"".join([hash_ for hash_ in self._hashes.values() if hash_ is not None])

    def apply(self, events: Iterable[CacheEvent]) -> BlockChange:
        """Take in the events of a batch. Raises TooManyBlocks; after that, this is of no use."""
        cleared = False
        last: dict[bytes, bool] = {}
        for event in events:
            match event:
                case Stored():
                    last.update(dict.fromkeys(self._store(event), True))
                case Removed(names):
                    last.update(dict.fromkeys(self._remove(names), False))
                case Cleared():
                    self.clear()
                    cleared = True
                    last = {}
        if len(self._hashes) > self._limit:
            raise TooManyBlocks
        removed = b"".join([hash_ for hash_, there in last.items() if not there])
        return BlockChange(cleared, removed, b"".join([hash_ for hash_, there in last.items() if there]))

    def clear(self) -> None:
        """Nothing is stored any more."""
        self._hashes.clear()
        self._copies.clear()

    def _store(self, event: Stored) -> list[bytes]:
        """Note the blocks; returns the hashes of those that are new and can be matched."""
        if self.block_tokens is None:
            self.block_tokens = event.block_tokens
        gained = []
        hits = event.parent is None and len(event.names) > 1 and event.names[0] in self._hashes
        for name, hash_ in zip(event.names, self._hashes_of(event), strict=True):
            if name in self._hashes:
                if not hits:
                    self._copies[name] = self._copies.get(name, 0) + 1
            else:
                self._hashes[name] = hash_
                if hash_ is not None:
                    gained.append(hash_)
        return gained

    def _hashes_of(self, event: Stored) -> list[bytes | None]:
        """Our hashes of the blocks; None for each if they are apart, or nobody knows what stands before them."""
        apart: list[bytes | None] = [None] * len(event.names)
        if event.unmatchable:
            return apart
        if event.block_tokens != self.block_tokens:
            self.faults.append(KvEventFault.ODD_BLOCK)
            return apart
        parent = ROOT if event.parent is None else self._hashes.get(event.parent)
        if parent is None:
            if event.parent not in self._hashes:
                self.faults.append(KvEventFault.UNKNOWN_PARENT)
            return apart
        try:
            hashes = self._hasher.chain(parent, event.tokens, event.block_tokens)
        except ValueError:
            self.faults.append(KvEventFault.BAD_FIELDS)
            return apart
        return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]

    def _remove(self, names: Iterable[EngineHash]) -> list[bytes]:
        """Note that the blocks are gone; returns the hashes of those of which no copy is left."""
        lost = []
        for name in names:
            if name not in self._hashes:
                self.faults.append(KvEventFault.UNKNOWN_BLOCK)
            elif copies := self._copies.pop(name, 0):
                if copies > 1:
                    self._copies[name] = copies - 1
            elif (hash_ := self._hashes.pop(name)) is not None:
                lost.append(hash_)
        return lost
