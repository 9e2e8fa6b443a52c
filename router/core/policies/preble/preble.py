"""Preble's placement, E2: exploit a cached prefix if it is most of a prompt; otherwise explore by load.

"Preble: Efficient Distributed Prompt Scheduling for LLM Serving", section 3.2, Algorithms 1 and 2, with the constants
of the code published with it. Loads are seconds of a worker's time. Differences from the paper: prefill time follows
the pace measured on each worker instead of a regression made beforehand; the prefix map's estimates replace the
engines' eviction notices; and the waits that it compares are those in the router. Where the published code differs from
the paper, this follows the paper: L is over all requests in H, P is part of the cost, N is over the requests of the
worker, and the output length is the observed one, not the limit. Two mistakes of the code are not repeated: of several
workers with a prefix, the chosen one is used, and only what is believed to be cached is exploited. One addition of the
code is left out: the depth of what hangs on a prefix does not keep the prefix from being moved.

Goes with any order; with `priority_groups` it is Preble.
"""

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar, Final, NamedTuple

from router.core.model.request import Request, RequestId, WorkerId
from router.core.policies.base import Candidate, Placed, Placement
from router.core.policies.context import PolicyContext
from router.core.policies.preble.load_history import History, chunks_of
from router.core.policies.preble.preble_parameters import PrebleParameters
from router.core.policies.simple.balancers import lightest

VICTIMS: Final = 64
"""The most runs of chunks that the eviction cost considers, which bounds the cost of a decision."""


class PlacedRequest(NamedTuple):
    """A request that was placed and not dispatched yet."""

    since: float
    candidate: Candidate
    """The worker that it waits for."""


class Preble(Placement):
    """Algorithm 1, followed by the load adjustment."""

    locality: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        self._parameters = parameters = context.parameters.of(PrebleParameters)
        self._view = context.view
        self._history = History(parameters.history, parameters.decode_history, parameters.first_output, context.outputs)
        self._waiting: dict[RequestId, PlacedRequest] = {}
        self._turn = 0

    def advance(self, now: float) -> None:
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
        self._history.record_placement(request, chosen)
        self._waiting[request.id] = PlacedRequest(self._history.now, chosen)
        return Placed(chosen.worker, why)

    def _explore(self, request: Request, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        """Return the worker that mostly decodes, because prefill costs it little; otherwise the cheapest."""
        if self._parameters.decode_ratio:
            ratios = [self._history.of(candidate.worker).hit_ratio for candidate in candidates]
            if max(ratios) > self._parameters.decode_ratio:
                return candidates[ratios.index(max(ratios))], "decodes"
        return self._cheapest(request, candidates), "load"

    def _rebalance(
        self, chosen: Candidate, holders: Sequence[Candidate], request: Request, candidates: Sequence[Candidate]
    ) -> tuple[Candidate, str]:
        """Return the worker to exploit, unless it is the most loaded and must be relieved or its prefix copied."""
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
        """Return how many times as long a request takes to its first token in the later half of H as in the earlier
        one.

        The time includes its prefill at the present pace; otherwise every wait after a period without waits would count
        as infinitely longer.
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
        """Return the worker with the lowest cost; of equals, the one with the fewest requests."""
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
        """L: the seconds that the requests of the last H seconds cost the worker."""
        history = self._history.of(worker)
        decoded = history.outputs.mean * len(history.missed)
        prefill = self._view.prefill_seconds(worker, round(history.missed.total))
        return prefill + self._parameters.decode_seconds * decoded

    def _eviction(self, request: Request, candidate: Candidate) -> float:
        """M: the seconds to compute again what is evicted for this request, assuming that the cache is always full."""
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
        """A withdrawn request stays in the history."""
        self._waiting.pop(request, None)

    def request_dispatched(self, request: RequestId, now: float) -> None:
        since, candidate = self._waiting.pop(request)
        self._history.of(candidate.worker).request_dispatched(now - since, candidate.extend_tokens, now)

    def worker_left(self, worker: WorkerId) -> None:
        self._history.forget_worker(worker)

    def forget_worker(self, worker: WorkerId) -> None:
        self._history.forget_worker(worker)
