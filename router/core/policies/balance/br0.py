"""BR-0: balance by what the next step reads, without predictions (BalanceRoute, section 3, Algorithm 2)."""

from collections.abc import Mapping, Sequence

from router.core.model.request import Request, WorkerId
from router.core.policies.balance.balance_parameters import Br0Parameters
from router.core.policies.balance.balance_route import BalanceRoute
from router.core.policies.balance.f_score import StepScore
from router.core.policies.balance.rank_loads import RankWithRoom
from router.core.policies.context import PolicyContext


class Br0(BalanceRoute):
    """Scores one step: the present loads, in which what was sent and has not started counts."""

    def __init__(self, context: PolicyContext) -> None:
        parameters = context.parameters.of(Br0Parameters)
        super().__init__(context, parameters, parameters.beta)
        self._bypass = parameters.bypass

    def _margins(self, groups: Sequence[Sequence[RankWithRoom]]) -> Mapping[WorkerId, Sequence[float]]:
        return {rank.worker: (rank.margin,) for group in groups for rank in group}

    def _score(self, rank: RankWithRoom, margins: Sequence[float]) -> StepScore:
        (margin,) = margins
        return StepScore(margin, self._penalty(rank))

    def _choose(self) -> tuple[Request, WorkerId, str] | None:
        if not self._bypass:
            return super()._choose()
        ranks = [rank for group in self._loads.with_room() for rank in group]
        for weight, _, request in self._pool.heads if ranks else ():
            able = self._view.able(request)
            scored = [(self._score(rank, (rank.margin,))(weight), rank.worker) for rank in ranks if rank.worker in able]
            for _, worker in sorted(scored, key=lambda each: -each[0]):
                if self._view.admits(worker, request):
                    return request, worker, "bypass"
        return None
