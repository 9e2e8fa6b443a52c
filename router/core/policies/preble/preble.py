"""Preble's placement, E2: exploit what is cached where that is most of a prompt, and explore by load where it is not.

"Preble: Efficient Distributed Prompt Scheduling for LLM Serving", section 3.2, Algorithms 1 and 2, with the constants
of the code published with it. Loads are seconds of a worker's time. Where this departs from the paper: prefill time is
at the pace measured of each worker instead of a regression made beforehand; the prefix map's beliefs replace the
notices of eviction that their engines send; the waits that it compares are those here. Where the code departs from the
paper, this does not: L is of all requests in H, P is part of the cost, N is over the requests of the worker, and output
is as long as was seen, not as the limit. Nor has this its mistakes: of several workers with a prefix the one chosen is
the one used, and only what is believed cached is exploited. What the code adds is left out: no prefix is kept from
being moved by the depth of what hangs on it.

It goes with any order; with `priority_groups` it is Preble.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Final, NamedTuple

from router.core.model.cost import Charge
from router.core.model.request import Request, RequestId, WorkerId
from router.core.policies.base import Candidate, Placed, Placement
from router.core.policies.context import PolicyContext
from router.core.policies.preble.history import History, chunks_of
from router.core.policies.simple.balancers import lightest

VICTIMS: Final = 64
"""Runs of chunks that the cost of eviction looks at most at, so that no decision costs more than so much."""


@dataclass(frozen=True, slots=True)
class PrebleParameters:
    """Preble placement (E2)."""

    history: float = 180.0
    """H, in seconds: how long a request counts in the load of its worker."""
    decode_seconds: float = 0.025
    """Of a worker's time for each output token."""
    first_output: int = 45
    """Output tokens expected at a worker where no request has ended within H."""
    eviction_cost: bool = True
    """Count what must be computed again because it is evicted for a request."""
    decode_ratio: float = 0.7
    """Explore the worker of whose input most was cached of late, if that was more than this part; 0: never."""
    decode_history: float = 30.0
    """Seconds that count for that."""
    balance_ratio: float = 1.5
    """Th_bal: the most loaded worker is relieved while it has more than this many times the least load; 0: never."""
    balance_after: int = 50
    """Requests for each worker that are placed before the first is relieved."""
    copy_slowdown: float = 2.0
    """Copy a prefix that only the most loaded worker has, when requests wait this many times as long there in the later
    half of H as in the earlier; 0: never."""

    def __post_init__(self) -> None:
        for name in ("history", "decode_history"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        for name in (
            "decode_seconds",
            "first_output",
            "decode_ratio",
            "balance_ratio",
            "balance_after",
            "copy_slowdown",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")


class PlacedRequest(NamedTuple):
    """A request that is placed and not on its way."""

    since: float
    candidate: Candidate
    """The worker that it waits for."""


class RunningRequest(NamedTuple):
    """A request on its way."""

    worker: WorkerId
    output: int
    """Tokens so far."""


class Preble(Placement):
    """Algorithm 1, and the adjustment of loads after it."""

    locality: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        self._parameters = parameters = context.parameters.of(PrebleParameters)
        self._view = context.view
        self._history = History(parameters.history, parameters.decode_history)
        self._waiting: dict[RequestId, PlacedRequest] = {}
        self._running: dict[RequestId, RunningRequest] = {}
        self._turn = 0

    def advance(self, now: float) -> None:
        """See `Placement`."""
        self._history.advance(now)

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:
        """SCHEDULEREQUEST of Algorithm 1."""
        self._turn += 1
        longest = max(candidates, key=lambda candidate: candidate.cached_tokens)
        if longest.cached_tokens > longest.extend_tokens:
            holders = [c for c in candidates if c.cached_tokens == longest.cached_tokens]
            chosen, why = self._rebalance(self._cheapest(request, holders), holders, request, candidates)
        else:
            chosen, why = self._explore(request, candidates)
        self._history.place(request, chosen)
        self._waiting[request.id] = PlacedRequest(self._history.now, chosen)
        return Placed(chosen.worker, why)

    def _explore(self, request: Request, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        """The worker that mostly decodes, as prefill costs it little, or else the cheapest."""
        if self._parameters.decode_ratio:
            ratios = [self._history.of(candidate.worker).hit_ratio for candidate in candidates]
            if max(ratios) > self._parameters.decode_ratio:
                return candidates[ratios.index(max(ratios))], "decodes"
        return self._cheapest(request, candidates), "load"

    def _rebalance(
        self, chosen: Candidate, holders: Sequence[Candidate], request: Request, candidates: Sequence[Candidate]
    ) -> tuple[Candidate, str]:
        """The worker to exploit, unless it is the most loaded and to be relieved, or its prefix to be copied."""
        loads = {candidate.worker: self._load(candidate.worker) for candidate in candidates}
        load, least = loads[chosen.worker], min(loads.values())
        if len(candidates) == 1 or load < max(loads.values()):
            return chosen, "prefix"
        parameters = self._parameters
        settled = self._history.placements >= parameters.balance_after * len(candidates)
        if parameters.balance_ratio and settled and load > parameters.balance_ratio * least:
            return lightest([c for c in candidates if loads[c.worker] == least], self._turn), "balance"
        if parameters.copy_slowdown and len(holders) == 1 and self._slowdown(chosen.worker) >= parameters.copy_slowdown:
            return self._cheapest(request, [c for c in candidates if c is not chosen]), "copy"
        return chosen, "prefix"

    def _slowdown(self, worker: WorkerId) -> float:
        """How many times as long a request takes to its first token in the later half of H as in the earlier one.

        Its prefill at the pace of now is part of that: else every wait after none would be endlessly longer.
        """
        history = self._history.of(worker)
        earlier, later = (
            half.mean + self._view.prefill_seconds(worker, round(computed.mean))
            for half, computed in (
                (history.waits.earlier, history.computed.earlier),
                (history.waits.later, history.computed.later),
            )
        )
        return later / earlier if earlier else 0.0

    def _cheapest(self, request: Request, candidates: Sequence[Candidate]) -> Candidate:
        """The worker with the least cost; of equals, the one with the fewest requests."""
        if len(candidates) == 1:
            return candidates[0]
        costs = [self._cost(request, candidate) for candidate in candidates]
        least = min(costs)
        tied = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == least]
        return lightest(tied, self._turn)

    def _cost(self, request: Request, candidate: Candidate) -> float:
        """LOADCOST of Algorithm 2, in seconds: L + M + P."""
        worker = candidate.worker
        prefill = self._view.prefill_seconds(worker, candidate.extend_tokens)
        return self._load(worker) + self._eviction(request, candidate) + prefill

    def _load(self, worker: WorkerId) -> float:
        """L: what the requests of the last H seconds cost the worker."""
        history = self._history.of(worker)
        output = history.outputs.mean if len(history.outputs) else self._parameters.first_output
        decoded = output * len(history.missed)
        prefill = self._view.prefill_seconds(worker, round(history.missed.total))
        return prefill + self._parameters.decode_seconds * decoded

    def _eviction(self, request: Request, candidate: Candidate) -> float:
        """M: what is computed again of what goes for this request, the cache being full at all times."""
        chunks = chunks_of(request)
        placed = len(self._history.of(candidate.worker).missed)
        if not self._parameters.eviction_cost or not chunks or not placed:
            return 0.0
        tokens_per_chunk = (candidate.cached_tokens + candidate.extend_tokens) / chunks
        missed = round(candidate.extend_tokens / tokens_per_chunk)
        shared = 0.0
        for run in islice(self._history.stalest(candidate.worker, missed), VICTIMS):
            shared += run.chunks * min(1.0, run.requests / placed)
        return self._view.prefill_seconds(candidate.worker, round(shared * tokens_per_chunk))

    def unplace(self, request: RequestId) -> None:
        """See `Placement`. One that was withdrawn stays in the history."""
        self._waiting.pop(request, None)

    def request_dispatched(self, request: RequestId, now: float) -> None:
        """See `Placement`."""
        since, candidate = self._waiting.pop(request)
        self._history.of(candidate.worker).request_dispatched(now - since, candidate.extend_tokens, now)
        self._running[request] = RunningRequest(candidate.worker, 0)

    def request_charged(self, charge: Charge) -> None:
        """See `Placement`."""
        self._running[charge.request] = RunningRequest(charge.worker, charge.after.output)

    def request_ended(self, request: RequestId) -> None:
        """See `Placement`. A request that had no answer says nothing about the length of answers."""
        worker, output = self._running.pop(request)
        if output:
            self._history.answered(worker, output)

    def worker_left(self, worker: WorkerId) -> None:
        """See `Placement`."""
        self._history.drop(worker)
