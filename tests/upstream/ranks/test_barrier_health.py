"""All ranks of a group join together and leave together."""

from router.core.model.events import Event, WorkerAnswered, WorkerJoined, WorkerLeft
from router.core.model.request import BarrierId, Worker, WorkerId
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.ranks.barrier_health import BarrierHealth

A, B, C = (WorkerId(name) for name in "abc")
MOE = BarrierId("moe")


class Group:
    """A group of `a` and `b`, beside `c` without a group; `fed` holds what was passed on."""

    def __init__(self) -> None:
        self.endpoints = {each: WorkerEndpoint(each, f"http://{each}") for each in (A, B, C)}
        self.endpoints[A].barrier = self.endpoints[B].barrier = MOE
        self.directory = WorkerDirectory(self.endpoints.values())
        self.fed: list[Event] = []
        self.health = BarrierHealth(self.directory, self.fed.append)

    def join(self, worker: WorkerId) -> list[Event]:
        return self.feed(WorkerJoined(Worker(worker, frozenset({"m"}), barrier=self.endpoints[worker].barrier)))

    def feed(self, event: Event) -> list[Event]:
        """Feed an event and return what it caused."""
        self.fed.clear()
        self.health.feed(event)
        return self.fed.copy()


def joined(events: list[Event]) -> list[WorkerId]:
    return sorted(event.worker.id for event in events if isinstance(event, WorkerJoined))


def test_a_group_joins_once_it_is_whole() -> None:
    """The first rank waits for the second; whoever is in no group does not."""
    group = Group()
    assert joined(group.join(A)) == []
    assert joined(group.join(C)) == [C]
    assert joined(group.join(B)) == [A, B]
    assert joined(group.join(A)) == [A]


def test_one_that_leaves_takes_the_others_along_until_it_is_back() -> None:
    """The others come back with it, and a rank that leaves a group that is down changes nothing."""
    group = Group()
    group.join(A)
    group.join(B)
    assert group.feed(WorkerLeft(A)) == [WorkerLeft(A), WorkerLeft(B)]
    assert group.feed(WorkerAnswered(B)) == [WorkerAnswered(B)]
    assert joined(group.join(A)) == [A, B]
    group.feed(WorkerLeft(B))
    assert group.feed(WorkerLeft(A)) == []
    assert joined(group.join(A)) == []
    assert joined(group.join(B)) == [A, B]


def test_a_rank_that_is_no_longer_part_of_the_group_leaves_alone() -> None:
    """An engine that goes on with fewer ranks takes none of the others along."""
    group = Group()
    group.join(A)
    group.join(B)
    group.endpoints[B].barrier = None
    assert group.feed(WorkerLeft(B)) == [WorkerLeft(B)]
    assert joined(group.join(A)) == [A]


def test_a_group_goes_on_without_a_worker_that_was_removed() -> None:
    """Who waited for it joins; who comes back in another group is not missed in the first."""
    group = Group()
    group.join(A)
    group.health.forget(B)
    group.directory.remove(B)
    group.fed.clear()
    group.health.complete()
    assert joined(group.fed) == [A]
    group.endpoints[A].barrier = None
    assert joined(group.join(A)) == [A]
    assert group.feed(WorkerLeft(A)) == [WorkerLeft(A)]
