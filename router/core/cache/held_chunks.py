"""How far workers hold the prompts of one request."""

from collections.abc import Collection, Mapping
from typing import Final

from router.core.model.request import WorkerId


class HeldChunks:
    """How many chunks of a request's prompts each worker holds. Never changes."""

    __slots__ = ("_among", "_at_least", "by_worker", "least", "most")

    def __init__(self, by_worker: Mapping[WorkerId, int], ends: Collection[int] | None = None) -> None:
        """`by_worker`: without the workers that hold none. `ends`: the numbers in it, each once, if they are known."""
        self.by_worker = by_worker
        numbers = by_worker.values() if ends is None else ends
        self.most = max(numbers, default=0)
        self.least = min(numbers, default=0)
        """The fewest that a worker holds which holds any; 0 if there is none."""
        self._at_least: dict[int, Mapping[WorkerId, int]] = {}
        """Answers of `at_least`, because requests of one group ask alike."""
        self._among: tuple[Mapping[WorkerId, object], HeldChunks | None] | None = None
        """The same for the latest workers of `among`; None for this object itself, as a cycle would outlive it."""

    def at(self, worker: WorkerId) -> int:
        """Return how many chunks this worker holds."""
        return self.by_worker.get(worker, 0)

    def changed(self, worker: WorkerId, chunks: int, ends: Collection[int]) -> "HeldChunks":
        """Return what is held once a worker holds this many chunks. `ends`: the numbers of chunks that any worker holds
        then.
        """
        by_worker = {**self.by_worker}
        if chunks:
            by_worker[worker] = chunks
        else:
            by_worker.pop(worker, None)
        changed = HeldChunks(by_worker, ends)
        if self._among is not None and self._among[1] is None and worker in self._among[0]:
            changed._among = self._among  # nobody else holds any now, either
        return changed

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


NOTHING_HELD: Final = HeldChunks({})
"""No worker holds any chunk."""
