"""The lag of each client equals that computed from a list of all service."""

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.clients.turns import IDLE_SECONDS, EvenShare, Lag, Turns
from router.core.model.request import ClientId, RequestId

CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd", "dee")]
ADA, BOB, CYD, _ = CLIENTS


class Moment(NamedTuple):
    """Service at one moment."""

    client: ClientId
    cost: float
    weights: dict[ClientId, float]
    """Weights of the clients with an open request."""
    waiting: frozenset[ClientId]
    since: dict[ClientId, int]
    """Index in the list at which each client's interval began."""


class Lags(RuleBasedStateMachine):
    """Lets requests arrive, be answered and end, with pauses in between."""

    @initialize(weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=4, max_size=4))
    def begin(self, weights: list[float]) -> None:
        self.turns = Turns()
        self.weights = dict(zip(CLIENTS, weights, strict=True))
        self.now = 0.0
        self.count = 0
        self.open: dict[RequestId, tuple[ClientId, bool]] = {}
        """Open requests, and whether they wait."""
        self.history: list[Moment] = []
        self.since: dict[ClientId, int] = {}
        """Index in the list at which each client's interval began."""
        self.idle: dict[ClientId, float] = {}

    @rule(client=st.sampled_from(CLIENTS))
    def open_request(self, client: ClientId) -> None:
        self.count += 1
        request = RequestId(str(self.count))
        if client not in self.since or (client in self.idle and self.now - self.idle[client] > IDLE_SECONDS):
            self.since[client] = len(self.history)
        self.idle.pop(client, None)
        self.open[request] = client, True
        self.turns.request_opened(client, request, self.weights[client], self.now, self.now)

    @rule(data=st.data(), answered=st.booleans())
    def answer_or_close(self, data: st.DataObject, answered: bool) -> None:
        """Answer or close a request."""
        if not self.open:
            return
        request = data.draw(st.sampled_from(sorted(self.open)))
        client, _ = self.open.pop(request)
        if answered:
            self.turns.request_answered(client, request, self.now)
            self.open[request] = client, False
        else:
            self.turns.request_closed(client, request, self.now)
            if not any(each == client for each, _ in self.open.values()):
                self.idle[client] = self.now

    @rule(data=st.data(), cost=st.integers(0, 50))
    def serve(self, data: st.DataObject, cost: int) -> None:
        if not self.open:
            return
        request = data.draw(st.sampled_from(sorted(self.open)))
        client, _ = self.open[request]
        weights = {each: self.weights[each] for each, _ in self.open.values()}
        waiting = frozenset(each for each, waits in self.open.values() if waits)
        self.history.append(Moment(client, cost, weights, waiting, dict(self.since)))
        self.turns.add_service(client, request, cost, self.weights[client], self.now)

    @rule(seconds=st.sampled_from([0.5 * IDLE_SECONDS, 2 * IDLE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def lag(self, client: ClientId) -> float:
        """Return the lag: the most by which even shares while waiting exceed the client's own service, from any moment
        on.
        """
        if client not in self.since or self.now - self.idle.get(client, self.now) > IDLE_SECONDS:
            return 0.0
        behind = most = 0.0
        for moment in reversed(self.history[self.since[client] :]):
            if client in moment.waiting:
                behind += moment.cost / sum(moment.weights.values())
            if client == moment.client:
                behind -= moment.cost / self.weights[client]
            most = max(most, behind)
        return most

    @invariant()
    def lags_match_the_history(self) -> None:
        """Every client's lag matches the list at every time."""
        for client in CLIENTS:
            assert self.turns.client_turns(client, self.now).lag == pytest.approx(self.lag(client), abs=1e-6)


TestLags = Lags.TestCase
TestLags.settings = settings(max_examples=100, stateful_step_count=40)


def waiting(turns: Turns, *clients: ClientId) -> None:
    for client in clients:
        turns.request_opened(client, RequestId(client), 1.0, 0.0, 0.0)


def test_a_client_that_waits_falls_behind_one_that_comes_back() -> None:
    """A waiting client falls behind although the other one's requests end before its next ones: the end of a request
    ends no interval.
    """
    turns = Turns()
    waiting(turns, ADA)
    for number in range(10):
        request, now = RequestId(f"b{number}"), float(number)
        turns.request_opened(BOB, request, 1.0, now, now)
        turns.request_answered(BOB, request, now + 0.5)
        turns.add_service(BOB, request, 100.0, 1.0, now + 0.9)
        turns.request_closed(BOB, request, now + 0.99)
    assert turns.client_turns(ADA, 10.0).lag == 10 * 100.0 / 2
    assert turns.client_turns(BOB, 10.0).lag == 0.0


def test_a_client_with_nothing_waiting_does_not_fall_behind() -> None:
    """A client does not fall behind while its request is answered or while it has none: others may have
    what it leaves.
    """
    turns = Turns()
    waiting(turns, ADA, BOB)
    turns.request_answered(ADA, RequestId(ADA), 0.0)
    turns.add_service(BOB, RequestId(BOB), 1000.0, 1.0, 0.0)
    turns.request_closed(ADA, RequestId(ADA), 0.0)
    turns.add_service(BOB, RequestId(BOB), 1000.0, 1.0, 0.0)
    turns.request_opened(ADA, RequestId("next"), 1.0, 0.1, 0.1)
    assert turns.client_turns(ADA, 0.1).lag == 0.0


def test_a_long_pause_resets_the_lag() -> None:
    """A client starts anew after `IDLE_SECONDS` without a request; after a shorter pause its lag is unchanged."""
    for pause, lag in ((0.5 * IDLE_SECONDS, 50.0), (2 * IDLE_SECONDS, 0.0)):
        turns = Turns()
        waiting(turns, ADA, BOB)
        turns.add_service(BOB, RequestId(BOB), 100.0, 1.0, 0.0)
        turns.request_closed(ADA, RequestId(ADA), 1.0)
        assert turns.client_turns(ADA, 1.0 + pause).lag == lag
        turns.request_opened(ADA, RequestId("next"), 1.0, 1.0 + pause, 1.0 + pause)
        assert turns.client_turns(ADA, 1.0 + pause).lag == lag


def test_a_refund_leaves_no_new_lag() -> None:
    """A refund leaves no lag, neither for a client that was not behind nor for one that was."""
    even, lag = EvenShare(), Lag()
    even.weight = 2.0
    even.begin_waiting(lag)
    even.add_client_service(lag, 3000.0)
    even.add_client_service(lag, -2900.0)
    assert even.lag_of(lag) == 0.0
    even.add_service(1000.0)
    even.add_client_service(lag, 300.0)
    even.add_client_service(lag, -250.0)
    even.add_client_service(lag, 0.0)
    assert even.lag_of(lag) == pytest.approx(500.0 - 300.0 + 250.0 - 100.0)
