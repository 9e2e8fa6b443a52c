"""What Preble remembers of each worker: its requests of the last H seconds, as sums that are cheap to read."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import Request, WorkerId
from router.core.policies.base import Candidate
from router.core.policies.preble.recent_prefixes import PrefixRun, RecentPrefixes


class TimedAmount(NamedTuple):
    """An amount and the time at which it was counted."""

    time: float
    amount: float


class SlidingSum:
    """The sum and the mean of the amounts counted within a sliding window of seconds."""

    __slots__ = ("_samples", "_seconds", "total")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[TimedAmount] = deque()
        self.total = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def mean(self) -> float:
        """The mean amount; 0 if there is none."""
        return self.total / len(self._samples) if self._samples else 0.0

    def add(self, timed: TimedAmount) -> None:
        """Add an amount. Times must not decrease."""
        self._samples.append(timed)
        self.total += timed.amount

    def advance(self, now: float) -> list[TimedAmount]:
        """Remove and return the amounts that are too old at `now`."""
        dropped = []
        while self._samples and self._samples[0].time <= now - self._seconds:
            dropped.append(self._samples.popleft())
            self.total -= dropped[-1].amount
        if not self._samples:
            self.total = 0.0  # drop the rounding error
        return dropped


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

    def __init__(self, seconds: float, ratio_seconds: float) -> None:
        """`ratio_seconds`: how many seconds `hit_ratio` looks back."""
        self.placed: deque[PlacedPrompts] = deque()
        self.missed = SlidingSum(seconds)
        """Uncached input tokens of each request."""
        self.outputs = SlidingSum(seconds)
        """Output tokens of the requests that ended."""
        self._cached = SlidingSum(ratio_seconds)
        self._sizes = SlidingSum(ratio_seconds)
        self.waits = HalfWindows(seconds)
        """Seconds from the placement of a request to its dispatch."""
        self.computed = HalfWindows(seconds)
        """Uncached input tokens of the same requests."""

    def advance(self, now: float) -> None:
        """Drop what is too old at `now`, except in `placed`."""
        for sliding in (self.missed, self.outputs, self._cached, self._sizes):
            sliding.advance(now)
        for halves in (self.waits, self.computed):
            halves.advance(now)

    def place(self, candidate: Candidate, now: float) -> None:
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

    def __init__(self, seconds: float, ratio_seconds: float) -> None:
        self._seconds = seconds
        self._ratio_seconds = ratio_seconds
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
            history = self._workers[worker] = WorkerHistory(self._seconds, self._ratio_seconds)
        return history

    def place(self, request: Request, candidate: Candidate) -> None:
        """Count a request that was placed on this worker."""
        prompts = tuple(prompt.hashes for prompt in request.prompts)
        for hashes in prompts:
            self._prefixes.add(hashes, candidate.worker)
        history = self.of(candidate.worker)
        history.placed.append(PlacedPrompts(self.now, prompts))
        history.place(candidate, self.now)
        self.placements += 1

    def answered(self, worker: WorkerId, output_tokens: int) -> None:
        """Count the output tokens of a request that ended."""
        if worker in self._workers:
            self._workers[worker].outputs.add(TimedAmount(self.now, output_tokens))

    def stalest(self, worker: WorkerId, chunks: int) -> Iterator[PrefixRun]:
        return self._prefixes.stalest(worker, chunks)

    def drop(self, worker: WorkerId) -> None:
        """Forget a worker that left."""
        history = self._workers.pop(worker, None)
        for placement in history.placed if history else ():
            self._forget(worker, placement)
        self._prefixes.drop(worker)

    def _forget(self, worker: WorkerId, placement: PlacedPrompts) -> None:
        for hashes in placement.prompts:
            self._prefixes.remove(hashes, worker)


def chunks_of(request: Request) -> int:
    """The number of full chunks in all prompts of a request."""
    return sum([len(prompt.hashes) for prompt in request.prompts]) // HASH_BYTES
