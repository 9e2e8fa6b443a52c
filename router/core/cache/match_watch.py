"""Watches on the matches of queued requests, in groups of prompts that the workers hold equally far.

Prompts whose longest held prefix is the same are held equally far by every worker, so a group keeps that once, however
many requests wait. A group is indexed by the chunks at which its workers' matches end: by the last chunk that a worker
holds, to find what it loses, and by the first one that it lacks, to find what it gains. What is gained beyond the
group's prefix moves single prompts to another group.

Most changes of most groups change nothing for most requests that wait alike: a watch may be *narrow*, for some workers
only. Then a change at another worker costs nothing for it, and the cost of an eviction grows with the groups that it
concerns, not with the requests that wait.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from struct import iter_unpack
from typing import NamedTuple

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import RequestId, WorkerId

Chunk = bytes
"""One hash, which covers all before it: two prompts share a chunk if they share everything up to its end."""


class HeldChunks:
    """How many chunks of a request's prompts each worker holds. Never changes."""

    __slots__ = ("_among", "_at_least", "by_worker", "least", "most")

    def __init__(self, by_worker: Mapping[WorkerId, int]) -> None:
        """`by_worker`: without the workers that hold none."""
        self.by_worker = by_worker
        self.most = max(by_worker.values(), default=0)
        self.least = min(by_worker.values(), default=0)
        """The fewest that a worker holds which holds any; 0 if there is none."""
        self._at_least: dict[int, Mapping[WorkerId, int]] = {}
        """Answers of `at_least`, because requests of one group ask alike."""
        self._among: tuple[object, HeldChunks | None] | None = None
        """The same for the latest workers of `among`; None for this object itself, as a cycle would outlive it."""

    def at(self, worker: WorkerId) -> int:
        """Return how many chunks this worker holds."""
        return self.by_worker.get(worker, 0)

    def at_least(self, chunks: int) -> Mapping[WorkerId, int]:
        """Return the workers that hold at least this many chunks, at least 1."""
        if chunks <= self.least:
            return self.by_worker
        found = self._at_least.get(chunks)
        if found is None:
            found = {worker: held for worker, held in self.by_worker.items() if held >= chunks}
            self._at_least[chunks] = found
        return found

    def among(self, workers: Mapping[WorkerId, object]) -> "HeldChunks":
        """Return what these workers hold; the mapping must not change."""
        if self._among is None or self._among[0] is not workers:
            if self.by_worker.keys() <= workers.keys():
                self._among = workers, None
            else:
                held = {worker: chunks for worker, chunks in self.by_worker.items() if worker in workers}
                self._among = workers, HeldChunks(held)
        return self._among[1] or self


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
        """The narrow members by each of their workers."""
        self._able: Mapping[WorkerId, object] = {}
        """The workers to which the request of each narrow member may go."""
        self._others = len(held.by_worker)
        """How many other workers hold any of the prefix."""
        self._counts = Counter(held.by_worker.values())

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
        return (0, *self._counts)

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
        for worker in watch.narrow.workers:
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
        for worker in watch.narrow.workers:
            members = self._narrow[worker]
            del members[watch]
            if not members:
                del self._narrow[worker]

    def concerned(self, worker: WorkerId, before: HeldChunks, enough: float) -> Iterable["MatchWatch"]:
        """Return the members that a worker's change concerns, which did not change the most that any worker holds.

        `enough`: as in `WatchIndex.gained`.
        """
        now = self.held
        if self._others or min(before.least, now.least) < enough or self._common(before) != self._common(now):
            return self.members
        return (*self._wide, *self._narrow.get(worker, ()))

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
        expected = {(watch, worker) for watch in self.members if watch.narrow for worker in watch.narrow.workers}
        assert found == expected, "a narrow watch is listed wrongly"
        assert all(self._narrow.values()), "an entry is empty"

    def set(self, worker: WorkerId, chunks: int) -> tuple[int, int]:
        """Set how many chunks a worker holds. Returns the end that no worker has any more and the one that none had
        before; 0 if there is none.
        """
        ends, counts = {**self.held.by_worker}, self._counts
        before = ends.pop(worker, 0)
        if chunks:
            ends[worker] = chunks
            counts[chunks] += 1
        if worker not in self._able:
            self._others += bool(chunks) - bool(before)
        if before:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
        self.held = HeldChunks(ends)
        return (before if before not in counts else 0), (chunks if counts[chunks] == 1 else 0)


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

    def shared(self, hashes: bytes, known: int) -> int:
        """Return how many chunks the prompt shares with another; the first `known` are known to be shared."""
        return _shared(self.hashes, hashes, known)


class WatchIndex:
    """The groups of watched prompts of which the same workers matter: one worker, or all."""

    def __init__(self) -> None:
        self._groups: dict[Chunk, MatchGroup] = {}
        """By the last chunk of their prefixes."""
        self._held: dict[Chunk, dict[MatchGroup, None]] = {}
        self._lacked: dict[Chunk, dict[MatchGroup, None]] = {}
        self._beyond: dict[Chunk, dict[MatchWatch, None]] = {}
        """Prompts by the chunk after their group's prefix."""

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    def add(self, watch: MatchWatch) -> None:
        """Index a watch: it joins the group that there is of the same prefix, or its own becomes one."""
        group = self._groups.get(watch.group.last)
        if group is None:
            group = watch.group
            self._open(group)
        self._join(watch, group)

    def remove(self, watch: MatchWatch) -> None:
        """Remove a watch."""
        self._part(watch)
        if not watch.group.members:
            self._close(watch.group)

    def gained(self, worker: WorkerId, hashes: bytes, before: int, enough: float) -> list[MatchWatch]:
        """Take in that a worker holds a prefix now, of which it held the first `before` chunks only. Returns the
        watches that this concerns.

        `enough`: where a worker holds fewer chunks of a prefix, but any, every change concerns all watches.
        """
        chunk = _chunk(hashes, before)
        changed: list[MatchWatch] = []
        for group in [*self._lacked.get(chunk, ())]:
            shared = _shared(group.prefix, hashes, before)
            if shared == group.depth:
                deeper = [*self._beyond.get(_chunk(hashes, shared), ())]
                self._deepen(deeper, worker, hashes, shared)
                changed += deeper
            if group.members:
                changed += self._set(group, worker, shared, enough)
        beyond = [*self._beyond.get(chunk, ())]
        self._deepen(beyond, worker, hashes, before)
        return changed + beyond

    def lost(self, worker: WorkerId, hashes: bytes, enough: float) -> list[MatchWatch]:
        """Take in that a worker no longer holds this run of chunks. Returns the watches that this concerns; `enough`:
        as in `gained`.
        """
        changed: list[MatchWatch] = []
        held = self._held
        for place, (chunk,) in enumerate(iter_unpack(f"{HASH_BYTES}s", hashes) if held else ()):
            if chunk in held:
                for group in [*held[chunk]]:
                    end = group.held.at(worker)
                    if end and group.edge(end)[0] == chunk:
                        changed += self._set(group, worker, end - place - 1, enough)
        return changed

    def _deepen(self, watches: Iterable[MatchWatch], worker: WorkerId, hashes: bytes, known: int) -> None:
        """Move watches to groups of longer prefixes, of which a worker is the first holder."""
        for watch in watches:
            group, end = watch.group, watch.shared(hashes, known) * HASH_BYTES
            self._part(watch)
            target = self._groups.get(watch.hashes[end - HASH_BYTES : end])
            if target is None:
                target = MatchGroup(watch.hashes[:end], group.held)
                target.set(worker, end // HASH_BYTES)
                self._open(target)
            self._join(watch, target)
            if not group.members:
                self._close(group)

    def _set(self, group: MatchGroup, worker: WorkerId, chunks: int, enough: float) -> Iterable[MatchWatch]:
        """Set how many chunks of a group's prefix a worker holds. Returns the members that this concerns."""
        before = group.held
        gone, new = group.set(worker, chunks)
        if new:
            self._index(group, new)
        if gone:
            self._unindex(group, gone)
            if gone == group.depth:
                return self._shorten(group)
        return group.concerned(worker, before, enough)

    def _shorten(self, group: MatchGroup) -> Iterable[MatchWatch]:
        """Take in that no worker holds the whole prefix of a group any more. Returns those who were its members."""
        members = [*group.members]
        for watch in members:
            self._part(watch)
        self._close(group)
        shorter = MatchGroup(group.prefix[: group.held.most * HASH_BYTES], group.held)
        target = self._groups.get(shorter.last)
        if target is None:
            target = shorter
            self._open(target)
        for watch in members:
            self._join(watch, target)
        return members

    def _open(self, group: MatchGroup) -> None:
        self._groups[group.last] = group
        for chunks in group.ends:
            self._index(group, chunks)

    def _close(self, group: MatchGroup) -> None:
        del self._groups[group.last]
        for chunks in group.ends:
            self._unindex(group, chunks)

    def _index(self, group: MatchGroup, chunks: int) -> None:
        held, lacked = group.edge(chunks)
        if held:
            self._held.setdefault(held, {})[group] = None
        if lacked:
            self._lacked.setdefault(lacked, {})[group] = None

    def _unindex(self, group: MatchGroup, chunks: int) -> None:
        held, lacked = group.edge(chunks)
        if held:
            _remove(self._held, held, group)
        if lacked:
            _remove(self._lacked, lacked, group)

    def _join(self, watch: MatchWatch, group: MatchGroup) -> None:
        watch.group = group
        group.add(watch)
        if beyond := _chunk(watch.hashes, group.depth):
            self._beyond.setdefault(beyond, {})[watch] = None

    def _part(self, watch: MatchWatch) -> None:
        watch.group.remove(watch)
        if beyond := _chunk(watch.hashes, watch.group.depth):
            watches = self._beyond[beyond]
            del watches[watch]
            if not watches:
                del self._beyond[beyond]

    def check(self, watches: Iterable[MatchWatch]) -> None:
        """Raise AssertionError if the index differs from what these watches need."""
        members = {watch for group in self._groups.values() for watch in group.members}
        assert members == {*watches}, "the groups have other members than the watches"
        for last, group in self._groups.items():
            assert last == group.last, "a group is not where its prefix would find it"
            assert group.members, "a group is empty"
            assert group.depth == group.held.most, "a group's prefix is not the longest that a worker holds"
            assert all(watch.group is group and watch.hashes.startswith(group.prefix) for watch in group.members)
            group.check_narrow()
        edges = [(group, group.edge(chunks)) for group in self._groups.values() for chunks in group.ends]
        for side, index in enumerate((self._held, self._lacked)):
            indexed = {(group, chunk) for chunk, there in index.items() for group in there}
            assert indexed == {(group, edge[side]) for group, edge in edges if edge[side]}, "a group is indexed wrongly"
        beyond = {(watch, chunk) for chunk, there in self._beyond.items() for watch in there}
        expected = {(watch, _chunk(watch.hashes, watch.group.depth)) for watch in members}
        assert beyond == {(watch, chunk) for watch, chunk in expected if chunk}, "a watch is indexed wrongly"
        assert all((*self._held.values(), *self._lacked.values(), *self._beyond.values())), "an entry is empty"


def _chunk(hashes: bytes, place: int) -> Chunk:
    return hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]


def _shared(one: bytes, other: bytes, known: int) -> int:
    """Return how many chunks two prompts share; the first `known` are known to be shared."""
    end = known * HASH_BYTES
    while end < len(one) and one[end : end + HASH_BYTES] == other[end : end + HASH_BYTES]:
        end += HASH_BYTES
    return end // HASH_BYTES


def _remove(index: dict[Chunk, dict[MatchGroup, None]], chunk: Chunk, group: MatchGroup) -> None:
    groups = index[chunk]
    del groups[group]
    if not groups:
        del index[chunk]
