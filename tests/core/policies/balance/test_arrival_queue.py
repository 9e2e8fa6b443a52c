"""The oldest requests of a priority class are found without looking at all."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from router.core.cache.held_chunks import HeldChunks
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.balance.arrival_queue import ArrivalQueue, oldest
from router.core.policies.deficit.eligibility import ELIGIBLE, FRESH_AND_SPARSE, ROUND_ROBIN_CLASSES
from router.core.policies.dlpm.home_pool import PooledRequest
from router.core.policies.dlpm.queues_by_client import QueuesByClient

CLIENTS = [ClientId(name) for name in ("ada", "bob", "eve")]
CLASSES = (FRESH_AND_SPARSE, ELIGIBLE)
Places = tuple[int, ...]
"""Numbers of queues."""
PLACES: list[Places] = [(0,), (1,), (0, 1)]
clients = st.sampled_from(CLIENTS)
enter = st.tuples(st.just("enter"), clients, st.sampled_from(PLACES))
steps = st.one_of(
    *[enter] * 4,  # so that several requests wait most of the time
    st.tuples(st.just("enter late"), clients, st.integers(0, 99)),
    st.tuples(st.just("leave"), clients, st.integers(0, 99)),
    st.tuples(st.just("class"), clients, st.sampled_from((None, *CLASSES))),
    st.tuples(st.just("turn"), clients, st.just(0)),
    st.tuples(st.just("read"), st.sampled_from(CLASSES), st.integers(1, 4)),
)


@dataclass
class Clients:
    """The priority classes and turns of all clients."""

    classes: dict[ClientId, int | None] = field(default_factory=lambda: dict.fromkeys(CLIENTS, ELIGIBLE))
    turns: dict[ClientId, int] = field(default_factory=lambda: {client: turn for turn, client in enumerate(CLIENTS)})

    def waiting_priority_class(self, client: ClientId, /) -> int | None:
        return self.classes[client]

    def last_turn(self, client: ClientId, /) -> int:
        return self.turns[client]


class Waiting:
    """Two queues, and what waits in them."""

    def __init__(self) -> None:
        self.clients = Clients()
        self._by_client = QueuesByClient()
        self._queues = [ArrivalQueue(self.clients, self._by_client) for _ in range(2)]
        self._requests: dict[int, tuple[PooledRequest, set[int]]] = {}
        self._arrivals = 0

    def enter(self, client: ClientId, places: Places) -> None:
        """Let a request arrive in these queues."""
        self._arrivals += 1
        request = Request(RequestId(f"r{self._arrivals}"), client, "m", ())
        waiting = PooledRequest(request, self._arrivals, 0.0, 1, 1.0, {}, HeldChunks({}))
        self._requests[self._arrivals] = waiting, {*places}
        for place in places:
            self._queues[place].add(waiting)

    def enter_late(self, number: int) -> None:
        """Let a waiting request enter the second queue, too."""
        waiting, places = [*self._requests.values()][number % len(self._requests)]
        if 1 not in places:
            places.add(1)
            self._queues[1].add(waiting)

    def leave(self, number: int) -> None:
        """Remove a request."""
        arrival = [*self._requests][number % len(self._requests)]
        waiting, places = self._requests.pop(arrival)
        for place in places:
            self._queues[place].remove(waiting)

    def set_class(self, client: ClientId, priority_class: int | None) -> None:
        """Change a client's priority class."""
        self.clients.classes[client] = priority_class
        self._by_client.update_priority(client, priority_class)

    def oldest(self, places: Places, priority_class: int, count: int) -> list[int]:
        """Return the arrivals of the requests that are found in these queues."""
        queues = [self._queues[place] for place in places]
        return [each.arrival for each in oldest(queues, priority_class, count, self.clients)]

    def all(self, places: Places, priority_class: int) -> list[int]:
        """Return the arrivals of all requests of a class in these queues; where clients take turns, of the client whose
        turn it is.
        """
        found = [
            (self.clients.turns[waiting.request.client], arrival)
            for arrival, (waiting, own) in sorted(self._requests.items())
            if self.clients.classes[waiting.request.client] == priority_class and own.intersection(places)
        ]
        turn = min([turn for turn, _ in found], default=0)
        return [arrival for each, arrival in found if each == turn or priority_class not in ROUND_ROBIN_CLASSES]

    @property
    def any(self) -> bool:
        """Whether any request waits."""
        return bool(self._requests)


@given(st.lists(steps, min_size=20, max_size=60))
def test_the_oldest_are_those_of_all_that_wait(steps: list[tuple[str, ClientId | int, object]]) -> None:
    """However requests, turns and classes change, what is found is what a look at all that wait would find."""
    waiting, turns = Waiting(), 9
    for step in steps:
        match step:
            case "enter", str(client), tuple(places):
                waiting.enter(ClientId(client), places)
            case "class", str(client), (int() | None) as priority_class:
                waiting.set_class(ClientId(client), priority_class)
            case "turn", str(client), _:
                turns += 1
                waiting.clients.turns[ClientId(client)] = turns
            case "enter late", _, int(number) if waiting.any:
                waiting.enter_late(number)
            case "leave", _, int(number) if waiting.any:
                waiting.leave(number)
            case "read", int(priority_class), int(count):
                for places in PLACES:
                    found = waiting.oldest(places, priority_class, count)
                    assert found == waiting.all(places, priority_class)[:count]


def test_a_request_that_enters_late_comes_where_its_arrival_puts_it() -> None:
    """A client whose older request enters a queue after its younger one is found by the older one."""
    waiting = Waiting()
    for client, places in ((CLIENTS[0], (0,)), (CLIENTS[1], (1,)), (CLIENTS[0], (1,))):
        waiting.enter(client, places)
    assert waiting.oldest((1,), ELIGIBLE, 3) == [2, 3]
    waiting.enter_late(0)
    assert waiting.oldest((1,), ELIGIBLE, 3) == [1, 2, 3]


def test_a_client_is_not_forgotten_among_many_whose_class_changes() -> None:
    """A class that a client left before many other changes is not its class any more."""
    waiting = Waiting()
    for client in CLIENTS:
        waiting.enter(client, (0,))
    assert waiting.oldest((0,), ELIGIBLE, 3) == [1, 2, 3]
    waiting.set_class(CLIENTS[0], None)
    for _ in range(100):
        waiting.set_class(CLIENTS[1], ELIGIBLE)
    assert waiting.oldest((0,), ELIGIBLE, 3) == [2, 3]


def test_a_client_with_many_old_requests_enters_a_class() -> None:
    """More of them than are kept come before what was found, and all of them are found one after the other."""
    waiting = Waiting()
    waiting.set_class(CLIENTS[0], None)
    for client in [CLIENTS[0]] * 9 + [CLIENTS[1]] * 2:
        waiting.enter(client, (0,))
    assert waiting.oldest((0,), ELIGIBLE, 1) == [10]
    waiting.leave(9)
    assert waiting.oldest((0,), ELIGIBLE, 1) == [11]
    waiting.set_class(CLIENTS[0], ELIGIBLE)
    for arrival in range(1, 10):
        assert waiting.oldest((0,), ELIGIBLE, 1) == [arrival]
        waiting.leave(0)
    assert waiting.oldest((0,), ELIGIBLE, 1) == [11]
