"""A refill round adds what is served in its time, and clients that wait are cut to that."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.deficit.deficits import ClientDeficits
from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.deficit.refill_rounds import STEPS, Cuts, RefillRounds

ADA, BOB = ClientId("ada"), ClientId("bob")
QUANTUM = 1_000.0
RULE = DeficitParameters(QUANTUM, round_seconds=5.0)


def rounds(rate: float | None = None, rule: DeficitParameters = RULE) -> RefillRounds:
    return RefillRounds(rule, lambda: rate, ClientDeficits(Shares()), Shares())


@given(st.floats(0.01, 1e6), st.floats(0.1, 1e4))
def test_a_round_adds_what_is_served_in_its_time(rate: float, weight: float) -> None:
    """A round adds that for all clients together, but at most a quantum for each, and at least a hundredth of one."""
    part = rounds(rate).fraction(weight)
    assert part == pytest.approx(min(1.0, max(0.01, 5.0 * rate / (weight * QUANTUM))), abs=1 / STEPS)
    assert 0 < part <= 1


def test_without_a_time_or_a_known_rate_a_round_adds_a_quantum() -> None:
    """A round adds a quantum, as in Algorithm 1, if it has no time or no rate is known."""
    assert rounds(1.0, DeficitParameters(QUANTUM, round_seconds=0.0)).fraction(1e3) == 1
    assert rounds(None).fraction(1e3) == 1


class Waiting:
    """Two active clients of which a round adds a quarter of a quantum to each."""

    def __init__(self) -> None:
        shares = Shares()
        self.deficits = ClientDeficits(shares)
        self.rounds = RefillRounds(RULE, lambda: QUANTUM / 10, self.deficits, shares)
        for client in (ADA, BOB):
            request = Request(RequestId(client), client, "llama", ())
            self.rounds.active.add_request(request)
            self.deficits.register(request, QUANTUM, active=False)
        self.cuts = Cuts(self.rounds, self.deficits)


@given(st.floats(1, 1e5))
def test_rounds_are_added_until_a_client_is_in_credit(debt: float) -> None:
    """A client in debt is in credit after the rounds that are counted, by no more than one of them."""
    waiting = Waiting()
    waiting.deficits.charge(ADA, QUANTUM + debt)
    added = waiting.rounds.add_for(ADA, 2.0)
    assert 0 < waiting.deficits.deficit(ADA) <= QUANTUM / 4 + 1e-6
    assert waiting.deficits.deficit(ADA) == pytest.approx(added * QUANTUM - debt, abs=1e-6)


@pytest.mark.parametrize(
    ("happens", "left"),
    [
        (lambda cuts: cuts.count_turn(BOB), QUANTUM),
        (lambda cuts: cuts.count_turn(ADA), QUANTUM),
        (lambda cuts: [cuts.count_turn(ADA) for _ in range(2)], QUANTUM / 4),
        (lambda cuts: [cuts.count_turn(ADA), cuts.discard(ADA), cuts.count_turn(ADA)], QUANTUM),
    ],
)
def test_a_client_is_cut_at_its_second_turn_in_credit(happens: Callable[[Cuts], object], left: float) -> None:
    """A client that begins to wait is cut, and again at its second turn if it was not in debt since it began."""
    waiting = Waiting()
    waiting.cuts.join(ADA)
    assert waiting.deficits.deficit(ADA) == QUANTUM / 4
    waiting.deficits.charge(ADA, -3 * QUANTUM / 4)
    happens(waiting.cuts)
    assert waiting.deficits.deficit(ADA) == left


def test_a_client_is_cut_at_one_turn_only() -> None:
    """After its second turn what a client has is what refills add."""
    waiting = Waiting()
    waiting.cuts.join(ADA)
    for _ in range(2):
        waiting.cuts.count_turn(ADA)
    waiting.deficits.charge(ADA, -3 * QUANTUM / 4)
    for _ in range(4):
        waiting.cuts.count_turn(ADA)
    assert waiting.deficits.deficit(ADA) == QUANTUM
