"""In rounds of turns, nobody has a second turn before those who wait have had their first."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.clients.shares import Shares
from router.core.model.prompt_key import CHUNK_BYTES, PromptKey
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.deficit.eligibility import FRESH_AND_SPARSE, OVERDUE, SPARSE, Eligibility
from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.deficit.turn_rounds import LITTLE_CHUNKS, TurnRounds

ADA, BOB, CYD, DAN = CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd", "dan")]
QUANTUM = 10.0
RULE = DeficitParameters(QUANTUM, head_start=100.0, round_seconds=0.0, overdue_after=1.0, overdraft=10.0)
"""In which any debt of these tests is small enough for a client to become overdue."""

steps = st.lists(
    st.tuples(st.sampled_from(["wait", "leave", "serve", "serve", "bar", "out of turn"]), st.sampled_from(CLIENTS)),
    min_size=30,
    max_size=60,
)
"""What happens, and to whom. `bar`: a client may not go, or may go again."""


def without_debts() -> TurnRounds:
    """Rounds of clients of which none is ever in debt."""
    return TurnRounds(lambda _: False, lambda _: None)


class Turns:
    """Clients that wait and are served in the order of their rounds, by choice within a round."""

    def __init__(self, *, bars: bool) -> None:
        """`bars`: whether clients are now and then not allowed to go, as for lack of credit."""
        self._bars = bars
        self.rounds = without_debts()
        self.waiting: dict[ClientId, Counter[ClientId]] = {}
        """By waiting client, how many turns each other client has had since that client waits or had a turn."""
        self._barred: set[ClientId] = set()

    def play(self, step: str, client: ClientId) -> None:
        match step:
            case "wait" if client not in self.waiting:
                self.waiting[client] = Counter()
                self.rounds.join(client)
            case "leave" if client in self.waiting:
                del self.waiting[client]
                self.rounds.leave(client)
            case "bar" if self._bars:
                self._barred ^= {client}
            case "serve":
                self._serve(client)
            case "out of turn" if self._bars and client in self.waiting:
                self.rounds.take(client, may_begin=False)
                self.waiting[client] = Counter()

    def _serve(self, favourite: ClientId) -> None:
        """Serve the favourite of those in the earliest round, or any of these if the favourite is not among them."""
        able = [client for client in self.waiting if client not in self._barred]
        if able:
            first = min(map(self.rounds.round_of, able))
            served = min(able, key=lambda each: (self.rounds.round_of(each) != first, each != favourite))
            self.rounds.take(served, may_begin=True)
            for client, turns in self.waiting.items():
                if client not in self._barred:
                    turns[served] += 1
            self.waiting[served] = Counter()


@given(steps)
def test_each_other_client_has_at_most_two_turns_before_a_waiting_one(steps: list[tuple[str, ClientId]]) -> None:
    """While a client waits, each other client has at most two turns, whoever is preferred within a round."""
    turns = Turns(bars=False)
    for step in steps:
        turns.play(*step)
        assert all(count <= 2 for each in turns.waiting.values() for count in each.values())


@given(steps)
def test_clients_that_could_not_go_have_one_turn_more(steps: list[tuple[str, ClientId]]) -> None:
    """While a client waits and may go, each other client has at most three turns, one of them of an earlier round."""
    turns = Turns(bars=True)
    for step in steps:
        turns.play(*step)
        if step[0] != "out of turn":
            assert all(count <= 3 for each in turns.waiting.values() for count in each.values())


@given(steps)
def test_nobody_is_put_off_beyond_the_next_round(steps: list[tuple[str, ClientId]]) -> None:
    """A waiting client takes its turn in the next round at the latest, also if it was served out of turn."""
    turns = Turns(bars=True)
    for step in steps:
        turns.play(*step)
        assert all(turns.rounds.round_of(client) <= turns.rounds.current + 1 for client in turns.waiting)


def test_a_turn_of_an_earlier_round_leaves_the_client_its_turn_of_the_current_one() -> None:
    """A client that could not go in an earlier round has a turn of that round and one of the current round."""
    rounds = without_debts()
    for client in (ADA, BOB):
        rounds.join(client)
    rounds.take(ADA, may_begin=True)
    assert rounds.take(ADA, may_begin=True)
    rounds.take(BOB, may_begin=True)
    assert (rounds.has_turn(BOB), rounds.has_turn(ADA)) == (True, False)


def test_a_client_that_returns_has_its_turn_in_the_current_round_if_it_had_none() -> None:
    """A client that returns takes its turn in the current round unless it has had one; then in the next."""
    rounds = without_debts()
    for client in (ADA, BOB):
        rounds.join(client)
        rounds.take(client, may_begin=True)
    rounds.leave(BOB)
    rounds.join(BOB)
    before = rounds.has_turn(BOB)
    rounds.leave(BOB)
    rounds.take(ADA, may_begin=True)
    rounds.join(BOB)
    assert (before, rounds.has_turn(BOB)) == (False, True)


def test_a_forgotten_client_begins_like_a_new_one() -> None:
    """Of a forgotten client it is not known that it has had a turn."""
    rounds = without_debts()
    rounds.join(ADA)
    rounds.take(ADA, may_begin=True)
    rounds.leave(ADA)
    rounds.forget(ADA)
    rounds.join(ADA)
    assert rounds.has_turn(ADA)


def test_turns_out_of_turn_begin_no_round() -> None:
    """A client that is served for another reason than its turn begins no round, and nobody gains a turn by it."""
    rounds = without_debts()
    rounds.join(ADA)
    rounds.take(ADA, may_begin=True)
    assert not rounds.take(ADA, may_begin=False)
    assert rounds.current == 0


# Which clients have a turn in spite of a debt.


def test_who_may_have_a_turn_in_debt_is_asked_when_a_round_begins() -> None:
    """Clients that wait in debt are admitted when they begin to wait and when a round begins, for one turn each."""
    small_debts, reported = {ADA, BOB}, list[ClientId]()
    rounds = TurnRounds(small_debts.__contains__, reported.append)
    for client in (ADA, BOB, CYD):
        rounds.join(client)
    admitted = [set(rounds.admitted)]
    for client in (ADA, CYD, CYD):
        rounds.take(client, may_begin=True)
        admitted.append(set(rounds.admitted))
    assert admitted == [{ADA, BOB}, {BOB}, {BOB}, {ADA, BOB}]
    assert reported[:3] == [ADA, BOB, ADA]


def test_an_admission_ends_when_that_is_asked_for() -> None:
    """What was allowed at the start of a round may be too much later; who no longer wait are not admitted either."""
    rounds = TurnRounds(lambda _: True, lambda _: None)
    for client in (ADA, BOB, CYD):
        rounds.join(client)
    rounds.end_admission(ADA)
    rounds.leave(BOB)
    assert rounds.admitted == {CYD}


def in_rounds(turn_overdraft: float = 1.0) -> Eligibility:
    eligibility = Eligibility(lambda _: None, RULE, lambda: None, Shares(), turn_overdraft=turn_overdraft)
    eligibility.set_sparse_limit(1)
    return eligibility


def request(client: ClientId, number: int = 0) -> Request:
    return Request(RequestId(f"{client}{number}"), client, "llama", ())


def indebted(eligibility: Eligibility, client: ClientId, debt: float) -> None:
    """Let a client be known with this debt while it does not wait."""
    eligibility.add_waiting(request(client))
    eligibility.remove_waiting(request(client))
    eligibility.charge(client, QUANTUM + debt)


def serve(eligibility: Eligibility, client: ClientId, number: int = 0) -> None:
    """Serve a waiting request to its end."""
    eligibility.take_turn(client)
    eligibility.remove_waiting(request(client, number))
    eligibility.request_dispatched(request(client, number))
    eligibility.request_ended(request(client, number))


@given(debt=st.floats(0, 40), turn_overdraft=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_a_client_is_admitted_up_to_the_overdraft_of_turns(debt: float, turn_overdraft: float) -> None:
    """A client in debt takes its turn if its debt is at most `turn_overdraft` quanta, and delays no refill."""
    eligibility = in_rounds(turn_overdraft)
    indebted(eligibility, ADA, debt)
    eligibility.add_waiting(request(ADA))
    owed = -(eligibility.deficit(ADA) or 0.0)
    expected = FRESH_AND_SPARSE if owed / QUANTUM <= turn_overdraft else None
    assert (eligibility.waiting_priority_class(ADA), eligibility.any_eligible()) == (expected, False)
    assert eligibility.any_in_class(FRESH_AND_SPARSE) == (expected is not None)


def test_a_client_with_a_call_in_flight_is_not_admitted() -> None:
    """A client in debt with a call in flight has no turn in spite of its debt."""
    eligibility = in_rounds()
    indebted(eligibility, ADA, 5)
    eligibility.request_dispatched(request(ADA, 1))
    eligibility.add_waiting(request(ADA))
    assert eligibility.waiting_priority_class(ADA) is None


def test_a_client_in_debt_has_one_turn_per_round() -> None:
    """After its turn a client in debt is admitted again only when the next round has begun."""
    eligibility = in_rounds()
    for client in (ADA, BOB):
        eligibility.add_waiting(request(client))
        eligibility.add_waiting(request(client, 1))
    eligibility.charge(ADA, QUANTUM + 5)
    serve(eligibility, BOB)
    seen = [eligibility.waiting_priority_class(ADA)]
    serve(eligibility, BOB, 1)
    seen.append(eligibility.waiting_priority_class(ADA))
    serve(eligibility, ADA)
    seen.append(eligibility.waiting_priority_class(ADA))
    assert seen == [None, FRESH_AND_SPARSE, None]


@pytest.mark.parametrize("charged", [0.0, 4.0, 6.0])
def test_an_admission_ends_with_the_debt_that_it_allows(charged: float) -> None:
    """A client that was admitted, and owes more than a turn allows by a late charge, may not go."""
    eligibility = in_rounds()
    indebted(eligibility, ADA, 5)
    eligibility.add_waiting(request(ADA))
    eligibility.charge(ADA, charged)
    assert eligibility.waiting_priority_class(ADA) == (FRESH_AND_SPARSE if charged < 5 else None)


@pytest.mark.parametrize("others_take_turns", [True, False])
def test_a_fresh_client_whose_turn_is_ahead_is_not_overdue(others_take_turns: bool) -> None:
    """A fresh client in debt that has had its turn is overdue only if no turns of others lead to the next round."""
    eligibility = in_rounds()
    for number in (0, 1):
        eligibility.add_waiting(request(ADA, number))
    eligibility.charge(ADA, QUANTUM + 5)
    serve(eligibility, ADA)
    eligibility.add_waiting(request(BOB), 0.0 if others_take_turns else RULE.head_start)
    for number in range(6):
        eligibility.add_waiting(request(CYD, number), RULE.head_start)
        eligibility.request_dispatched(request(CYD, 100 + number))
        eligibility.request_ended(request(CYD, 100 + number))
    eligibility.mark_overdue()
    assert eligibility.waiting_priority_class(BOB) in ((FRESH_AND_SPARSE,) if others_take_turns else (SPARSE, OVERDUE))
    assert eligibility.waiting_priority_class(ADA) == (None if others_take_turns else OVERDUE)


def test_what_is_cached_goes_first_within_a_round() -> None:
    """An earlier round goes first, then a request with little to compute, then the client that waits longest."""
    eligibility = in_rounds()
    for number in (0, 1):
        for client in (ADA, BOB, CYD):
            eligibility.add_waiting(request(client, number))
    serve(eligibility, ADA)
    size, cached = 2 * LITTLE_CHUNKS, {ADA: 2 * LITTLE_CHUNKS, BOB: LITTLE_CHUNKS - 1, CYD: LITTLE_CHUNKS}
    long = {each: replace(request(each, 1), prompts=(PromptKey(b"", size * CHUNK_BYTES),)) for each in cached}
    assert sorted(cached, key=lambda each: eligibility.turn(long[each], -cached[each])) == [CYD, BOB, ADA]


@settings(max_examples=50)
@given(steps)
def test_what_is_kept_ends_with_the_wait(steps: list[tuple[str, ClientId]]) -> None:
    """Of clients that no longer wait no round is kept."""
    turns = Turns(bars=True)
    for step in steps:
        turns.play(*step)
    assert len(turns.rounds) == len(turns.waiting)
