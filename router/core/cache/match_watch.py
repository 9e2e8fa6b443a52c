"""Watches on the matches of requests that wait, found by the chunks at which these matches end."""

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import RequestId, WorkerId


class MatchWatch:
    """One prompt of a watched request, and how many of its chunks each worker holds."""

    __slots__ = ("ends", "hashes", "request", "serial")

    def __init__(self, request: RequestId, hashes: bytes, ends: dict[WorkerId, int]) -> None:
        self.request = request
        self.hashes = hashes
        self.ends = ends
        self.serial = 0
        """Later for those that were asked about later."""

    def edge(self, chunks: int) -> tuple[bytes, bytes]:
        """The last chunk of a match of this length, and the first one after it; empty where there is none."""
        end = chunks * HASH_BYTES
        return self.hashes[max(0, end - HASH_BYTES) : end], self.hashes[end : end + HASH_BYTES]

    def shared(self, hashes: bytes, least: int) -> int:
        """How many chunks it begins with like another prompt, of which so many are known to be."""
        end = least * HASH_BYTES
        while end < len(self.hashes) and self.hashes[end : end + HASH_BYTES] == hashes[end : end + HASH_BYTES]:
            end += HASH_BYTES
        return end // HASH_BYTES


class WatchIndex:
    """The watches by the chunks at which a match of theirs ends: the last one held, and the first one lacked."""

    def __init__(self) -> None:
        self.held: dict[bytes, dict[MatchWatch, None]] = {}
        self.lacked: dict[bytes, dict[MatchWatch, None]] = {}

    def add(self, watch: MatchWatch, chunks: int) -> None:
        """A match of this length ends there."""
        held, lacked = watch.edge(chunks)
        if held:
            self.held.setdefault(held, {})[watch] = None
        if lacked:
            self.lacked.setdefault(lacked, {})[watch] = None

    def remove(self, watch: MatchWatch, chunks: int) -> None:
        """None of this length does any more."""
        held, lacked = watch.edge(chunks)
        if held:
            _remove(self.held, held, watch)
        if lacked:
            _remove(self.lacked, lacked, watch)

    def move(self, watch: MatchWatch, worker: WorkerId, chunks: int) -> None:
        """A worker holds so many chunks now."""
        ends = watch.ends
        before = ends[worker]
        if chunks not in ends.values():
            self.add(watch, chunks)
        ends[worker] = chunks
        if before not in ends.values():
            self.remove(watch, before)


def _remove(index: dict[bytes, dict[MatchWatch, None]], chunk: bytes, watch: MatchWatch) -> None:
    watches = index[chunk]
    del watches[watch]
    if not watches:
        del index[chunk]
