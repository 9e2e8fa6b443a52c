"""Who may go: the counters, their refill and what is told of it, against the rule as a loop."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.model import ClientId, Request, RequestId
from router.core.shares import Shares
from router.core.standings import CREDITED, FRESH, FRESH_AND_SPARSE, SPARSE, Standings

CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd")]
MODELS = ("llama", "qwen")
HEAD_START = 2.0
"""In quanta; the least of charges is more than one, and the most more than two."""
clients = st.sampled_from(CLIENTS)


class Contest(RuleBasedStateMachine):
    """Clients come, wait, are charged and refunded, leave and come back with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.standings = Standings(self.hear, Shares(), head_start=HEAD_START)
        self.heard: dict[ClientId, int | None] = {}
        """What a queue knows: it looks when a client comes, and when it is told to."""
        self.credit: dict[ClientId, int] = {}
        self.quantum: dict[ClientId, int] = {}
        self.head_start: dict[ClientId, float] = {}
        """What is left of it, of those that wait."""
        self.waiting: list[Request] = []
        self.in_flight: list[Request] = []
        self.requests = 0
        self.sparse_below = 1

    def hear(self, client: ClientId) -> None:
        self.heard[client] = self.standings.of(client)

    def standing(self, client: ClientId) -> int | None:
        if self.credit.get(client, 0) <= 0:
            return None
        fresh = self.head_start.get(client, 0) > 0
        sparse = sum(request.client == client for request in self.in_flight) < self.sparse_below
        return {(True, True): FRESH_AND_SPARSE, (True, False): FRESH, (False, True): SPARSE, (False, False): CREDITED}[
            fresh, sparse
        ]

    @rule(
        client=clients,
        model=st.sampled_from(MODELS),
        quantum=st.sampled_from([10, 10, 10, 25]),
        cost=st.integers(0, 60),
    )
    def wait(self, client: ClientId, model: str, quantum: int, cost: int) -> None:
        self.requests += 1
        request = Request(RequestId(f"r{self.requests}"), client, model, ())
        self.credit.setdefault(client, quantum)
        self.quantum[client] = quantum
        if not any(other.client == client for other in self.waiting):
            self.head_start[client] = HEAD_START * quantum if cost < HEAD_START * quantum else 0
        self.waiting.append(request)
        self.standings.wait(request, quantum, cost)
        self.heard.setdefault(client, self.standings.of(client))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), dispatched=st.booleans())
    def leave(self, data: st.DataObject, dispatched: bool) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.standings.leave(request)
        if not any(other.client == request.client for other in self.waiting):
            del self.heard[request.client]
            del self.head_start[request.client]
        if dispatched:
            self.in_flight.append(request)
            self.standings.dispatched(request)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(request)
        self.standings.ended(request)

    @rule(sparse_below=st.integers(0, 3))
    def let_go_first(self, sparse_below: int) -> None:
        self.sparse_below = sparse_below
        self.standings.let_go_first(sparse_below)

    @rule(client=clients, cost=st.integers(-60, 120))
    def charge(self, client: ClientId, cost: int) -> None:
        self.standings.charge(client, cost)
        if client in self.credit:
            self.credit[client] -= cost
        if self.head_start.get(client, 0) > 0:
            self.head_start[client] -= cost

    @rule(models=st.none() | st.sets(st.sampled_from(MODELS), min_size=1))
    def refill(self, models: set[str] | None) -> None:
        """While clients wait for these models and none of them has credit, everyone gets a quantum, and has no more."""
        contenders = {r.client for r in self.waiting if models is None or r.model in models}
        while contenders and all(self.credit[client] <= 0 for client in contenders):
            for client, quantum in self.quantum.items():
                self.credit[client] = max(self.credit[client], min(self.credit[client] + quantum, quantum))
        self.standings.refill(models)

    @precondition(lambda self: not self.waiting)
    @rule()
    def begin_anew(self) -> None:
        self.credit = dict(self.quantum)
        self.standings.begin_anew()

    @invariant()
    def it_is_the_rule(self) -> None:
        """Every counter is that of the loop; and whoever waits has, for the queue, the standing that it has."""
        for client in CLIENTS:
            assert self.standings.credit(client) == self.credit.get(client)
            assert self.standings.of(client) == self.standing(client)
        assert self.heard == {request.client: self.standing(request.client) for request in self.waiting}


TestContest = Contest.TestCase
TestContest.settings = settings(max_examples=200, stateful_step_count=30)


def request(client: str, number: int) -> Request:
    return Request(RequestId(f"{client}{number}"), ClientId(client), "llama", ())


def test_without_sparse_first_all_with_credit_are_equal() -> None:
    """Then the longest match alone decides."""
    standings = Standings(lambda _: None, Shares(), sparse_below=0)
    standings.wait(request("ada", 1), 10)
    assert standings.of(ClientId("ada")) == CREDITED


def test_what_is_noted_of_debtors_does_not_grow_with_their_charges() -> None:
    """A client that is refunded again and again, and never refilled, is noted a bounded number of times."""
    standings = Standings(lambda _: None, Shares())
    standings.wait(request("ada", 1), 10)
    standings.charge(ClientId("ada"), 1e6)
    for _ in range(1000):
        standings.charge(ClientId("ada"), -1)
    assert len(standings._dues) < 30
