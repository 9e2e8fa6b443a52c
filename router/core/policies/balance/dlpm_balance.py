"""DLPM from one pool, for ranks that step together: DLPM says which requests may go, balance which of them, and where.

The counters, refills and priority classes are those of `dlpm_home`, and so are the homes of requests. Of the oldest
requests that may go, the one goes whose F-score is largest (BalanceRoute, section 3.1), to the lightest rank that may
take it. A rank at which a request would lose much of its prefix is no choice before the request has left home.
"Locality-aware Fair Scheduling in LLM Serving" leaves the order among clients with a positive deficit free, so the
bound of `dlpm_home` holds.

A fleet in which no worker waits for another is served exactly as by `dlpm_home`.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Final

from router.core.model.request import Request, WorkerId
from router.core.policies.balance.arrival_pool import ArrivalPool
from router.core.policies.balance.arrival_queue import ArrivalQueue, oldest
from router.core.policies.balance.balance_parameters import DlpmBalanceParameters
from router.core.policies.balance.f_score import step_score
from router.core.policies.balance.rank_loads import RankLoads, RankWithRoom
from router.core.policies.base import Choice
from router.core.policies.context import FleetView, PolicyContext
from router.core.policies.dlpm.dlpm_home import DlpmHome
from router.core.policies.dlpm.home_pool import HomePool, PooledRequest

_passed: Final = attrgetter("passed")


class DlpmBalance(DlpmHome):
    """Keeps what `DlpmHome` keeps; while any workers step together, its queues are in order of arrival, and no client
    gets a counter per worker.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._balance: Final = context.parameters.of(DlpmBalanceParameters)
        self._ranks = RankLoads(context.view)
        self._balances = False
        """Whether any workers step together."""
        super().__init__(context, self._balance)

    def _new_pool(self, view: FleetView) -> HomePool:
        loss, wait_factor = self._balance.home_loss, self._balance.home_patience
        self._arrivals = ArrivalPool(
            view, self._loads, self._new_queue, loss=loss, wait_factor=wait_factor, eligibility=self._eligibility
        )
        return self._arrivals

    def worker_joined(self, worker: WorkerId, now: float) -> None:
        self._ranks.worker_joined(worker)
        super().worker_joined(worker, now)
        self._update_order()

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        self._ranks.worker_left(worker)
        orphans = super().worker_left(worker, now)
        self._update_order()
        return orphans

    def _take(self, choice: Choice, now: float) -> Choice:
        # What is sent needs its match. The pool watches that of what waits: afterwards the tree would be searched.
        self._view.size_and_match(choice.request)
        return super()._take(choice, now)

    def _count_sent(self, request: Request, worker: WorkerId, able: Mapping[WorkerId, int]) -> None:
        if self._balances:  # nothing is copied, so no deficit at a worker counts
            self._loads.dispatched(worker)
        else:
            super()._count_sent(request, worker, able)
        self._ranks.note_dispatch(worker)

    def _update_order(self) -> None:
        self._balances = self._ranks.any_group
        self._arrivals.keep_order(ordered=self._balances)

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:
        """Choose the lightest rank of those that hold nearly as much of the request's prefix as the best."""
        if not self._balances:
            return super().resend(request, workers, now)
        matched = self._view.match(request)
        enough = max(matched.get(each, 0) for each in workers) - self._balance.home_loss
        homes = [each for each in workers if matched.get(each, 0) >= enough]
        worker = min(homes, key=self._view.context_tokens)
        self._now = now
        self._send(request, worker, self._view.able(request))
        return worker

    def _choose_for(self, newcomer: PooledRequest, now: float) -> Choice | None:
        if not self._balances:
            return super()._choose_for(newcomer, now)
        choices = (self._best((newcomer,), ranks, now) for ranks in self._ranks.with_room())
        return next((choice for choice in choices if choice is not None), None)

    def _choose_next(self, now: float) -> Choice | None:
        """Choose in the group with the lowest load; in the next one if nothing may go there."""
        if not self._balances:
            return super()._choose_next(now)
        choices = (self._next_in_group(ranks, now) for ranks in self._ranks.with_room())
        return next((choice for choice in choices if choice is not None), None)

    def _next_in_group(self, ranks: list[RankWithRoom], now: float) -> Choice | None:
        """Return the next request for these ranks of one group, the lightest first, by priority class."""
        queues: dict[ArrivalQueue, None] = {}
        for rank in ranks:
            routes = self._view.routes(rank.worker)
            if found := self._arrivals.by_arrival(rank.worker, routes):
                self._refill(rank.worker, routes, now)
                queues.update(dict.fromkeys(found))
        if not queues:
            return None
        for priority_class in self._eligibility.waiting_classes:
            candidates = oldest([*queues], priority_class, self._balance.candidates, self._eligibility)
            if candidates and (choice := self._best(candidates, ranks, now)):
                return choice
        return None

    def _best(self, candidates: Sequence[PooledRequest], ranks: list[RankWithRoom], now: float) -> Choice | None:
        """Return the candidate that was passed over too often, at the lightest rank that may take it, or else the one
        with the largest F. None if no rank admits any. `candidates` come in order of arrival.

        If one that was passed over too often fits no rank, these ranks are removed: their room is kept for it.
        """
        patience = self._balance.patience
        if max(map(_passed, candidates)) >= patience:
            for waiting in candidates:
                if waiting.passed >= patience:
                    if choice := self._at_best_rank(waiting, ranks, now, "passed over"):
                        return choice
                    ranks[:] = [rank for rank in ranks if not waiting.may_go(rank.worker, now)]
        refused: set[int] = set()
        while (best := self._largest(candidates, refused, ranks, now)) is not None:
            if choice := self._at_best_rank(candidates[best], ranks, now, "balance"):
                for earlier in candidates[:best]:
                    earlier.passed += 1
                return choice
            refused.add(best)
        return None

    def _largest(
        self, candidates: Sequence[PooledRequest], refused: Collection[int], ranks: Sequence[RankWithRoom], now: float
    ) -> int | None:
        """Return the place of the candidate with the largest F at the lightest of these ranks that may take it, of
        equals the oldest; None if no rank may take any. Candidates at the places that were refused do not count.
        """
        beta, best, largest = self._balance.beta, None, -inf
        for place, waiting in enumerate(candidates):
            if waiting.tokens > largest and place not in refused:  # F is at most its tokens
                takers = waiting.takers(now)
                for rank in ranks:
                    if rank.worker in takers:
                        score = step_score(waiting.tokens, rank.margin, beta)
                        if score > largest:
                            best, largest = place, score
                        break
        return best

    def _at_best_rank(
        self, waiting: PooledRequest, ranks: Sequence[RankWithRoom], now: float, why: str
    ) -> Choice | None:
        """Return the lightest rank that may take a request and admits it: of all ranks its F is largest there."""
        for rank in ranks:
            if waiting.may_go(rank.worker, now) and self._view.admits(rank.worker, waiting.request):
                return Choice(waiting.request, rank.worker, "home" if rank.worker in waiting.homes else why)
        return None
