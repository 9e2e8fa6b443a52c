"""The measured gap against one computed from the whole history; the bound against the formula."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.clients.service_gap import PAIR_LIMIT, BoundMeter, GapMeter, Outstanding
from router.core.model.cost import LinearCost, Tokens
from router.core.model.request import ClientId

CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd", "dee")]
ADA, BOB, CYD, _ = CLIENTS


class Gaps(RuleBasedStateMachine):
    """Backlogs that begin, end and begin again, beside a diary of all service."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = GapMeter()
        self.diary: list[tuple[ClientId, int]] = []
        self.since: dict[ClientId, int] = {}

    @rule(client=st.sampled_from(CLIENTS))
    def begin_or_end(self, client: ClientId) -> None:
        if client in self.since:
            del self.since[client]
            self.meter.end(client)
        else:
            self.since[client] = len(self.diary)
            self.meter.begin(client)

    @rule(client=st.sampled_from(CLIENTS), service=st.integers(-10, 50))
    def serve(self, client: ClientId, service: int) -> None:
        self.diary.append((client, service))
        self.meter.add_service(client, service)

    def service(self, client: ClientId, since: int) -> int:
        return sum(service for served, service in self.diary[since:] if served == client)

    @invariant()
    def gap_is_that_of_the_diary(self) -> None:
        """The largest difference between two that are backlogged, since the later of the two began."""
        gaps = [0]
        for one, other in combinations(self.since, 2):
            since = max(self.since[one], self.since[other])
            gaps.append(abs(self.service(one, since) - self.service(other, since)))
        assert self.meter.gap() == max(gaps)


TestGaps = Gaps.TestCase
TestGaps.settings = settings(max_examples=60)


def test_a_backlog_that_began_again_is_compared_anew() -> None:
    """What a client was served in an earlier backlog is not held against the one that stayed."""
    meter = GapMeter()
    meter.begin(ADA)
    meter.begin(BOB)
    meter.add_service(ADA, 100)
    meter.add_service(BOB, 70)
    meter.end(ADA)
    meter.begin(ADA)
    assert meter.gap() == 0


def test_only_so_many_are_compared() -> None:
    """Beyond the limit a newcomer is not measured, and its end is no error."""
    meter = GapMeter()
    for number in range(PAIR_LIMIT):
        meter.begin(ClientId(str(number)))
    meter.begin(ADA)
    meter.add_service(ADA, 1000)
    assert meter.gap() == 0
    meter.end(ADA)


def test_the_bound_is_the_formula() -> None:
    """2(U' + E + Q) + 2R with each term the largest seen of one client, per weight of the lightest client."""
    bound = BoundMeter(LinearCost(extend=1.0, output=2.0))
    bound.add(ADA, 0.5, Outstanding(expected_output=10, cached=60, extend=40))
    bound.add(ADA, 0.5, Outstanding(expected_output=20, cached=0, extend=70))
    bound.add(BOB, 1.0, Outstanding(expected_output=5, cached=90, extend=10))
    consumed = 100 + 2 * 30  # U': the largest input, and ada's outstanding output
    assert bound.bound(500) == 2 * ((consumed + 90) / 0.5 + 500) + 2 * 110 / 0.5


def test_the_lightest_client_may_weigh_more_than_one() -> None:
    """No client of weight 1 is assumed that was never seen."""
    bound = BoundMeter(LinearCost(extend=1.0, output=2.0))
    bound.add(ADA, 4.0, Outstanding(expected_output=0, cached=0, extend=100))
    bound.add(BOB, 2.0, Outstanding(expected_output=0, cached=0, extend=80))
    assert bound.bound(500) == 2 * (200 / 2.0 + 500)


def test_what_was_underestimated_widens_the_bound() -> None:
    """By the worst request's excess, for each of the most requests that a client had in flight at once."""
    bound = BoundMeter(LinearCost(extend=1.0, output=2.0))
    for _ in range(3):
        bound.add(ADA, 1.0, Outstanding(expected_output=10, cached=60, extend=40))
    before = bound.bound(500)
    bound.record_total(Outstanding(expected_output=10, cached=60, extend=40), Tokens(100, 0, 10))
    assert bound.bound(500) == before
    bound.record_total(Outstanding(expected_output=10, cached=60, extend=40), Tokens(150, 30, 15))
    assert bound.bound(500) == before + 2 * 3 * (50 + 2 * 5)


@given(sizes=st.lists(st.builds(Outstanding, *[st.integers(1, 99)] * 3), min_size=1, max_size=8), gap=st.integers(1, 8))
def test_the_bound_never_falls(sizes: list[Outstanding], gap: int) -> None:
    """It holds for all time that was measured, so an end does not lower it, and a dispatch may raise it."""
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
def test_what_has_ended_is_not_outstanding(together: bool) -> None:
    """Requests one after the other need half the bound's outstanding part of two at a time."""
    meter = BoundMeter(LinearCost(extend=0.0, output=1.0))
    for _ in range(2):
        meter.add(ADA, 1.0, Outstanding(100, 1, 1))
        if not together:
            meter.remove(ADA, Outstanding(100, 1, 1))
    assert meter.bound(0) == (400 if together else 200)
