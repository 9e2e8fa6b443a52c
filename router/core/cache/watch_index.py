"""Watches on the matches of queued requests, indexed so that a change finds those that it concerns.

A group of watched prompts is indexed by the chunks at which its workers' matches end: by the last chunk that a worker
holds, to find what it loses, and by the first one that it lacks, to find what it gains. What is gained beyond the
group's prefix moves single prompts to another group. So the cost of a change grows with the groups that it concerns,
and, where their watches are narrow, not with the requests that wait.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from struct import iter_unpack
from typing import Final

from router.core.cache.match_group import Chunk, MatchGroup, MatchWatch
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId

CHUNK_FORMAT: Final = f"{HASH_BYTES}s"


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

    def gained(self, worker: WorkerId, hashes: bytes, before: int, enough: Callable[[], float]) -> Sequence[MatchWatch]:
        """Take in that a worker holds a prefix now, of which it held the first `before` chunks only. Returns the
        watches that this concerns.

        `enough` returns a number: where a worker holds fewer chunks of a prefix, but any, every change concerns all
        watches.
        """
        chunk = _chunk(hashes, before)
        if chunk not in self._lacked and chunk not in self._beyond:
            return ()
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

    def lost(self, worker: WorkerId, hashes: bytes, enough: Callable[[], float]) -> Sequence[MatchWatch]:
        """Take in that a worker no longer holds this run of chunks. Returns the watches that this concerns; `enough`:
        as in `gained`.
        """
        held = self._held
        if not held:
            return ()
        changed: list[MatchWatch] = []
        chunks, place = [*chain.from_iterable(iter_unpack(CHUNK_FORMAT, hashes))], 0
        for chunk in filter(held.__contains__, chunks):
            place = chunks.index(chunk, place)
            for group in [*held[chunk]]:
                end = group.held.by_worker.get(worker)
                if end and group.prefix.startswith(chunk, (end - 1) * HASH_BYTES):
                    changed += self._set(group, worker, end - place - 1, enough)
        return changed

    def _deepen(self, watches: Iterable[MatchWatch], worker: WorkerId, hashes: bytes, known: int) -> None:
        """Move watches to groups of longer prefixes, of which a worker is the first holder."""
        for watch in watches:
            group, end = watch.group, _shared(watch.hashes, hashes, known) * HASH_BYTES
            self._part(watch)
            target = self._groups.get(watch.hashes[end - HASH_BYTES : end])
            if target is None:
                target = MatchGroup(watch.hashes[:end], group.held)
                target.set(worker, end // HASH_BYTES)
                self._open(target)
            self._join(watch, target)
            if not group.members:
                self._close(group)

    def _set(
        self, group: MatchGroup, worker: WorkerId, chunks: int, enough: Callable[[], float]
    ) -> Iterable[MatchWatch]:
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
