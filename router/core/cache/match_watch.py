"""Watches on the matches of queued requests, indexed by the chunks at which these matches end."""

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
        """Rises with each call of `PrefixMap.watch`; changes are reported in this order."""

    def edge(self, chunks: int) -> tuple[bytes, bytes]:
        """Return the last chunk of a match of this length and the first chunk after it; empty if there is none."""
        end = chunks * HASH_BYTES
        return self.hashes[max(0, end - HASH_BYTES) : end], self.hashes[end : end + HASH_BYTES]

    def shared(self, hashes: bytes, known: int) -> int:
        """Return how many chunks the prompt shares with another; the first `known` are known to be shared."""
        end = known * HASH_BYTES
        while end < len(self.hashes) and self.hashes[end : end + HASH_BYTES] == hashes[end : end + HASH_BYTES]:
            end += HASH_BYTES
        return end // HASH_BYTES


class WatchIndex:
    """Indexes watches by the chunks at which a match ends: the last chunk held and the first one lacked."""

    def __init__(self) -> None:
        self.held: dict[bytes, dict[MatchWatch, None]] = {}
        self.lacked: dict[bytes, dict[MatchWatch, None]] = {}

    def add(self, watch: MatchWatch, chunks: int) -> None:
        """Index a watch at the end of a match of this length."""
        held, lacked = watch.edge(chunks)
        if held:
            self.held.setdefault(held, {})[watch] = None
        if lacked:
            self.lacked.setdefault(lacked, {})[watch] = None

    def remove(self, watch: MatchWatch, chunks: int) -> None:
        """Remove a watch from the end of a match of this length, which no worker has any more."""
        held, lacked = watch.edge(chunks)
        if held:
            _remove(self.held, held, watch)
        if lacked:
            _remove(self.lacked, lacked, watch)

    def move(self, watch: MatchWatch, worker: WorkerId, chunks: int) -> None:
        """Set how many chunks of the prompt a worker holds now."""
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
