"""Watched prompts that the workers hold equally far, and which of them a worker's change concerns.

Prompts whose longest held prefix is the same are held equally far by every worker, so a group keeps that once, however
many requests wait. Most changes of a group change nothing for most requests that wait alike: a watch may be *narrow*,
for some workers only. Then a change at another worker costs nothing for it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import repeat
from typing import Final, NamedTuple

from router.core.cache.held_chunks import HeldChunks
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import RequestId, WorkerId

Chunk = bytes
"""One hash, which covers all before it: two prompts share a chunk if they share everything up to its end."""
NO_WORKER: Final = WorkerId("")
"""Stands for the workers of a narrow watch that has none."""


class MatchGroup:
    """Watched prompts with the same longest held prefix."""

    __slots__ = ("_able", "_counts", "_narrow", "_others", "_wide", "held", "members", "prefix")

    def __init__(self, prefix: bytes, held: HeldChunks) -> None:
        self.prefix = prefix
        """The hashes of the longest prefix of its prompts that any worker holds."""
        self.held = held
        self.members: dict[MatchWatch, None] = {}
        self._wide: dict[MatchWatch, None] = {}
        """The members that every change concerns."""
        self._narrow: dict[WorkerId, dict[MatchWatch, None]] = {}
        """The narrow members by each of their workers; by `NO_WORKER` if they have none."""
        self._able: Mapping[WorkerId, object] = {}
        """The workers to which the request of each narrow member may go."""
        self._others = len(held.by_worker)
        """How many other workers hold any of the prefix."""
        self._counts: dict[int, int] | None = None
        """What `_numbers` returns; None before that: most groups are made for one watch, which joins another one."""

    @property
    def depth(self) -> int:
        """The chunks of its prefix."""
        return len(self.prefix) // HASH_BYTES

    @property
    def last(self) -> Chunk:
        """The last chunk of its prefix; empty if no worker holds anything."""
        return self.prefix[-HASH_BYTES:]

    @property
    def ends(self) -> Iterable[int]:
        """The numbers of chunks that single workers hold. 0 is always among them: another worker may join."""
        return (0, *self._numbers())

    def _numbers(self) -> dict[int, int]:
        """Return how many workers hold each number of chunks."""
        if self._counts is None:
            self._counts = dict(Counter(self.held.by_worker.values()))  # a Counter's methods are written in Python
        return self._counts

    def edge(self, chunks: int) -> tuple[Chunk, Chunk]:
        """Return the last chunk of a match of this length and the chunk of the prefix after it; empty if there is
        none.
        """
        end = chunks * HASH_BYTES
        return self.prefix[max(0, end - HASH_BYTES) : end], self.prefix[end : end + HASH_BYTES]

    def add(self, watch: "MatchWatch") -> None:
        """Add a member."""
        self.members[watch] = None
        self._enlist(watch)

    def remove(self, watch: "MatchWatch") -> None:
        """Remove a member."""
        del self.members[watch]
        self._delist(watch)

    def set_narrow(self, watch: "MatchWatch", narrow: "Narrow | None") -> None:
        """Make a member narrow, or wide."""
        self._delist(watch)
        watch.narrow = narrow
        self._enlist(watch)

    def _enlist(self, watch: "MatchWatch") -> None:
        if watch.narrow is None:
            self._wide[watch] = None
            return
        if watch.narrow.able is not self._able:
            self._widen_all()
            self._able = watch.narrow.able
            self._others = len(self.held.by_worker.keys() - self._able.keys())
        for worker in watch.narrow.workers or (NO_WORKER,):
            self._narrow.setdefault(worker, {})[watch] = None

    def _widen_all(self) -> None:
        """Make all narrow members wide, because one comes that may go to other workers, or the fleet has changed."""
        narrow = dict.fromkeys(watch for members in self._narrow.values() for watch in members)
        self._narrow.clear()
        for watch in narrow:
            watch.narrow = None
            self._wide[watch] = None

    def _delist(self, watch: "MatchWatch") -> None:
        if watch.narrow is None:
            del self._wide[watch]
            return
        for worker in watch.narrow.workers or (NO_WORKER,):
            members = self._narrow[worker]
            del members[watch]
            if not members:
                del self._narrow[worker]

    def concerned(self, worker: WorkerId, before: HeldChunks, enough: Callable[[], float]) -> Iterable["MatchWatch"]:
        """Return the members that a worker's change concerns, which did not change the most that any worker holds.

        `enough`: as in `WatchIndex.gained`.
        """
        now, common = self.held, self._common(self.held)
        if self._others or common != self._common(before):
            return self.members
        least = enough()
        if min(before.least, now.least) < least:
            others = self._narrow.keys() - {NO_WORKER, worker}
            if common or self.least_needed(others) < least:
                return self.members
        return (*self._wide, *self._narrow.get(worker, ()))

    def least_needed(self, workers: Iterable[WorkerId]) -> int:
        """Return the least of the most chunks that any worker holds and of those that these hold. While some workers
        hold nothing, it does not matter whether less than that counts.
        """
        return min([self.held.most, *map(self.held.by_worker.get, workers, repeat(0))])

    def all_hold_some(self, able: Mapping[WorkerId, object]) -> bool:
        """Return whether as many workers hold any of the prefix as there are in `able`."""
        return len(self.held.by_worker) == len(able)

    def _common(self, held: HeldChunks) -> int:
        """Return the chunks that all workers hold to which a narrow member may go, while no others hold any."""
        return held.least if len(held.by_worker) == len(self._able) else 0

    def check_narrow(self) -> None:
        """Raise AssertionError if a member is not where a change that concerns it would find it."""
        for watch in self.members:
            narrow = watch.narrow
            assert (narrow is None) == (watch in self._wide), "a watch is listed wrongly"
            assert narrow is None or narrow.able is self._able, "a narrow watch may go to other workers"
        assert self._others == len(self.held.by_worker.keys() - self._able.keys()), "the other holders are miscounted"
        found = {(watch, worker) for worker, members in self._narrow.items() for watch in members}
        expected = {
            (watch, worker) for watch in self.members if watch.narrow for worker in watch.narrow.workers or (NO_WORKER,)
        }
        assert found == expected, "a narrow watch is listed wrongly"
        assert all(self._narrow.values()), "an entry is empty"

    def set(self, worker: WorkerId, chunks: int) -> tuple[int, int]:
        """Set how many chunks a worker holds. Returns the end that no worker has any more and the one that none had
        before; 0 if there is none.
        """
        before, counts = self.held.by_worker.get(worker, 0), self._numbers()
        if chunks:
            counts[chunks] = counts.get(chunks, 0) + 1
        if worker not in self._able:
            self._others += bool(chunks) - bool(before)
        if before:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
        self.held = self.held.changed(worker, chunks, counts)
        return (before if before not in counts else 0), (chunks if counts.get(chunks) == 1 else 0)


class Narrow(NamedTuple):
    """The changes that concern a watch beside those of the most and of the common chunks."""

    workers: Collection[WorkerId]
    able: Mapping[WorkerId, object]
    """The workers to which its request may go. Never changes."""


class MatchWatch:
    """One watched prompt."""

    __slots__ = ("group", "hashes", "narrow", "request")

    def __init__(self, request: RequestId, hashes: bytes, group: MatchGroup) -> None:
        self.request = request
        self.hashes = hashes
        self.group = group
        self.narrow: Narrow | None = None
        """None if every change of its match concerns it."""
