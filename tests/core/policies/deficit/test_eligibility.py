"""Counters, refills and priority classes equal those of the rule written as a loop."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.deficit.deficits import ClientDeficits
from router.core.policies.deficit.eligibility import (
    ELIGIBLE,
    FRESH,
    FRESH_AND_SPARSE,
    OVERDUE,
    SPARSE,
    Eligibility,
)
from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.deficit.refill_rounds import RefillRounds

CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd")]
MODELS = ("llama", "qwen")
HEAD_START = 20
"""Two quanta. Some charges are above one quantum and some above two."""
RULE = DeficitParameters(10.0, head_start=HEAD_START, round_seconds=1.0, overdue_after=0)
clients = st.sampled_from(CLIENTS)


class EligibilityMachine(RuleBasedStateMachine):
    """Lets clients arrive, wait, be charged and refunded, leave and return with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rate: float | None = None
        """The service rate, in cost units per second. A round lasts one second."""
        self.eligibility = Eligibility(self.on_priority_change, RULE, lambda: self.rate, Shares())
        self.eligibility.set_sparse_limit(1)
        self.reported: dict[ClientId, int | None] = {}
        """The priority classes that a queue knows: it reads them when a client arrives and when a change is
        reported."""
        self.deficit: dict[ClientId, float] = {}
        self.weight: dict[ClientId, int] = {}
        self.counted: dict[ClientId, int] = {}
        """The weights of active clients when each became active."""
        self.head_start: dict[ClientId, float] = {}
        """What is left of the head starts of waiting clients."""
        self.turns_without_debt: dict[ClientId, int] = {}
        """Turns of waiting clients that were neither in debt nor cut since they began to wait."""
        self.waiting: list[Request] = []
        self.in_flight: list[Request] = []
        self.requests = 0
        self.sparse_limit = 1

    def on_priority_change(self, client: ClientId) -> None:
        self.reported[client] = self.eligibility.priority_class(client)

    def priority_class(self, client: ClientId) -> int | None:
        if self.deficit.get(client, 0) <= 0:
            return None
        fresh = self.head_start.get(client, 0) > 0
        sparse = sum(request.client == client for request in self.in_flight) < self.sparse_limit
        return {(True, True): FRESH_AND_SPARSE, (True, False): FRESH, (False, True): SPARSE, (False, False): ELIGIBLE}[
            fresh, sparse
        ]

    def part(self) -> float:
        active = {request.client for request in [*self.waiting, *self.in_flight]}
        self.counted = {client: self.counted.get(client, self.weight[client]) for client in active}
        rounds = RefillRounds(RULE, lambda: self.rate, ClientDeficits(Shares()), Shares())
        return rounds.fraction(sum(self.counted.values()))

    @rule(
        client=clients,
        model=st.sampled_from(MODELS),
        weight=st.sampled_from([1, 1, 1, 3]),
        cost=st.integers(0, 60),
    )
    def wait(self, client: ClientId, model: str, weight: int, cost: int) -> None:
        """Let a client begin to wait: it keeps at most what a round adds."""
        self.requests += 1
        request = Request(RequestId(f"r{self.requests}"), client, model, (), weight=weight)
        self.deficit.setdefault(client, weight * RULE.quantum)
        self.weight[client] = weight
        begins = not any(other.client == client for other in self.waiting)
        self.waiting.append(request)
        part = self.part()
        if begins:
            self.cut(client, part)
            self.turns_without_debt[client] = 0
            self.head_start[client] = weight * HEAD_START if cost < weight * HEAD_START else 0
        self.eligibility.add_waiting(request, cost)
        self.reported.setdefault(client, self.eligibility.priority_class(client))
        self.drop_debtors()

    def cut(self, client: ClientId, part: float) -> None:
        """Leave a client at most what a round adds, unless an operator granted it more than a quantum."""
        quantum = self.weight[client] * RULE.quantum
        if self.deficit[client] <= quantum:
            self.deficit[client] = min(self.deficit[client], part * quantum)

    def drop_debtors(self) -> None:
        """What a client in debt will have is what refills add, and that is not cut."""
        for client in [each for each in self.turns_without_debt if self.deficit[each] <= 0]:
            del self.turns_without_debt[client]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), dispatched=st.booleans())
    def leave(self, data: st.DataObject, dispatched: bool) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.eligibility.remove_waiting(request)
        if not any(other.client == request.client for other in self.waiting):
            del self.reported[request.client]
            del self.head_start[request.client]
            self.turns_without_debt.pop(request.client, None)
        self.part()
        if dispatched:
            self.counted.setdefault(request.client, int(request.weight))
            self.in_flight.append(request)
            part = self.part()
            if (turns := self.turns_without_debt.pop(request.client, None)) == 0:
                self.turns_without_debt[request.client] = 1
            elif turns:
                self.cut(request.client, part)
            self.eligibility.request_dispatched(request)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(request)
        self.part()
        self.eligibility.request_ended(request)

    @rule(rate=st.none() | st.sampled_from([0.5, 3.0, 12.0, 45.0]))
    def serve(self, rate: float | None) -> None:
        self.rate = rate

    @rule(sparse_limit=st.integers(0, 3))
    def set_sparse_limit(self, sparse_limit: int) -> None:
        self.sparse_limit = sparse_limit
        self.eligibility.set_sparse_limit(sparse_limit)

    @rule(client=clients, cost=st.integers(-60, 120))
    def charge(self, client: ClientId, cost: int) -> None:
        self.eligibility.charge(client, cost)
        if client in self.deficit:
            self.deficit[client] -= cost
        if self.head_start.get(client, 0) > 0:
            self.head_start[client] -= cost
        self.drop_debtors()

    @rule(models=st.none() | st.sets(st.sampled_from(MODELS), min_size=1))
    def refill(self, models: set[str] | None) -> None:
        """Refill the model: while clients wait for these models and none is eligible, each counter gets the same
        fraction of a quantum, up to one.
        """
        contenders = {r.client for r in self.waiting if models is None or r.model in models}
        while contenders and all(self.deficit[client] <= 0 for client in contenders):
            part = self.part()
            for client, weight in self.weight.items():
                quantum, deficit = weight * RULE.quantum, self.deficit[client]
                self.deficit[client] = max(deficit, min(deficit + part * quantum, quantum))
        self.eligibility.refill(models)

    @precondition(lambda self: not self.waiting)
    @rule()
    def reset(self) -> None:
        self.deficit = {client: weight * RULE.quantum for client, weight in self.weight.items()}
        self.eligibility.reset()

    @invariant()
    def it_equals_the_rule(self) -> None:
        """Every counter equals that of the loop, and the queue knows the priority class of every waiting client."""
        for client in CLIENTS:
            assert self.eligibility.deficit(client) == self.deficit.get(client)
            assert self.eligibility.priority_class(client) == self.priority_class(client)
        assert self.reported == {request.client: self.priority_class(request.client) for request in self.waiting}


TestEligibility = EligibilityMachine.TestCase
TestEligibility.settings = settings(max_examples=200, stateful_step_count=30)


def request(client: str, number: int) -> Request:
    return Request(RequestId(f"{client}{number}"), ClientId(client), "llama", ())


def test_without_sparse_first_all_eligible_clients_are_equal() -> None:
    """Without `sparse_first` the longest match alone decides among eligible clients."""
    eligibility = Eligibility(lambda _: None, RULE, lambda: None, Shares())
    eligibility.add_waiting(request("ada", 1), HEAD_START)
    assert eligibility.priority_class(ClientId("ada")) == ELIGIBLE


def test_the_refill_schedule_does_not_grow_with_charges() -> None:
    """A client that is refunded again and again, and never refilled, has a bounded number of entries."""
    eligibility = Eligibility(lambda _: None, RULE, lambda: None, Shares())
    eligibility.add_waiting(request("ada", 1))
    eligibility.charge(ClientId("ada"), 1e6)
    for _ in range(1000):
        eligibility.charge(ClientId("ada"), -1)
    assert len(eligibility._refills._schedule) < 30


def test_a_client_is_overdue_after_one_dispatch_per_active_client() -> None:
    """An overdue client goes before all others, once, even with a small debt; with a larger debt it does not."""
    rule = DeficitParameters(10.0, overdue_after=1.0, overdraft=0.5)
    eligibility = Eligibility(lambda _: None, rule, lambda: None, Shares())
    for name in ("ada", "bob", "cyd"):
        eligibility.add_waiting(request(name, 0))
    eligibility.charge(ClientId("ada"), 14)
    eligibility.charge(ClientId("bob"), 16)
    for number in range(4):
        eligibility.mark_overdue()
        assert eligibility.priority_class(ClientId("ada")) == (OVERDUE if number == 3 else None)
        eligibility.add_waiting(request("cyd", number + 1))
        eligibility.request_dispatched(request("cyd", 100 + number))
        eligibility.request_ended(request("cyd", 100 + number))
    assert eligibility.priority_class(ClientId("bob")) is None
    eligibility.request_dispatched(request("ada", 1))
    assert eligibility.priority_class(ClientId("ada")) is None


def take_turn(eligibility: Eligibility, request: Request, cost: float) -> None:
    """Dispatch a waiting request whose client is eligible, and charge it."""
    assert eligibility.priority_class(request.client) is not None
    eligibility.remove_waiting(request)
    eligibility.request_dispatched(request)
    eligibility.charge(request.client, cost)


def test_nobody_waits_until_one_that_came_early_has_spent_a_quantum() -> None:
    """Ada waits alone, and so with a whole quantum of ten turns. Nine others come, with little more than a turn each.
    After two turns each all wait for the next refill, and Ada, too.
    """
    eligibility = Eligibility(lambda _: None, DeficitParameters(10.0, round_seconds=1.0), lambda: 10.0, Shares())
    clients = ["ada", *[f"other {number}" for number in range(9)]]
    waiting = {client: [request(client, number) for number in range(20)] for client in clients}
    for requests in waiting.values():
        for each in requests:
            eligibility.add_waiting(each)
    assert eligibility.deficit(ClientId("ada")) == 10
    turns = dict.fromkeys(clients, 0)
    while eligibility.any_eligible():
        for client in clients:
            if eligibility.priority_class(ClientId(client)) is not None:
                take_turn(eligibility, waiting[client].pop(), 1)
                turns[client] += 1
    assert max(turns.values()) == 2


def test_what_a_refill_adds_is_not_cut() -> None:
    """Ada waits in debt and is refilled while few are active. When many are, she keeps that for all her turns: those
    that waited with her were given as much.
    """
    eligibility = Eligibility(lambda _: None, DeficitParameters(10.0, round_seconds=1.0), lambda: 10.0, Shares())
    ada = [request("ada", number) for number in range(3)]
    for waiting in ada:
        eligibility.add_waiting(waiting)
    eligibility.charge(ClientId("ada"), 12)
    assert eligibility.refill() == [ClientId("ada")]
    assert eligibility.deficit(ClientId("ada")) == 8
    for number in range(9):
        eligibility.add_waiting(request(f"other {number}", 0))
    for waiting in ada[:2]:
        take_turn(eligibility, waiting, 1)
    assert eligibility.deficit(ClientId("ada")) == 6
