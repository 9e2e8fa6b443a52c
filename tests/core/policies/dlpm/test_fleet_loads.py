"""The order of a pool's workers by load equals that of sorting them anew."""

from collections.abc import Mapping
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.model.request import WorkerId
from router.core.policies.context import FleetView
from router.core.policies.dlpm.fleet_loads import FEW, FleetLoads

WORKERS = [WorkerId(f"w{number}") for number in range(FEW + 2)]
workers = st.sampled_from(WORKERS[:5])


class Fleet:
    """Workers whose loads the test sets."""

    def __init__(self) -> None:
        self.loads = dict.fromkeys(WORKERS, 0)
        self.room = dict.fromkeys(WORKERS, 0)
        self.changed: dict[WorkerId, None] = {}

    @property
    def with_room(self) -> Mapping[WorkerId, int]:
        return self.room

    @property
    def changed_loads(self) -> dict[WorkerId, None]:
        return self.changed

    def in_flight(self, worker: WorkerId) -> int:
        return self.loads[worker]

    def joined(self, worker: WorkerId) -> int:
        return -WORKERS.index(worker)


class Loads(RuleBasedStateMachine):
    """Workers of a pool, beside plain tables of what is known of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.loads = FleetLoads(cast(FleetView, self.fleet))
        self.last_dispatch: dict[WorkerId, int] = {}
        self.at_home: dict[WorkerId, int] = {}
        self.dispatches = 0
        for worker in WORKERS:
            self.add(worker)

    def add(self, worker: WorkerId) -> None:
        self.loads.add(worker)
        self.last_dispatch[worker] = self.at_home[worker] = 0

    @rule(worker=workers, load=st.integers(0, 3), has_room=st.booleans())
    def change_load(self, worker: WorkerId, load: int, has_room: bool) -> None:
        self.fleet.loads[worker] = load
        self.fleet.room.pop(worker, None)
        if has_room:
            self.fleet.room[worker] = load
        self.fleet.changed[worker] = None

    @rule(worker=workers)
    def dispatch(self, worker: WorkerId) -> None:
        if worker in self.last_dispatch:
            self.loads.dispatched(worker)
            self.fleet.changed[worker] = None
            self.dispatches += 1
            self.last_dispatch[worker] = self.dispatches

    @rule(worker=workers, change=st.sampled_from([1, 2, -1]))
    def change_homes(self, worker: WorkerId, change: int) -> None:
        if worker in self.at_home and self.at_home[worker] + change >= 0:
            self.loads.add_at_home(worker, change)
            self.at_home[worker] += change

    @rule(worker=workers)
    def leave_or_join(self, worker: WorkerId) -> None:
        """A worker joins again behind all others."""
        if worker in self.at_home:
            self.loads.remove(worker)
            del self.last_dispatch[worker], self.at_home[worker]
        else:
            self.add(worker)

    @rule(
        few=st.sets(workers, max_size=4),
        besides=st.sets(st.sampled_from(WORKERS), max_size=3),
        count=st.integers(1, 3),
    )
    def least_loaded(self, few: set[WorkerId], besides: set[WorkerId], count: int) -> None:
        """Of few workers and of all."""
        for among in (dict.fromkeys(few & self.at_home.keys()), self.at_home):
            ranked = sorted(
                among.keys() - besides,
                key=lambda each: (self.at_home[each] + self.fleet.loads[each], self.fleet.joined(each)),
            )
            assert [*self.loads.least_loaded(among, dict.fromkeys(besides), count)] == ranked[:count]

    @invariant()
    def orders_equal_those_of_sorting(self) -> None:
        room, last = self.fleet.room, self.last_dispatch
        ranked = sorted([(room[worker], last[worker], worker) for worker in last if worker in room])
        assert [*self.loads.with_room] == ranked
        for load in range(4):
            assert self.loads.with_room.with_load(load) == [worker for at, _, worker in ranked if at == load]
        blocked = [worker for worker, waiting in self.at_home.items() if waiting and worker not in room]
        longest = max(blocked, key=self.at_home.__getitem__, default=None)
        assert self.loads.longest_home_without_room == longest


TestLoads = Loads.TestCase
TestLoads.settings = settings(max_examples=60)
