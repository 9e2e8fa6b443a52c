"""What each rank's load will be over the next decode steps, given when running requests are predicted to end.

BalanceRoute, Appendix C.1, eq. 7.

With n requests on a rank, its load grows by n in each step. A request that is predicted to end within the horizon
counts until then; every other one counts throughout. Predictions are kept by the rules of Appendix C.2.3: each is made
again after so many tokens, loses one step with each token in between, is at least one step as long as the request runs,
and is made again at once when it would be less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from router.core.model.cost import Charge
from router.core.model.request import Request, RequestId, WorkerId
from router.core.predict.output_length import OutputPredictor


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


@dataclass(slots=True)
class RankRequests:
    """The requests in flight at one rank."""

    running: dict[RequestId, RunningRequest] = field(default_factory=dict)
    ending: dict[RequestId, RunningRequest] = field(default_factory=dict)
    """Those of them that are predicted to end within the horizon."""
    load: int = -1
    """The load from which `loads` follow; negative if there are none."""
    loads: Sequence[int] = ()


class LoadProjection:
    """The requests in flight at each rank, and the loads that follow from when they are predicted to end."""

    def __init__(self, predictor: OutputPredictor | None, horizon: int, refresh: int) -> None:
        """`predictor`: None to predict that no request ends within the horizon. `horizon`: H, in decode steps.
        `refresh`: output tokens after which a prediction is made again.
        """
        self._predictor = predictor
        self._horizon = horizon
        self._refresh = refresh
        self._ranks: dict[WorkerId, RankRequests] = {}
        """Without the ranks that have none."""

    def add(self, request: Request, worker: WorkerId, tokens: int) -> None:
        """Add a request of this many input tokens that is sent to a rank."""
        rank = self._ranks.setdefault(worker, RankRequests())
        running = rank.running[request.id] = RunningRequest(request, tokens)
        self._predict(running, rank)
        rank.load = -1

    def request_charged(self, charge: Charge) -> None:
        """A request in flight may have more output.

        `charge.before` does not count: of a request that was taken over, it is what an earlier run has charged.
        """
        rank = self._ranks[charge.worker]
        running = rank.running[charge.request]
        if not (gained := charge.after.output - running.age):
            return
        running.tokens += gained
        running.age += gained
        running.left -= gained
        running.unrefreshed += gained
        if running.unrefreshed >= self._refresh or running.left < 1:
            self._predict(running, rank)
        rank.load = -1

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """A request left its rank."""
        rank = self._ranks[worker]
        del rank.running[request.id]
        rank.ending.pop(request.id, None)
        rank.load = -1
        if not rank.running:
            del self._ranks[worker]

    def loads(self, worker: WorkerId, load: int) -> Sequence[int]:
        """Return a rank's load in 0 to H steps, in tokens. `load`: what it is now."""
        rank = self._ranks.get(worker)
        if rank is None:
            return [load] * (self._horizon + 1)
        if rank.load != load:
            rank.load, rank.loads = load, self._project(rank, load)
        return rank.loads

    def _project(self, rank: RankRequests, load: int) -> Sequence[int]:
        """A rank's load if each request that is predicted to end counts until then, and every other one throughout."""
        requests, steps = len(rank.running), self._horizon + 1
        if not rank.ending:
            return range(load, load + requests * steps, requests)
        loads: list[int] = []
        for ends, tokens in sorted([(ceil(each.left), each.tokens) for each in rank.ending.values()]):
            loads += [load + requests * step for step in range(len(loads), ends)]
            load, requests = load - tokens, requests - 1
        return loads + [load + requests * step for step in range(len(loads), steps)]

    def _predict(self, running: RunningRequest, rank: RankRequests) -> None:
        running.unrefreshed = 0
        if self._predictor is not None:
            left = self._predictor.remaining(running.request, running.age, self._horizon)
            running.left = inf if left >= self._horizon else max(1.0, left)
            if running.left <= self._horizon:
                rank.ending[running.request.id] = running
            else:
                rank.ending.pop(running.request.id, None)
