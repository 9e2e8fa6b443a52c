"""What each rank's load will be over the next decode steps, given when running requests are predicted to end.

BalanceRoute, Appendix C.1, eq. 7.

With n requests on a rank, its load grows by n in each step. A request that is predicted to end within the horizon
counts until then; every other one counts throughout. Predictions are kept by the rules of Appendix C.2.3: each is made
anew after so many tokens, loses one step with each token in between, is at least one step as long as the request runs,
and is made anew at once when it would be less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from router.core.model.cost import Charge
from router.core.model.request import Request, RequestId, WorkerId
from router.core.predict.output_predictor import OutputPredictor


@dataclass(slots=True)
class RunningRequest:
    """A request in flight, and when it is predicted to end."""

    request: Request
    tokens: int
    """Its context: its input and its output so far."""
    age: int = 0
    """Its output so far, in tokens, as far as this policy has sent it."""
    left: float = inf
    """Decode steps until it is predicted to end, at least 1; infinite if it is predicted to outlive the horizon."""
    unrefreshed: int = 0
    """Output tokens since the prediction was made."""


class LoadProjection:
    """The requests in flight at each rank, and the loads that follow from when they are predicted to end."""

    def __init__(self, predictor: OutputPredictor | None, horizon: int, refresh: int) -> None:
        """`predictor`: None to predict that no request ends within the horizon. `horizon`: H, in decode steps.
        `refresh`: output tokens after which a prediction is made anew.
        """
        self._predictor = predictor
        self._horizon = horizon
        self._refresh = refresh
        self._ranks: dict[WorkerId, dict[RequestId, RunningRequest]] = {}
        """Without the ranks that have none."""
        self._loads: dict[WorkerId, tuple[int, Sequence[int]]] = {}
        """Of the same ranks, the projected loads that still hold, each after the load from which it follows."""

    def add(self, request: Request, worker: WorkerId, tokens: int) -> None:
        """Add a request of this many input tokens that is sent to a rank."""
        running = RunningRequest(request, tokens)
        self._predict(running)
        self._ranks.setdefault(worker, {})[request.id] = running
        self._loads.pop(worker, None)

    def request_charged(self, charge: Charge) -> None:
        """A request in flight may have more output.

        `charge.before` does not count: of a request that was taken over, it is what an earlier run has charged.
        """
        running = self._ranks[charge.worker][charge.request]
        if not (gained := charge.after.output - running.age):
            return
        running.tokens += gained
        running.age += gained
        running.left -= gained
        running.unrefreshed += gained
        if running.unrefreshed >= self._refresh or running.left < 1:
            self._predict(running)
        self._loads.pop(charge.worker, None)

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """A request left its rank."""
        running = self._ranks[worker]
        del running[request.id]
        if not running:
            del self._ranks[worker]
        self._loads.pop(worker, None)

    def loads(self, worker: WorkerId, load: int) -> Sequence[int]:
        """Return a rank's load in 0 to H steps, in tokens. `load`: what it is now."""
        known = self._loads.get(worker)
        if known is None or known[0] != load:
            known = load, self._project(worker, load)
            if worker in self._ranks:
                self._loads[worker] = known
        return known[1]

    def _project(self, worker: WorkerId, load: int) -> Sequence[int]:
        running = self._ranks.get(worker, {}).values()
        ending = sorted([(ceil(each.left), each.tokens) for each in running if each.left <= self._horizon])
        loads: list[int] = []
        requests = len(running)
        for ends, tokens in ending:
            loads += [load + requests * step for step in range(len(loads), ends)]
            load, requests = load - tokens, requests - 1
        return loads + [load + requests * step for step in range(len(loads), self._horizon + 1)]

    def _predict(self, running: RunningRequest) -> None:
        running.unrefreshed = 0
        if self._predictor is not None:
            left = self._predictor.remaining(running.request, running.age, self._horizon)
            running.left = inf if left >= self._horizon else max(1.0, left)
