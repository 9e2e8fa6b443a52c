"""Translates the block hashes of one publisher's engine to the router's: events in, changes of the token blocks out."""

from collections.abc import Iterable
from typing import NamedTuple

from router.core.kv_blocks.kv_events import CacheEvent, Cleared, EngineHash, KvEventFault, Removed, Stored
from router.core.model.block_key import HASH_BYTES, ROOT, BlockHasher


class BlockChange(NamedTuple):
    """The net effect of a batch of events. A cleared cache comes first; no hash is both removed and stored."""

    cleared: bool
    removed: bytes
    """Hashes, 8 bytes each."""
    stored: bytes


class TooManyBlocks(Exception):
    """A publisher has more blocks than the limit."""


class BlockNames:
    """The blocks that one publisher has stored and not removed.

    An engine may store the same content several times, in several blocks; it is cached until each of them is removed.
    But vLLM also reports hits as if they were stored, if a client asks for that (`kv_cache_report_mode` of its
    request). Such a report begins at the head of a prompt and names only blocks that are stored already. A genuine
    store does the same if a prompt is computed anew that is all cached; then a copy is missed, and its blocks count as
    removed too early. (Beside `prompt_logprobs`, that happens to models with sliding windows, of which the last one
    must be cached as well.)
    """

    def __init__(self, hasher: BlockHasher, limit: int) -> None:
        """`limit`: blocks with different content."""
        self._hasher = hasher
        self._limit = limit
        self._hashes: dict[EngineHash, bytes | None] = {}
        """None for unmatchable blocks and all that follow them."""
        self._copies: dict[EngineHash, int] = {}
        """Copies beyond the first."""
        self.block_tokens: int | None = None
        """Tokens per block, taken from the first event that stores any; None before."""
        self.faults: list[KvEventFault] = []
        """What was wrong since this list was last emptied."""

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> bytes:
        """The hashes of all blocks that can be matched, in no particular order."""
        return b"".join([hash_ for hash_ in self._hashes.values() if hash_ is not None])

    def apply(self, events: Iterable[CacheEvent]) -> BlockChange:
        """Apply the events of a batch. Raises TooManyBlocks; after that, the object must not be used any more."""
        cleared = False
        stored_after: dict[bytes, bool] = {}
        for event in events:
            match event:
                case Stored():
                    stored_after.update(dict.fromkeys(self._store(event), True))
                case Removed(names):
                    stored_after.update(dict.fromkeys(self._remove(names), False))
                case Cleared():
                    self.clear()
                    cleared = True
                    stored_after = {}
        if len(self._hashes) > self._limit:
            raise TooManyBlocks
        removed = b"".join([hash_ for hash_, stored in stored_after.items() if not stored])
        return BlockChange(cleared, removed, b"".join([hash_ for hash_, stored in stored_after.items() if stored]))

    def clear(self) -> None:
        """Forget all blocks, because the cache is empty."""
        self._hashes.clear()
        self._copies.clear()

    def _store(self, event: Stored) -> list[bytes]:
        """Note stored blocks. Returns the hashes of those that are new and can be matched."""
        if self.block_tokens is None:
            self.block_tokens = event.block_tokens
        added = []
        reports_hit = event.parent is None and len(event.names) > 1 and all(map(self._hashes.__contains__, event.names))
        for name, hash_ in zip(event.names, self._hashes_of(event), strict=True):
            if name in self._hashes:
                if not reports_hit:
                    self._copies[name] = self._copies.get(name, 0) + 1
            else:
                self._hashes[name] = hash_
                if hash_ is not None:
                    added.append(hash_)
        return added

    def _hashes_of(self, event: Stored) -> list[bytes | None]:
        """Return the router's hashes of the blocks; None for each block that cannot be matched."""
        unmatchable: list[bytes | None] = [None] * len(event.names)
        if not event.matchable:
            return unmatchable
        if event.block_tokens != self.block_tokens:
            self.faults.append(KvEventFault.ODD_BLOCK)
            return unmatchable
        parent = ROOT if event.parent is None else self._hashes.get(event.parent)
        if parent is None:
            if event.parent not in self._hashes:
                self.faults.append(KvEventFault.UNKNOWN_PARENT)
            return unmatchable
        try:
            tokens = event.tokens[: event.matchable * event.block_tokens]
            hashes = self._hasher.chain(parent, tokens, event.block_tokens)
        except ValueError:
            self.faults.append(KvEventFault.BAD_FIELDS)
            return unmatchable
        matchable = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        return matchable + unmatchable[event.matchable :]

    def _remove(self, names: Iterable[EngineHash]) -> list[bytes]:
        """Note removed blocks. Returns the hashes of those of which no copy is left."""
        removed_hashes = []
        for name in names:
            if name not in self._hashes:
                self.faults.append(KvEventFault.UNKNOWN_BLOCK)
            elif copies := self._copies.pop(name, 0):
                if copies > 1:
                    self._copies[name] = copies - 1
            elif (hash_ := self._hashes.pop(name)) is not None:
                removed_hashes.append(hash_)
        return removed_hashes
