"""BR-H: balance over the next steps, with predictions of which running answers end soon (BalanceRoute, section 4,
Algorithm 3).
"""

from collections.abc import Mapping, Sequence

from router.core.model.cost import Charge
from router.core.model.request import Request, WorkerId
from router.core.policies.balance.balance_parameters import BrhParameters
from router.core.policies.balance.balance_route import BalanceRoute
from router.core.policies.balance.f_score import HorizonScore
from router.core.policies.balance.projection import LoadProjection
from router.core.policies.balance.rank_loads import RankWithRoom
from router.core.policies.context import PolicyContext
from router.core.predict.output_length import OutputPredictor, TrueLength, TrueOutputs
from router.core.predict.survival import ExactMatchLengths, SurvivalLengths


class Brh(BalanceRoute):
    """Scores the horizon: the loads as they will be when requests that are predicted to end have ended."""

    def __init__(self, context: PolicyContext) -> None:
        """Raises ValueError if the oracle is chosen outside of a simulation."""
        parameters = context.parameters.of(BrhParameters)
        super().__init__(context, parameters, parameters.beta)
        self._discounts = [parameters.discount**step for step in range(parameters.horizon + 1)]
        self._alpha = parameters.alpha
        predictor = _predictor(parameters, context)
        if predictor is not None:
            context.outputs.add_for_answers(predictor)
        self._projection = LoadProjection(predictor, parameters.horizon, parameters.refresh)

    def _margins(self, groups: Sequence[Sequence[RankWithRoom]]) -> Mapping[WorkerId, Sequence[float]]:
        projected = self._projection.loads
        margins: dict[WorkerId, Sequence[float]] = {}
        for ranks in groups:
            loads = {
                worker: projected(worker, rank.in_flight.context_tokens) for worker, rank in ranks[0].group.items()
            }
            most = [max(step) for step in zip(*loads.values(), strict=True)]
            for rank in ranks:
                margins[rank.worker] = [top - load for top, load in zip(most, loads[rank.worker], strict=True)]
        return margins

    def _score(self, rank: RankWithRoom, margins: Sequence[float]) -> HorizonScore:
        return HorizonScore(margins, self._discounts, self._alpha, self._penalty(rank))

    def _sent(self, request: Request, worker: WorkerId) -> None:
        super()._sent(request, worker)
        self._projection.add(request, worker, self._view.input_tokens(request))

    def resume(self, request: Request, worker: WorkerId, now: float) -> None:  # noqa: ARG002 - nothing depends on time
        self._sent(request, worker)

    def request_charged(self, charge: Charge) -> None:
        self._projection.request_charged(charge)

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        self._projection.request_ended(request, worker)


def _predictor(parameters: BrhParameters, context: PolicyContext) -> OutputPredictor | None:
    match parameters.predictor:
        case "none":
            return None
        case "survival":
            return SurvivalLengths(parameters.gate)
        case "exact_match":
            return ExactMatchLengths(parameters.gate)
        case "oracle":
            true_outputs = context.parameters.of(TrueOutputs).of
            if true_outputs is None:
                raise ValueError("only a simulation knows the true outputs")
            return TrueLength(true_outputs)
