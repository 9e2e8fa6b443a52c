"""What Preble remembers of each worker: its requests of the last H seconds, as sums that are cheap to read."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import Request, WorkerId
from router.core.policies.base import Candidate
from router.core.policies.preble.recent_prefixes import PrefixRun, RecentPrefixes
from router.core.predict.output_length import OutputPredictions, RecentMean
from router.core.predict.sliding_sum import SlidingSum, TimedAmount


class HalfWindows:
    """The amounts counted in the later half of a window of seconds, and in the earlier half."""

    __slots__ = ("earlier", "later")

    def __init__(self, seconds: float) -> None:
        self.earlier = SlidingSum(seconds)
        self.later = SlidingSum(seconds / 2)

    def advance(self, now: float) -> None:
        """Remove the amounts that are too old at `now`."""
        for timed in self.later.advance(now):
            self.earlier.add(timed)
        self.earlier.advance(now)


class PlacedPrompts(NamedTuple):
    """The prompts of a request that was placed, and when."""

    time: float
    prompts: Sequence[bytes]


class WorkerHistory:
    """One worker's requests, of the last H seconds unless stated otherwise."""

    def __init__(self, seconds: float, ratio_seconds: float, outputs: RecentMean) -> None:
        """`ratio_seconds`: how many seconds `hit_ratio` looks back. `outputs`: of the requests that ended."""
        self.placed: deque[PlacedPrompts] = deque()
        self.missed = SlidingSum(seconds)
        """Uncached input tokens of each request."""
        self.outputs = outputs
        self._cached = SlidingSum(ratio_seconds)
        self._sizes = SlidingSum(ratio_seconds)
        self.waits = HalfWindows(seconds)
        """Seconds from the placement of a request to its dispatch."""
        self.computed = HalfWindows(seconds)
        """Uncached input tokens of the same requests."""

    def advance(self, now: float) -> None:
        """Drop what is too old at `now`, except in `placed`."""
        self.outputs.advance(now)
        for sliding in (self.missed, self._cached, self._sizes):
            sliding.advance(now)
        for halves in (self.waits, self.computed):
            halves.advance(now)

    def record_placement(self, candidate: Candidate, now: float) -> None:
        """Count a request that was placed on this worker."""
        self.missed.add(TimedAmount(now, candidate.extend_tokens))
        self._cached.add(TimedAmount(now, candidate.cached_tokens))
        self._sizes.add(TimedAmount(now, candidate.cached_tokens + candidate.extend_tokens))

    def request_dispatched(self, seconds: float, extend_tokens: int, now: float) -> None:
        """Count how many seconds a request waited, and its uncached input tokens."""
        self.waits.later.add(TimedAmount(now, seconds))
        self.computed.later.add(TimedAmount(now, extend_tokens))

    @property
    def hit_ratio(self) -> float:
        """The fraction of the worker's input that was cached."""
        return self._cached.total / self._sizes.total if self._sizes.total else 0.0


class History:
    """The histories of all workers, and the prefixes that their requests share."""

    def __init__(
        self, seconds: float, ratio_seconds: float, first_output: float, predictions: OutputPredictions
    ) -> None:
        """`first_output`: output tokens expected at a worker where no request has ended. `predictions`: teaches the
        mean output of each worker.
        """
        self._seconds = seconds
        self._ratio_seconds = ratio_seconds
        self._first_output = first_output
        self._predictions = predictions
        self._workers: dict[WorkerId, WorkerHistory] = {}
        self._prefixes = RecentPrefixes()
        self.placements = 0
        """Requests placed since the start."""
        self.now = 0.0

    def advance(self, now: float) -> None:
        """Drop what is older than H seconds at `now`."""
        self.now = now
        for worker, history in self._workers.items():
            history.advance(now)
            while history.placed and history.placed[0].time <= now - self._seconds:
                self._forget(worker, history.placed.popleft())

    def of(self, worker: WorkerId) -> WorkerHistory:
        """One worker's history."""
        history = self._workers.get(worker)
        if history is None:
            outputs = RecentMean(self._seconds, self._first_output, self.now)
            self._predictions.add(outputs, worker)
            history = self._workers[worker] = WorkerHistory(self._seconds, self._ratio_seconds, outputs)
        return history

    def record_placement(self, request: Request, candidate: Candidate) -> None:
        """Count a request that was placed on this worker."""
        prompts = tuple(prompt.hashes for prompt in request.prompts)
        for hashes in prompts:
            self._prefixes.add(hashes, candidate.worker)
        history = self.of(candidate.worker)
        history.placed.append(PlacedPrompts(self.now, prompts))
        history.record_placement(candidate, self.now)
        self.placements += 1

    def stalest(self, worker: WorkerId, chunks: int) -> Iterator[PrefixRun]:
        return self._prefixes.stalest(worker, chunks)

    def forget_worker(self, worker: WorkerId) -> None:
        """Forget a worker that left."""
        history = self._workers.pop(worker, None)
        if history is not None:
            self._predictions.remove(history.outputs, worker)
            for placement in history.placed:
                self._forget(worker, placement)
        self._prefixes.forget_worker(worker)

    def _forget(self, worker: WorkerId, placement: PlacedPrompts) -> None:
        for hashes in placement.prompts:
            self._prefixes.remove(hashes, worker)


def chunks_of(request: Request) -> int:
    """Return the number of full chunks in all prompts of a request."""
    return sum([len(prompt.hashes) for prompt in request.prompts]) // HASH_BYTES
