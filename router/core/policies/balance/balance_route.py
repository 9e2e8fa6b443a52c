"""The two stages of BalanceRoute ("Tackling the Data-Parallel Load Balancing Bottleneck in LLM Serving"), for BR-0 and
BR-H.

Ranks that step together wait for the fullest of them at every step, so what counts is not how many requests a rank has
but how many tokens it reads. All requests wait in one pool. Whenever a rank has room, the rank with the most free
places takes the request whose F-score there is largest (sections 3.2 and 4.2).

Stage 1, while more than `threshold` places are free in all, admits one request. Stage 2 looks at the first `candidates`
of the pool and admits the subset of at most `subset` of them, and as many as the rank has places for, whose F-score is
largest; if that is not positive, the best single one all the same, to avoid starvation. Of ranks with as many free
places, the one with the largest margin goes first; of these, the one that was sent nothing for longest.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Final

from router.core.model.commands import Deficit
from router.core.model.cost import Charge
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.balance.balance_parameters import BalanceRouteParameters
from router.core.policies.balance.f_score import FScore, best_subset, largest_score
from router.core.policies.balance.rank_loads import RankLoads, RankWithRoom
from router.core.policies.balance.waiting_pool import WaitingPool, WeighedRequest
from router.core.policies.base import Choice, Policy, Properties
from router.core.policies.context import PolicyContext


class BalanceRoute(Policy):
    """The pool and the two stages. A subclass says what margins its ranks have, now or over a horizon."""

    properties = Properties(pooled=True, work_conserving=True)
    next_deadline = inf

    def __init__(self, context: PolicyContext, parameters: BalanceRouteParameters, beta: float) -> None:
        """`beta`: 0 for the number of ranks in a group."""
        self._view: Final = context.view
        self._backlog = context.backlog
        self._parameters = parameters
        self._beta = beta
        self._pool = WaitingPool(sorts_all=not parameters.fill_candidates or parameters.candidates_by != "arrival")
        self._loads = RankLoads(context.view)
        self._planned: list[RequestId] = []
        """What is left of a subset that stage 2 chose for `_planned_rank`, to be dispatched by the next calls."""
        self._planned_rank = WorkerId("")

    def enqueue(self, request: Request, now: float) -> None:
        self._planned.clear()
        self._pool.add(request, self._view.input_tokens(request))
        self._backlog.add(request.worker, request.client, now)

    def withdraw(self, request: RequestId, now: float) -> None:
        self._planned.clear()
        self._take(request, now)

    def _take(self, request: RequestId, now: float) -> Request:
        taken = self._pool.remove(request)
        self._backlog.remove(taken.worker, taken.client, now)
        return taken

    def next(self, now: float) -> Choice | None:
        chosen = self._next_planned() or self._choose()
        if chosen is None:
            return None
        request, worker, why = chosen
        self._take(request.id, now)
        self._sent(request, worker)
        return Choice(request, worker, why)

    def _next_planned(self) -> tuple[Request, WorkerId, str] | None:
        """Return the next request of a subset for which its rank still has room."""
        while self._planned:
            request = self._pool[self._planned.pop(0)]
            if self._view.admits(self._planned_rank, request):
                return request, self._planned_rank, "subset"
        return None

    def _choose(self) -> tuple[Request, WorkerId, str] | None:
        """Return the next request by the two stages, its rank, and why."""
        if not len(self._pool):
            return None
        groups = self._loads.with_room()
        ranks = [rank for group in groups for rank in group]
        if not ranks:
            return None
        margins = self._margins(groups)
        if len(ranks) > 1:
            ranks.sort(key=lambda rank: (-self._places(rank), -min(margins[rank.worker])))
        threshold = self._parameters.threshold
        fills = not threshold or sum([self._places(rank) for rank in ranks]) > threshold
        for rank in ranks:
            routes = self._view.routes(rank.worker)
            score = self._score(rank, margins[rank.worker])
            request = self._fill(rank, routes, score) if fills else self._refine(rank, routes, score)
            if request is not None:
                return request, rank.worker, "fill" if fills else "refine"
        return None

    def _places(self, rank: RankWithRoom) -> float:
        """Return how many more requests a rank with room may have in flight, at least 1."""
        return max(1, self._view.free_places(rank.worker))

    def _score(self, rank: RankWithRoom, margins: Sequence[float]) -> FScore:
        """F of a rank with these margins."""
        raise NotImplementedError

    def _penalty(self, rank: RankWithRoom) -> float:
        """Return the penalty for each token by which a rank would exceed the fullest one of its group."""
        return self._beta or len(rank.group)

    def _fill(self, rank: RankWithRoom, routes: Collection[str], score: FScore) -> Request | None:
        """Stage 1: the request with the largest F."""
        count = self._parameters.fill_candidates
        candidates = self._pool.first_by_weight(routes, count) if count else self._pool.around(routes, score.kink)
        return self._best(rank.worker, candidates, score)

    def _refine(self, rank: RankWithRoom, routes: Collection[str], score: FScore) -> Request | None:
        """Stage 2: the first request of the subset with the largest F. The others are planned."""
        candidates = self._candidates(routes)
        most = int(min(self._places(rank), self._parameters.subset, len(candidates)))
        if most > 1:
            subset = best_subset([weighed.weight for weighed in candidates], most, score)
            if score(subset.total) > 0:
                self._planned_rank = rank.worker
                self._planned = [weighed.request.id for weighed in subset.members(candidates)]
                if (planned := self._next_planned()) is not None:
                    return planned[0]
        return self._best(rank.worker, candidates, score)

    def _candidates(self, routes: Collection[str]) -> Sequence[WeighedRequest]:
        """Return the requests that stage 2 chooses from, in order of weight."""
        count = self._parameters.candidates
        match self._parameters.candidates_by:
            case "arrival":
                return self._pool.first_by_weight(routes, count)
            case "largest":
                return self._pool.heaviest(routes, count)
            case "smallest":
                return self._pool.lightest(routes, count)

    def _best(self, worker: WorkerId, candidates: Sequence[WeighedRequest], score: FScore) -> Request | None:
        """Return the request with the largest F of those that the rank's window admits; of equals the one that arrived
        first. `candidates` are in order of weight.
        """
        if not candidates:
            return None
        _, _, best = largest_score(candidates, score)
        if self._view.admits(worker, best):
            return best
        ranked = sorted([(-score(weight), arrival, request) for weight, arrival, request in candidates])
        return next((request for _, _, request in ranked if self._view.admits(worker, request)), None)

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:  # noqa: ARG002
        """Choose the lightest of these workers."""
        worker = min(workers, key=self._view.context_tokens)
        self._sent(request, worker)
        return worker

    def _margins(self, groups: Sequence[Sequence[RankWithRoom]]) -> Mapping[WorkerId, Sequence[float]]:
        """Return the margins of each rank with room, in tokens: one for each step of the horizon."""
        raise NotImplementedError

    def _sent(self, request: Request, worker: WorkerId) -> None:  # noqa: ARG002 - subclasses keep more
        """Note that a request is sent to a worker."""
        self._loads.note_dispatch(worker)

    def worker_joined(self, worker: WorkerId, now: float) -> None:  # noqa: ARG002 - nothing depends on time
        self._loads.worker_joined(worker)

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        """A pool has no queue to move, but some requests may be served by no other worker."""
        self._planned.clear()
        self._loads.worker_left(worker)
        orphans = [request for request in self._pool if not self._view.able(request)]
        for request in orphans:
            self._take(request.id, now)
        return orphans

    def request_charged(self, charge: Charge) -> None:
        """Do nothing: the view knows each rank's load."""

    def request_started(self, request: Request, worker: WorkerId) -> None:
        """Do nothing: what has not started counts as if it had."""

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """Do nothing: the view knows each rank's load."""

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """Do nothing: this policy ignores prefixes."""

    def deficit(self, client: ClientId, worker: WorkerId) -> Deficit:  # noqa: ARG002 - this policy keeps no deficits
        return Deficit()
