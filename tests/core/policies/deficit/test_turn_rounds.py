"""In rounds of turns, nobody has a second turn before those who wait have had their first."""

from collections import Counter
from dataclasses import replace
from typing import Final

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


def test_a_turn_in_debt_is_the_only_one_of_its_round() -> None:
    """A client that was admitted in an earlier round has its turn in the current one or in debt, not both."""
    rounds = TurnRounds(lambda _: True, lambda _: None)
    for client in (ADA, BOB):
        rounds.join(client)
    rounds.take(ADA, may_begin=True)
    rounds.take(ADA, may_begin=True)
    rounds.take(BOB, may_begin=True)
    assert not rounds.has_turn(BOB)


def test_an_admission_ends_when_that_is_asked_for() -> None:
    """What was allowed at the start of a round may be too much later; who no longer wait are not admitted either."""
    rounds = TurnRounds(lambda _: True, lambda _: None)
    for client in (ADA, BOB, CYD):
        rounds.join(client)
    rounds.end_admission(ADA)
    rounds.leave(BOB)
    assert rounds.admitted == {CYD}


def in_rounds(turn_overdraft: float = 1.0) -> Eligibility:
    eligibility = Eligibility(
        lambda _: None, RULE, lambda: None, Shares(), rounds_from=0, turn_overdraft=turn_overdraft
    )
    eligibility.set_sparse_limit(1)
    return eligibility


LONG: Final = 2 * LITTLE_CHUNKS
"""The chunks of a prompt that might be evicted."""


def request(client: ClientId, number: int = 0, chunks: int = LONG) -> Request:
    """A request with a long prompt, unless said otherwise."""
    return Request(RequestId(f"{client}{number}"), client, "llama", (PromptKey(b"", chunks * CHUNK_BYTES),))


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
    assert (FRESH_AND_SPARSE in eligibility.waiting_classes) == (expected is not None)


def test_a_client_with_a_call_in_flight_is_not_admitted() -> None:
    """A client in debt with a call in flight has no turn in spite of its debt."""
    eligibility = in_rounds()
    indebted(eligibility, ADA, 5)
    eligibility.request_dispatched(request(ADA, 1))
    eligibility.add_waiting(request(ADA))
    assert eligibility.waiting_priority_class(ADA) is None


def test_a_client_in_debt_is_admitted_when_its_last_call_ends() -> None:
    """A client with two calls open, in debt, has its turn of the round also if one was in flight when that began."""
    eligibility = in_rounds()
    indebted(eligibility, ADA, 5)
    eligibility.request_dispatched(request(ADA, 1))
    eligibility.add_waiting(request(ADA))
    eligibility.request_ended(request(ADA, 1))
    assert eligibility.waiting_priority_class(ADA) == FRESH_AND_SPARSE


@pytest.mark.parametrize("cost", [0.0, RULE.head_start])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_cheap_call_brings_a_head_start_while_nothing_is_in_flight(cost: float, in_flight: bool) -> None:
    """Ada never ceases to wait, and has used up the head start with which she began. A further call brings another, and
    so a turn in debt, unless that call is expensive or one of hers is in flight.
    """
    eligibility = in_rounds(turn_overdraft=20.0)
    eligibility.add_waiting(request(ADA))
    eligibility.charge(ADA, RULE.head_start)
    if in_flight:
        eligibility.request_dispatched(request(ADA, 2))
    assert eligibility.waiting_priority_class(ADA) is None
    eligibility.add_waiting(request(ADA, 1), cost)
    assert eligibility.waiting_priority_class(ADA) == (None if cost or in_flight else FRESH_AND_SPARSE)


def test_in_rounds_a_client_is_fresh_only_while_nothing_is_in_flight() -> None:
    """In rounds a client with a head start and a call in flight goes after those that have their turn."""
    eligibility = in_rounds()
    eligibility.set_sparse_limit(2)
    eligibility.add_waiting(request(ADA))
    before = eligibility.waiting_priority_class(ADA)
    eligibility.request_dispatched(request(ADA, 1))
    assert (before, eligibility.waiting_priority_class(ADA)) == (FRESH_AND_SPARSE, SPARSE)


def test_when_rounds_begin_clients_with_calls_in_flight_are_no_longer_fresh() -> None:
    """Ada has a head start and a call in flight when Cyd begins to wait, and the rounds begin."""
    seen: list[ClientId] = []
    eligibility = Eligibility(seen.append, RULE, lambda: None, Shares(), rounds_from=1)
    eligibility.set_sparse_limit(2)
    eligibility.add_waiting(request(ADA))
    eligibility.request_dispatched(request(ADA, 1))
    before = eligibility.waiting_priority_class(ADA)
    seen.clear()
    for client in (BOB, CYD):
        eligibility.add_waiting(request(client))
    assert (before, eligibility.waiting_priority_class(ADA)) == (FRESH_AND_SPARSE, SPARSE)
    assert ADA in seen


def test_clients_take_turns_in_rounds_while_many_wait() -> None:
    """Rounds begin when so many clients wait per worker, with all of them, and end when none does."""
    eligibility = Eligibility(lambda _: None, RULE, lambda: None, Shares(), rounds_from=1)
    eligibility.set_sparse_limit(2)
    waits = []
    for client in (ADA, BOB, CYD):
        eligibility.add_waiting(request(client))
        waits.append(0 if eligibility.rounds is None else len(eligibility.rounds))
    for client in (ADA, BOB, CYD):
        eligibility.remove_waiting(request(client))
        waits.append(0 if eligibility.rounds is None else len(eligibility.rounds))
    assert waits == [0, 0, 3, 2, 1, 0]
    assert eligibility.rounds is None


@pytest.mark.parametrize(("sparse_limit", "rounds_from"), [(0, 0), (1, None)])
def test_rounds_need_a_sparse_limit_and_to_be_asked_for(sparse_limit: int, rounds_from: int | None) -> None:
    """Where no client is sparse, none takes turns; and none does so in rounds unless that is asked for."""
    eligibility = Eligibility(lambda _: None, RULE, lambda: None, Shares(), rounds_from=rounds_from)
    eligibility.set_sparse_limit(sparse_limit)
    for client in CLIENTS:
        eligibility.add_waiting(request(client))
    assert eligibility.rounds is None


def test_a_client_with_short_prompts_is_not_admitted() -> None:
    """Of a client in debt whose prompts are short, nothing is evicted while it waits: it has no turn in spite of it."""
    eligibility = in_rounds()
    indebted(eligibility, ADA, 5)  # with a long prompt, which no longer waits
    eligibility.add_waiting(request(ADA, 0, LITTLE_CHUNKS))
    assert eligibility.waiting_priority_class(ADA) is None


@pytest.mark.parametrize("debt", [0.4, 0.6])
@pytest.mark.parametrize("rounds_from", [0, None])
def test_with_short_prompts_a_client_in_debt_goes_once_it_is_overdue(rounds_from: int | None, debt: float) -> None:
    """In rounds a client with as much debt as a turn allows is overdue once each active client could have had a turn,
    although turns of others lead to the next round; otherwise only with a smaller debt.
    """
    rule = replace(RULE, overdraft=0.2)
    eligibility = Eligibility(lambda _: None, rule, lambda: None, Shares(), rounds_from=rounds_from, turn_overdraft=0.5)
    eligibility.set_sparse_limit(1)
    indebted(eligibility, ADA, debt * QUANTUM)
    eligibility.add_waiting(request(ADA, 0, LITTLE_CHUNKS))
    eligibility.add_waiting(request(BOB))
    eligibility.mark_overdue()
    before = eligibility.waiting_priority_class(ADA)
    for number in (1, 2):
        eligibility.request_dispatched(request(CYD, number))
        eligibility.request_ended(request(CYD, number))
    eligibility.mark_overdue()
    expected = OVERDUE if debt < 0.5 and rounds_from is not None else None
    assert (before, eligibility.waiting_priority_class(ADA)) == (None, expected)


def test_a_client_is_admitted_when_a_refill_makes_its_debt_small_enough() -> None:
    """A client that owes too much for a turn need not wait for the next round once a refill has made that less."""
    eligibility = in_rounds()
    indebted(eligibility, ADA, QUANTUM + 5)
    indebted(eligibility, BOB, 5)
    for client in (ADA, BOB):
        eligibility.add_waiting(request(client))
    before = eligibility.waiting_priority_class(ADA)
    assert eligibility.refill() == [BOB]
    assert (before, eligibility.waiting_priority_class(ADA)) == (None, FRESH_AND_SPARSE)


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


@pytest.mark.parametrize(("others_take_turns", "chunks"), [(True, LONG), (False, LONG), (True, LITTLE_CHUNKS)])
def test_a_fresh_client_whose_turn_is_ahead_is_not_overdue(others_take_turns: bool, chunks: int) -> None:
    """A fresh client in debt that has had its turn is overdue only if no turns of others lead to the next round, or it
    has none of that because its prompts are short.
    """
    eligibility = in_rounds()
    for number in (0, 1):
        eligibility.add_waiting(request(ADA, number, chunks))
    eligibility.charge(ADA, QUANTUM + 5)
    serve(eligibility, ADA)
    eligibility.add_waiting(request(BOB), 0.0 if others_take_turns else RULE.head_start)
    for number in range(6):
        eligibility.add_waiting(request(CYD, number), RULE.head_start)
        eligibility.request_dispatched(request(CYD, 100 + number))
        eligibility.request_ended(request(CYD, 100 + number))
    eligibility.mark_overdue()
    assert eligibility.waiting_priority_class(BOB) in ((FRESH_AND_SPARSE,) if others_take_turns else (SPARSE, OVERDUE))
    assert eligibility.waiting_priority_class(ADA) == (None if others_take_turns and chunks == LONG else OVERDUE)


def test_what_is_cached_goes_first_within_a_round() -> None:
    """An earlier round goes first, then a request with little to compute, then the client that waits longest."""
    eligibility = in_rounds()
    for number in (0, 1):
        for client in (ADA, BOB, CYD):
            eligibility.add_waiting(request(client, number))
    serve(eligibility, ADA)
    cached = {ADA: LONG, BOB: LONG - LITTLE_CHUNKS - 1, CYD: LONG - LITTLE_CHUNKS}
    assert sorted(cached, key=lambda each: eligibility.turns.turn(request(each, 1), -cached[each])) == [CYD, BOB, ADA]


def test_clients_that_begin_to_wait_go_before_those_that_always_do() -> None:
    """Within a round a client whose head start was renewed while it waited goes after one that waits later."""
    eligibility = in_rounds()
    for client, number in ((ADA, 0), (ADA, 1), (BOB, 0)):
        eligibility.add_waiting(request(client, number))
    before = eligibility.turns.turn(request(BOB), 0) < eligibility.turns.turn(request(ADA), 0)
    serve(eligibility, ADA)
    eligibility.remove_waiting(request(ADA, 1))
    eligibility.add_waiting(request(ADA, 2))
    serve(eligibility, BOB)
    eligibility.add_waiting(request(BOB, 1))
    assert (before, eligibility.turns.turn(request(ADA), 0) < eligibility.turns.turn(request(BOB), 0)) == (True, True)


@settings(max_examples=50)
@given(steps)
def test_what_is_kept_ends_with_the_wait(steps: list[tuple[str, ClientId]]) -> None:
    """Of clients that no longer wait no round is kept."""
    turns = Turns(bars=True)
    for step in steps:
        turns.play(*step)
    assert len(turns.rounds) == len(turns.waiting)
