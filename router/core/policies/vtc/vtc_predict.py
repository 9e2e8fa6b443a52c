"""VTC with output prediction: a request's predicted output is charged at dispatch instead of as it streams.

After the code published with "Fairness in Serving Large Language Models", which implements the paper's "VTC (predict)"
and "VTC (oracle)". Under plain VTC a client's counter lags behind by all output that the client has in flight, and the
last term of its bound is that lag; predicted output does not lag. Output beyond the prediction is charged as it
streams, and output that was not produced is refunded when the request ends, so both charge the same in total.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from router.core.model.cost import Charge
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.context import PolicyContext
from router.core.policies.vtc.vtc import Vtc
from router.core.policies.vtc.vtc_parameters import OracleParameters
from router.core.predict.output_length import ClientMeans, OutputPredictor, StatedLimit


@dataclass(slots=True)
class Prepaid:
    """The predicted and the produced output of one request in flight, in tokens."""

    client: ClientId
    predicted: int
    produced: int = 0

    @property
    def tokens(self) -> int:
        """Output tokens that are charged and not produced yet."""
        return max(0, self.predicted - self.produced)


class PredictiveVtc(Vtc):
    """VTC with prepaid output."""

    def __init__(self, context: PolicyContext, worker: WorkerId, predictor: OutputPredictor) -> None:
        super().__init__(context, worker)
        self._predictor = predictor
        self._prepaid: dict[RequestId, Prepaid] = {}

    def request_dispatched(self, request: Request, now: float) -> None:
        super().request_dispatched(request, now)
        prepaid = self._prepaid[request.id] = Prepaid(request.client, round(self._predictor.remaining(request)))
        self._charge(request.id, request.client, self._cost.output * prepaid.tokens)

    def request_charged(self, charge: Charge) -> None:
        prepaid = self._prepaid[charge.request]
        before = prepaid.tokens
        prepaid.produced = charge.after.output
        used = before - prepaid.tokens
        cost = self._cost.difference(charge.before, charge.after)
        self._charge(charge.request, charge.client, cost - self._cost.output * used)

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """Refunds in what it yields the output that is only predicted."""
        prepaid: defaultdict[ClientId, float] = defaultdict(float)
        for request, each in self._prepaid.items():
            prepaid[each.client] += self._cost.output * each.tokens / self._weights[request]
        for client, value, weight in super().saved():
            yield client, value - prepaid[client], weight

    def request_ended(self, request: Request) -> None:
        prepaid = self._prepaid.pop(request.id)
        self._charge(request.id, request.client, -self._cost.output * prepaid.tokens)
        super().request_ended(request)


class MeanPredictionVtc(PredictiveVtc):
    """Predicts the mean output of a client's last requests to this worker."""

    def __init__(self, context: PolicyContext, worker: WorkerId) -> None:
        self._means = ClientMeans()
        context.outputs.add(self._means, worker)
        super().__init__(context, worker, self._means)

    def forget(self, client: ClientId) -> None:
        self._means.forget(client)
        super().forget(client)


class OracleVtc(PredictiveVtc):
    """Predicts the output limit that a request states, which is its true length if the request asked for exactly
    that.
    """

    def __init__(self, context: PolicyContext, worker: WorkerId) -> None:
        error = context.parameters.of(OracleParameters).error
        super().__init__(context, worker, StatedLimit(error, context.random))
