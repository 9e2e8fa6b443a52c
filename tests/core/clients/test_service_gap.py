"""The measured gap equals that of the whole history, and the bound equals the formula."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.clients.fairness import PAIR_LIMIT, BoundMeter, GapMeter, Outstanding
from router.core.model.cost import LinearCost, Tokens
from router.core.model.request import ClientId

CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd", "dee")]
ADA, BOB, CYD, _ = CLIENTS


class Gaps(RuleBasedStateMachine):
    """Compares backlogs that begin, end and begin again with a list of all service."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = GapMeter()
        self.history: list[tuple[ClientId, int]] = []
        self.since: dict[ClientId, int] = {}

    @rule(client=st.sampled_from(CLIENTS))
    def begin_or_end(self, client: ClientId) -> None:
        if client in self.since:
            del self.since[client]
            self.meter.backlog_ended(client)
        else:
            self.since[client] = len(self.history)
            self.meter.backlog_began(client)

    @rule(client=st.sampled_from(CLIENTS), service=st.integers(-10, 50))
    def serve(self, client: ClientId, service: int) -> None:
        self.history.append((client, service))
        self.meter.add_service(client, service)

    def service(self, client: ClientId, since: int) -> int:
        return sum(service for served, service in self.history[since:] if served == client)

    @invariant()
    def gap_matches_the_history(self) -> None:
        """The gap is the largest difference between two backlogged clients since the later backlog began."""
        gaps = [0]
        for one, other in combinations(self.since, 2):
            since = max(self.since[one], self.since[other])
            gaps.append(abs(self.service(one, since) - self.service(other, since)))
        assert self.meter.gap() == max(gaps)


TestGaps = Gaps.TestCase
TestGaps.settings = settings(max_examples=60)


def test_a_backlog_that_began_again_is_compared_anew() -> None:
    """Service in an earlier backlog does not count against a client."""
    meter = GapMeter()
    meter.backlog_began(ADA)
    meter.backlog_began(BOB)
    meter.add_service(ADA, 100)
    meter.add_service(BOB, 70)
    meter.backlog_ended(ADA)
    meter.backlog_began(ADA)
    assert meter.gap() == 0


def test_clients_beyond_the_limit_are_not_compared() -> None:
    """A client beyond the limit is not measured, and the end of its backlog is no error."""
    meter = GapMeter()
    for number in range(PAIR_LIMIT):
        meter.backlog_began(ClientId(str(number)))
    meter.backlog_began(ADA)
    meter.add_service(ADA, 1000)
    assert meter.gap() == 0
    meter.backlog_ended(ADA)


def test_the_bound_is_the_formula() -> None:
    """The bound is 2(U' + E + Q) + 2R with each term the largest seen of one client, per weight of
    the lightest client.
    """
    bound = BoundMeter(LinearCost(extend=1.0, output=2.0))
    bound.add(ADA, 0.5, Outstanding(expected_output=10, cached=60, extend=40))
    bound.add(ADA, 0.5, Outstanding(expected_output=20, cached=0, extend=70))
    bound.add(BOB, 1.0, Outstanding(expected_output=5, cached=90, extend=10))
    consumed = 100 + 2 * 30  # U': the largest input, and ada's outstanding output
    assert bound.bound(500) == 2 * ((consumed + 90) / 0.5 + 500) + 2 * 110 / 0.5


def test_the_lightest_client_may_weigh_more_than_one() -> None:
    """The bound assumes no client of weight 1 unless one was seen."""
    bound = BoundMeter(LinearCost(extend=1.0, output=2.0))
    bound.add(ADA, 4.0, Outstanding(expected_output=0, cached=0, extend=100))
    bound.add(BOB, 2.0, Outstanding(expected_output=0, cached=0, extend=80))
    assert bound.bound(500) == 2 * (200 / 2.0 + 500)


def test_an_underestimate_widens_the_bound() -> None:
    """The bound grows by the largest excess of a request, times the most requests that one client had in flight."""
    bound = BoundMeter(LinearCost(extend=1.0, output=2.0))
    for _ in range(3):
        bound.add(ADA, 1.0, Outstanding(expected_output=10, cached=60, extend=40))
    before = bound.bound(500)
    bound.record_total(Outstanding(expected_output=10, cached=60, extend=40), Tokens(100, 0, 10), 0)
    assert bound.bound(500) == before
    bound.record_total(Outstanding(expected_output=10, cached=60, extend=40), Tokens(150, 30, 15), 0)
    assert bound.bound(500) == before + 2 * 3 * (50 + 2 * 5)


def test_output_that_is_reported_late_widens_the_bound() -> None:
    """The bound grows by the most new tokens in one report, times the most requests that one client had in flight."""
    bound, request = BoundMeter(LinearCost(extend=1.0, output=2.0)), Outstanding(expected_output=100, extend=40)
    for _ in range(3):
        bound.add(ADA, 1.0, request)
    before = bound.bound(500)
    for output, unreported in ((20, 20), (25, 5)):
        bound.record_total(request, Tokens(40, 0, output), unreported)
    assert bound.bound(500) == before + 2 * 3 * 2 * 20


@given(sizes=st.lists(st.builds(Outstanding, *[st.integers(1, 99)] * 3), min_size=1, max_size=8), gap=st.integers(1, 8))
def test_the_bound_never_falls(sizes: list[Outstanding], gap: int) -> None:
    """The bound covers all the time measured, so the end of a request does not lower it."""
    meter = BoundMeter(LinearCost())
    bounds = []
    for index, size in enumerate(sizes):
        meter.add(ADA, 1.0, size)
        bounds.append(meter.bound(0))
        if index >= gap:
            meter.remove(ADA, sizes[index - gap])
            bounds.append(meter.bound(0))
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("together", [True, False])
def test_an_ended_request_is_not_outstanding(together: bool) -> None:
    """Requests one after the other widen the bound half as much as two at a time."""
    meter = BoundMeter(LinearCost(extend=0.0, output=1.0))
    for _ in range(2):
        meter.add(ADA, 1.0, Outstanding(100, 1, 1))
        if not together:
            meter.remove(ADA, Outstanding(100, 1, 1))
    assert meter.bound(0) == (400 if together else 200)
