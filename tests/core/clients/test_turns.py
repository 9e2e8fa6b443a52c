"""Waits, rounds and lags equal those of simple models, and are right in small examples."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.clients.turns import IDLE_SECONDS, LEAST_ROUND_SECONDS, MINUTE, NOT_ACTIVE, EvenShare, Lag, Turns
from router.core.model.request import ClientId, RequestId

CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd")]
ADA, BOB, CYD = CLIENTS


def opened(turns: Turns, client: ClientId, now: float, name: str = "1", weight: float = 1.0) -> RequestId:
    request = RequestId(f"{client}-{name}")
    turns.request_opened(client, request, weight, now, now)
    return request


@dataclass
class ModelRequest:
    """A request in the model."""

    client: ClientId
    since: float
    waits: bool = True
    others: int = 0
    """Requests of its client that were answered since it arrived."""


@dataclass
class ModelRound:
    """A round in the model: which clients are still to be served."""

    begin: float
    left: set[ClientId] = field(default_factory=set)


class Rounds(RuleBasedStateMachine):
    """Lets requests arrive, be answered, served and closed, and checks each step against the model."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns()
        self.now = 0.0
        self.count = 0
        self.requests: dict[RequestId, ModelRequest] = {}
        self.unserved: dict[ClientId, float] = {}
        """Since when clients with waiting requests are unserved."""
        self.left: dict[ClientId, float] = {}
        """When each client's last request was closed."""
        self.round: ModelRound | None = None
        self.last: float | None = None

    @rule(client=st.sampled_from(CLIENTS))
    def open_request(self, client: ClientId) -> None:
        self.count += 1
        if not self.requests_of(client) and self.now - self.left.get(client, -1.0) > IDLE_SECONDS:
            self.unserved.pop(client, None)
        self.unserved.setdefault(client, self.now)
        request = opened(self.turns, client, self.now, str(self.count))
        self.requests[request] = ModelRequest(client, self.now)
        if self.round is None:
            self.round = ModelRound(self.now, {client})

    def requests_of(self, client: ClientId) -> list[ModelRequest]:
        return [entry for entry in self.requests.values() if entry.client == client]

    def turn(self, client: ClientId) -> None:
        assert self.round is not None
        self.round.left.discard(client)
        if not self.round.left:
            self.last = self.now - self.round.begin
            left = {entry.client for entry in self.requests.values()}
            self.round = ModelRound(self.now, left) if left else None

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Answer a request. A second first token changes nothing."""
        if self.requests:
            request = data.draw(st.sampled_from(sorted(self.requests)))
            entry = self.requests[request]
            self.turns.request_answered(entry.client, request, self.now)
            if entry.waits:
                entry.waits = False
                for other in self.requests_of(entry.client):
                    other.others += 1
                self.serve_now(entry.client)

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        if self.requests:
            request = data.draw(st.sampled_from(sorted(self.requests)))
            entry = self.requests[request]
            self.turns.add_service(entry.client, request, 10.0, 1.0, self.now)
            if not entry.waits:
                self.serve_now(entry.client)

    def serve_now(self, client: ClientId) -> None:
        self.unserved.pop(client, None)
        if any(entry.waits for entry in self.requests_of(client)):
            self.unserved[client] = self.now
        self.turn(client)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.requests:
            request = data.draw(st.sampled_from(sorted(self.requests)))
            client = self.requests.pop(request).client
            self.turns.request_closed(client, request, self.now)
            if not self.requests_of(client):
                self.left[client] = self.now
                self.turn(client)

    @rule(seconds=st.sampled_from([0.25, 4 * IDLE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def waits_match_the_model(self) -> None:
        """The oldest request's wait and the time unserved match the model."""
        for client in CLIENTS:
            waits = [entry for entry in self.requests_of(client) if entry.waits]
            seen = self.turns.client_turns(client, self.now)
            if not waits:
                assert seen.unserved_s is None
                continue
            oldest = waits[0]
            assert seen.wait_s == self.now - oldest.since
            assert seen.wait_even == seen.wait_s / (1 + oldest.others)
            assert seen.unserved_s == self.now - self.unserved[client]

    @invariant()
    def rounds_match_the_model(self) -> None:
        """The current round's time and unserved clients, and the last round's time, match the model."""
        seen = self.turns.rounds(None, self.now)
        assert seen.clients == len({entry.client for entry in self.requests.values()})
        begun = ModelRound(self.now) if self.round is None else self.round
        assert (seen.current_s, seen.unserved) == (self.now - begun.begin, len(begun.left))
        assert seen.last_s == self.last


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=100, stateful_step_count=40)


def test_a_fair_round_is_one_mean_request_per_client() -> None:
    """A fair round takes the clients with an open request, times the recent mean cost, divided by the service rate."""
    turns = Turns()
    for client in CLIENTS:
        request = opened(turns, client, 0.0)
        turns.request_answered(client, request, 0.0)
        turns.add_service(client, request, 500.0, 1.0, 0.0)
    assert turns.rounds(None, 0.0).fair_s is None
    assert turns.rounds(100.0, 0.0).fair_s == 3 * (2 * 500.0 / 3) / 100.0
    turns.request_answered(ADA, opened(turns, ADA, 1.0, "2"), 1.0)
    assert turns.rounds(100.0, 1.0).fair_s == 3 * (3 * 500.0 / 4) / 100.0
    assert turns.rounds(1e9, 1.0).fair_s == LEAST_ROUND_SECONDS


def test_waits_count_the_clients_earlier_requests() -> None:
    """A client with many open requests does not look starved, but a client with one does."""
    turns = Turns()
    waiting = opened(turns, ADA, 0.0, "last")
    for number in range(4):
        turns.request_answered(ADA, opened(turns, ADA, 0.0, str(number)), 2.0 * number)
    opened(turns, BOB, 0.0)
    assert turns.client_turns(ADA, 10.0).wait_even == 10.0 / 5
    assert turns.client_turns(BOB, 10.0).wait_even == turns.client_turns(BOB, 10.0).wait_s == 10.0
    turns.request_answered(ADA, waiting, 10.0)
    turns.request_closed(BOB, RequestId("bob-1"), 12.0)
    assert turns.longest_waits(12.0) == (12.0, 12.0)
    assert turns.longest_waits(12.0 + MINUTE + 1) == (0.0, 0.0)


def test_a_client_of_small_weight_is_expected_to_wait_longer() -> None:
    """A client of large weight is not expected to wait less, since a round serves it more than once."""
    turns = Turns()
    opened(turns, ADA, 0.0, weight=1.0)
    opened(turns, BOB, 0.0, weight=3.0)
    assert [turns.client_turns(client, 10.0).unserved_even for client in (ADA, BOB)] == [5.0, 10.0]
    assert [turns.client_turns(client, 10.0).wait_even for client in (ADA, BOB)] == [5.0, 10.0]


def test_a_resumed_request_does_not_wait() -> None:
    """A request that continues an answer does not wait, because its client already has the first token."""
    turns = Turns()
    turns.request_resumed(ADA, 1.0, 0.0)
    assert turns.client_turns(ADA, 9.0).unserved_s is None
    assert turns.rounds(None, 9.0).clients == 1


def test_departed_clients_are_forgotten() -> None:
    """Of a thousand clients with one request each, only those of the last half second are remembered."""
    turns = Turns()
    for number in range(1000):
        client, now = ClientId(str(number)), 0.1 * number
        turns.request_closed(client, opened(turns, client, now), now)
    assert len(turns._clients) <= IDLE_SECONDS / 0.1 + 2
    turns.forget(ClientId("999"))
    assert turns.client_turns(ClientId("999"), 99.9) == NOT_ACTIVE
    assert turns.rounds(None, 100.0)[:1] == (0,)


@pytest.mark.parametrize("clients", [10, 1000])
def test_rounds_end_despite_arrivals(clients: int) -> None:
    """A client that arrives during a round takes no part in it."""
    turns = Turns()
    for number in range(clients):
        opened(turns, ClientId(str(number)), 0.0)
    turns.add_service(ClientId("0"), RequestId("streams"), 1.0, 1.0, 0.0)
    for number in range(clients):
        assert turns.rounds(None, 1.0) == (clients + number, None, 1.0, clients - number, 0.0)
        opened(turns, ClientId(f"new-{number}"), 1.0)
        turns.request_answered(ClientId(str(number)), RequestId(f"{number}-1"), 1.0)
    assert turns.rounds(None, 2.0) == (2 * clients, None, 1.0, 2 * clients, 1.0)


def test_a_client_that_retries_is_still_unserved() -> None:
    """A client stays unserved until it is served or stays away."""
    turns = Turns()
    turns.request_closed(ADA, opened(turns, ADA, 0.0), 30.0)
    turns.request_closed(ADA, opened(turns, ADA, 30.1, "2"), 40.0)
    opened(turns, ADA, 41.0, "3")
    assert turns.client_turns(ADA, 42.0).unserved_s == 1.0
    turns.request_closed(BOB, opened(turns, BOB, 40.0), 60.0)
    opened(turns, BOB, 60.1, "2")
    assert turns.client_turns(BOB, 70.0).unserved_s == 30.0


# Lags


FOUR = [*CLIENTS, ClientId("dee")]


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
        self.weights = dict(zip(FOUR, weights, strict=True))
        self.now = 0.0
        self.count = 0
        self.open: dict[RequestId, tuple[ClientId, bool]] = {}
        """Open requests, and whether they wait."""
        self.history: list[Moment] = []
        self.since: dict[ClientId, int] = {}
        """Index in the list at which each client's interval began."""
        self.idle: dict[ClientId, float] = {}

    @rule(client=st.sampled_from(FOUR))
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
        for client in FOUR:
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
    """A client starts again after `IDLE_SECONDS` without a request; after a shorter pause its lag is unchanged."""
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
