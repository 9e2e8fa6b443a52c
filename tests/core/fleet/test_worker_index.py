"""What is asked over all workers at once equals what a look at each of them finds."""

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.fleet.worker_index import WorkerIndex
from router.core.model.request import WorkerId

workers = st.sampled_from([WorkerId(name) for name in "abcd"])


class Workers(RuleBasedStateMachine):
    """Workers whose loads and deadlines change, beside plain tables of them."""

    def __init__(self) -> None:
        super().__init__()
        self.index = WorkerIndex()
        self.with_room: dict[WorkerId, int] = {}
        self.deadlines: dict[WorkerId, float] = {}
        self.changed: set[WorkerId] = set()

    @rule(worker=workers, in_flight=st.integers(0, 3), has_room=st.booleans())
    def set_load(self, worker: WorkerId, in_flight: int, has_room: bool) -> None:
        self.index.set_load(worker, in_flight, has_room=has_room)
        self.changed.add(worker)
        self.with_room.pop(worker, None)
        if has_room:
            self.with_room[worker] = in_flight

    @rule(worker=workers, at=st.sampled_from([1.0, 2.0, 3.0, inf]))
    def set_deadline(self, worker: WorkerId, at: float) -> None:
        self.index.set_deadline(worker, at)
        if at == inf:
            self.deadlines.pop(worker, None)
        else:
            self.deadlines[worker] = at  # a worker that has one keeps its place

    @rule(worker=workers)
    def remove(self, worker: WorkerId) -> None:
        self.index.remove(worker)
        self.with_room.pop(worker, None)
        self.deadlines.pop(worker, None)
        self.changed.discard(worker)

    @rule(now=st.sampled_from([0.5, 1.5, 2.5]))
    def due(self, now: float) -> None:
        """The workers are named in the order in which they came to have a deadline."""
        assert self.index.due(now) == [worker for worker, at in self.deadlines.items() if at <= now]

    @rule()
    def take_changed_loads(self) -> None:
        assert self.index.changed_loads.keys() == self.changed
        self.index.changed_loads.clear()
        self.changed.clear()

    @invariant()
    def answers_equal_those_of_a_scan(self) -> None:
        assert self.index.with_room == self.with_room
        assert self.index.next_deadline == min(self.deadlines.values(), default=inf)


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=60)


def test_deadlines_that_change_take_no_memory() -> None:
    """Those that hold no longer are dropped in time."""
    index = WorkerIndex()
    for number in range(1000):
        index.set_deadline(WorkerId("a"), float(1000 - number))
    assert len(index._heap) <= 2 + 16
