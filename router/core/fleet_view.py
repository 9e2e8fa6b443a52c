"""The one view through which policies see the fleet and the prefix map."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from router.core.cache.prefix_map import PrefixMap
from router.core.fleet.cluster import Cluster
from router.core.model.request import Request, RequestId, WorkerId
from router.core.policies.base import Policy
from router.core.policies.context import FleetView
from router.core.predict.token_estimates import Estimates


class SchedulerView(FleetView):
    """Answers a policy's questions from the scheduler's own state."""

    def __init__(self, cluster: Cluster, prefixes: PrefixMap, estimates: Estimates) -> None:
        self._cluster = cluster
        self._estimates = estimates
        self._states = cluster.states
        self._prefixes = prefixes
        self._findable = prefixes.mirror.findable

    def serving(self, model: str) -> Sequence[WorkerId]:
        return self._cluster.serving(model)

    def able(self, request: Request) -> Sequence[WorkerId]:
        return self._cluster.candidates(request)

    def in_flight(self, worker: WorkerId) -> int:
        return self._states[worker].load.requests

    def has_room(self, worker: WorkerId) -> bool:
        return self._states[worker].has_room

    def with_room(self, workers: Iterable[WorkerId]) -> Mapping[WorkerId, int]:
        states = self._states
        return {worker: state.load.requests for worker in workers if (state := states[worker]).has_room}

    def admits(self, worker: WorkerId, request: Request, resumed_output: int = 0) -> bool:
        """`resumed_output`: tokens of the answer that are sent along with the prompt, because another worker broke
        off.
        """
        size, match = self._prefixes.size_and_match(request)
        matched = match.get(worker, 0)
        cached = self._findable(request, worker, matched) if matched else 0
        return self._states[worker].admits(size + resumed_output - cached)

    def input_tokens(self, request: Request) -> int:
        return self._prefixes.input_tokens(request)

    def prefill_seconds(self, worker: WorkerId, tokens: float) -> float:
        return self._states[worker].service_rate.prefill_seconds(tokens)

    def decode_seconds(self, worker: WorkerId) -> float:
        return self._states[worker].service_rate.decode_seconds

    def output_tokens(self, request: Request) -> float:
        return self._estimates.output_lengths.forecast(request)

    def rate(self, workers: Collection[WorkerId]) -> float | None:
        return self._cluster.rate(workers)

    def speed(self, worker: WorkerId) -> float:
        return self._cluster.speed(worker)

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        return self._prefixes.match(request)

    def expected_match(self, request: Request) -> Mapping[WorkerId, int]:
        return self._prefixes.expected_match(request)

    def promise(self, request: Request, worker: WorkerId, now: float) -> None:
        self._prefixes.promise(request, worker, now)

    def release(self) -> None:
        self._prefixes.release()

    def watch(self, request: Request, workers: Collection[WorkerId]) -> Mapping[WorkerId, int]:
        return self._prefixes.watch(request, workers)

    def unwatch(self, request: RequestId) -> None:
        self._prefixes.unwatch(request)

    def chunks_held(self, request: Request, workers: Collection[WorkerId]) -> Mapping[WorkerId, int]:
        return self._prefixes.chunks_held(request, workers)

    def report_match_changes(self, policy: Policy) -> None:
        """Report to the policy the changed matches that it asked to `watch`.

        Queued requests need current matches at any time, since an order by longest match is wrong with outdated ones.
        """
        if changed := self._prefixes.take_changes():
            for worker, requests in changed.items():
                policy.match_changed(worker, requests)

    def models(self, worker: WorkerId) -> Collection[str]:
        return self._states[worker].worker.models

    def routes(self, worker: WorkerId) -> Collection[str]:
        return self._cluster.routes(worker)

    def reorders(self, worker: WorkerId) -> bool:
        return self._states[worker].worker.reorders
