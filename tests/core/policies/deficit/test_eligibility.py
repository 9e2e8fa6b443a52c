"""Who may go: the counters, their refill and what is told of it, against the rule as a loop."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.deficit.eligibility import CREDITED, FRESH, FRESH_AND_SPARSE, OVERDUE, SPARSE, Eligibility
from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.deficit.rounds import STEPS, Rounds

CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd")]
MODELS = ("llama", "qwen")
HEAD_START = 20
"""Two quanta; the least of charges is more than one, and the most more than two."""
RULE = DeficitParameters(10.0, head_start=HEAD_START, round_seconds=1.0, overdue_after=0)
clients = st.sampled_from(CLIENTS)


class Contest(RuleBasedStateMachine):
    """Clients come, wait, are charged and refunded, leave and come back with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rate: float | None = None
        """Of service, in cost units per second; a round lasts one."""
        self.standings = Eligibility(self.hear, RULE, lambda: self.rate, Shares())
        self.standings.let_go_first(1)
        self.heard: dict[ClientId, int | None] = {}
        """What a queue knows: it looks when a client comes, and when it is told to."""
        self.credit: dict[ClientId, float] = {}
        self.weight: dict[ClientId, int] = {}
        self.counted: dict[ClientId, int] = {}
        """The weights of active clients, as they were when each became active."""
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

    def part(self) -> float:
        active = {request.client for request in [*self.waiting, *self.in_flight]}
        self.counted = {client: self.counted.get(client, self.weight[client]) for client in active}
        return Rounds(RULE, lambda: self.rate).part(sum(self.counted.values()))

    @rule(
        client=clients,
        model=st.sampled_from(MODELS),
        weight=st.sampled_from([1, 1, 1, 3]),
        cost=st.integers(0, 60),
    )
    def wait(self, client: ClientId, model: str, weight: int, cost: int) -> None:
        """A client that begins to wait has no more credit than a round adds."""
        self.requests += 1
        request = Request(RequestId(f"r{self.requests}"), client, model, (), weight=weight)
        self.credit.setdefault(client, weight * RULE.quantum)
        self.weight[client] = weight
        begins = not any(other.client == client for other in self.waiting)
        self.waiting.append(request)
        part = self.part()
        if begins:
            if self.credit[client] <= weight * RULE.quantum:
                self.credit[client] = min(self.credit[client], part * weight * RULE.quantum)
            self.head_start[client] = weight * HEAD_START if cost < weight * HEAD_START else 0
        self.standings.wait(request, cost)
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
        self.part()
        if dispatched:
            self.counted.setdefault(request.client, int(request.weight))
            self.in_flight.append(request)
            self.part()
            self.standings.dispatched(request)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(request)
        self.part()
        self.standings.ended(request)

    @rule(rate=st.none() | st.sampled_from([0.5, 3.0, 12.0, 45.0]))
    def serve(self, rate: float | None) -> None:
        self.rate = rate

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
        """While clients wait for these models and none has credit, each gets the same part of a quantum, up to one."""
        contenders = {r.client for r in self.waiting if models is None or r.model in models}
        while contenders and all(self.credit[client] <= 0 for client in contenders):
            part = self.part()
            for client, weight in self.weight.items():
                quantum, credit = weight * RULE.quantum, self.credit[client]
                self.credit[client] = max(credit, min(credit + part * quantum, quantum))
        self.standings.refill(models)

    @precondition(lambda self: not self.waiting)
    @rule()
    def begin_anew(self) -> None:
        self.credit = {client: weight * RULE.quantum for client, weight in self.weight.items()}
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
    standings = Eligibility(lambda _: None, RULE, lambda: None, Shares())
    standings.wait(request("ada", 1), HEAD_START)
    assert standings.of(ClientId("ada")) == CREDITED


def test_what_is_noted_of_debtors_does_not_grow_with_their_charges() -> None:
    """A client that is refunded again and again, and never refilled, is noted a bounded number of times."""
    standings = Eligibility(lambda _: None, RULE, lambda: None, Shares())
    standings.wait(request("ada", 1))
    standings.charge(ClientId("ada"), 1e6)
    for _ in range(1000):
        standings.charge(ClientId("ada"), -1)
    assert len(standings._dues) < 30


def test_a_client_is_overdue_when_as_many_went_as_there_are_active_clients() -> None:
    """It goes before all others then, with a small debt, and once; with a larger one it does not."""
    rule = DeficitParameters(10.0, overdue_after=1.0, overdraft=0.5)
    standings = Eligibility(lambda _: None, rule, lambda: None, Shares())
    for name in ("ada", "bob", "cyd"):
        standings.wait(request(name, 0))
    standings.charge(ClientId("ada"), 14)
    standings.charge(ClientId("bob"), 16)
    for number in range(4):
        standings.let_overdue_go()
        assert standings.of(ClientId("ada")) == (OVERDUE if number == 3 else None)
        standings.wait(request("cyd", number + 1))
        standings.dispatched(request("cyd", 100 + number))
        standings.ended(request("cyd", 100 + number))
    assert standings.of(ClientId("bob")) is None
    standings.dispatched(request("ada", 1))
    assert standings.of(ClientId("ada")) is None


@given(st.floats(0.01, 1e6), st.floats(0.1, 1e4))
def test_a_round_adds_what_is_served_in_its_time(rate: float, weight: float) -> None:
    """For all clients together, unless that is more than a quantum for each, or less than a hundredth."""
    rule = DeficitParameters(1_000.0, round_seconds=5.0)
    part = Rounds(rule, lambda: rate).part(weight)
    assert part == pytest.approx(min(1.0, max(0.01, 5.0 * rate / (weight * 1_000.0))), abs=1 / STEPS)
    assert 0 < part <= 1


def test_without_a_time_or_a_known_rate_a_round_adds_a_quantum() -> None:
    """As Algorithm 1 has it."""
    assert Rounds(DeficitParameters(round_seconds=0.0), lambda: 1.0).part(1e3) == 1
    assert Rounds(DeficitParameters(), lambda: None).part(1e3) == 1
