"""What the core knows whatever the policy, and the one view through which policies see the fleet and the prefix map."""

from collections.abc import Collection, Mapping
from math import inf
from random import Random
from typing import Final

from router.core.cache.prefix_map import LiveRequest, Oracle, PrefixMap
from router.core.clients.backlog import Backlog
from router.core.clients.ledger import Ledger
from router.core.clients.shares import Shares
from router.core.clients.usage_days import UsageDays
from router.core.fleet.in_flight import InFlightTable
from router.core.fleet.worker_fleet import WorkerFleet
from router.core.model.request import BarrierId, Request, RequestId, WorkerId
from router.core.policies.context import Parameters, PolicyContext
from router.core.predict.token_estimates import Estimates
from router.core.scheduler_settings import SchedulerSettings

CHUNKS_PER_MEASURED_PREFIX: Final = 80
"""Chunks in the prefix tree per measured prefix that is kept; with the default `prefix_limit`, 50,000 are kept."""


class Books:
    """What is counted and learned of workers, their caches, clients and predictions."""

    def __init__(
        self, settings: SchedulerSettings, live: Mapping[RequestId, LiveRequest], oracle: Oracle | None
    ) -> None:
        """`live` and `oracle`: as in `PrefixMap`."""
        self.estimates: Final = Estimates(measured_prefixes=settings.prefix_limit // CHUNKS_PER_MEASURED_PREFIX)
        self.outputs: Final = self.estimates.outputs
        usage = UsageDays(settings.usage_days, named=settings.named)
        self.ledger: Final = Ledger(settings.cached_in_flight, settings.cost, usage)
        self.shares: Final = Shares()
        self.backlog: Final = Backlog()
        self.fleet: Final = WorkerFleet(
            settings.window,
            settings.health,
            settings.departed_limit,
            self.outputs,
            decode_alone=settings.decode_alone,
        )
        self.prefixes: Final = PrefixMap(
            settings.prefix_limit,
            self.estimates,
            settings.match_minimum,
            settings.kv_tokens,
            settings.tracking,
            oracle,
            live,
        )
        self.view: Final = SchedulerView(self.fleet, self.prefixes, self.estimates)

    def policy_context(self, settings: SchedulerSettings, parameters: Parameters, random: Random) -> PolicyContext:
        """Return what the policy is built from."""
        return PolicyContext(
            self.view,
            settings.cost,
            random,
            parameters,
            self.backlog,
            settings.debtor_limit,
            self.shares,
            self.outputs,
        )


class SchedulerView:
    """Answers a policy's questions (`FleetView`) from the scheduler's own state.

    What the fleet, the prefix map or the estimates answer by themselves is asked of them directly; the methods here
    need a worker's state, or several of them.
    """

    def __init__(self, fleet: WorkerFleet, prefixes: PrefixMap, estimates: Estimates) -> None:
        self._fleet = fleet
        self._states = fleet.states
        self.size_and_match = prefixes.size_and_match
        self.findable = prefixes.mirror.findable
        self.serving = fleet.serving
        self.able = fleet.candidates
        self.routes = fleet.routes
        self.rate = fleet.rates.together
        self.speed = fleet.rates.speed
        self.input_tokens = prefixes.input_tokens
        self.match = prefixes.match
        self.expected_match = prefixes.expected_match
        self.promise = prefixes.promise
        self.release = prefixes.release
        self.with_room = fleet.index.with_room
        self.changed_loads = fleet.index.changed_loads
        self.begin_watch = prefixes.begin_watch
        self.watch = prefixes.watch
        self.watch_narrowly = prefixes.watch_narrowly
        self.watch_at = prefixes.watch_at
        self.unwatch = prefixes.unwatch
        self.chunks_held = prefixes.chunks_held
        self.output_tokens = estimates.outputs.lengths.remaining

    def in_flight(self, worker: WorkerId) -> int:
        return self._states[worker].load.requests

    def context_tokens(self, worker: WorkerId) -> int:
        return self._states[worker].context_tokens

    def in_flight_table(self, worker: WorkerId) -> InFlightTable:
        return self._states[worker].in_flight

    def barrier(self, worker: WorkerId) -> BarrierId | None:
        return self._states[worker].worker.barrier

    def kv_tokens(self, worker: WorkerId) -> int | None:
        return self._states[worker].worker.kv_tokens

    def free_places(self, worker: WorkerId) -> float:
        return self._states[worker].free_places

    def has_room(self, worker: WorkerId) -> bool:
        return self._states[worker].has_room

    def joined(self, worker: WorkerId) -> int:
        return self._states[worker].joined

    def admits(self, worker: WorkerId, request: Request, resumed_output: int = 0) -> bool:
        """`resumed_output`: tokens of the answer that are sent along with the prompt, because another worker broke
        off.
        """
        if self._fleet.held:
            return False
        state = self._states[worker]
        if self._fleet.has_roles and state.worker.hands_over_at_once and not self._fleet.can_decode(request.model):
            return False
        room = state.room - resumed_output
        if room == inf or self.input_tokens(request) <= room:
            return True  # with nothing cached, so that its match need not be known yet
        return self.uncached_tokens(worker, request) <= room

    def room(self, worker: WorkerId) -> float:
        return self._states[worker].room

    def uncached_tokens(self, worker: WorkerId, request: Request) -> int:
        size, match = self.size_and_match(request)
        matched = match.get(worker, 0)
        return size - self.findable(request, worker, matched) if matched else size

    def prefill_seconds(self, worker: WorkerId, tokens: float) -> float:
        return self._states[worker].service_rate.prefill_seconds(tokens)

    def decode_seconds(self, worker: WorkerId) -> float:
        return self._states[worker].service_rate.decode_seconds

    def shared_routes(self, worker: WorkerId) -> Collection[str]:
        return self._states[worker].worker.shared_routes

    def reorders(self, worker: WorkerId) -> bool:
        return self._states[worker].worker.reorders
