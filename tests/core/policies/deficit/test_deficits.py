"""The closed form of a refill equals the loop that it replaces, for clients in groups, too, and D²LPM's counters start
and grow as Algorithm 2 demands.
"""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request, RequestId, WorkerId
from router.core.policies.deficit.deficits import ClientDeficits, DeficitTable, WorkerDeficits
from router.core.policies.deficit.refills import RefillSchedule

deficits_and_quanta = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(-5000, 300), st.integers(1, 400)), min_size=1
)


def table_of(counters: dict[str, tuple[int, int]]) -> DeficitTable[str]:
    table: DeficitTable[str] = DeficitTable()
    for key, (deficit, quantum) in counters.items():
        table.join(key, quantum, deficit)
    return table


def refill_by_looping(counters: Mapping[str, tuple[float, int]], contenders: list[str]) -> tuple[int, dict[str, float]]:
    """Run CHECKREFILL as a loop: while no contender is positive, add a quantum to every counter, up to one quantum."""
    deficit = {key: float(deficit) for key, (deficit, _) in counters.items()}
    rounds = 0
    while all(deficit[key] <= 0 for key in contenders):
        rounds += 1
        for key, (_, quantum) in counters.items():
            deficit[key] = max(deficit[key], min(deficit[key] + quantum, quantum))
    return rounds, deficit


@given(counters=deficits_and_quanta, data=st.data())
def test_the_closed_form_equals_the_loop(counters: dict[str, tuple[int, int]], data: st.DataObject) -> None:
    """One refill gives each counter, contender or not, what adding one quantum at a time gives."""
    contenders = data.draw(st.lists(st.sampled_from(sorted(counters)), min_size=1, unique=True))
    table = table_of(counters)
    rounds = table.refill(contenders)
    assert (rounds, {key: table.deficit(key) for key in table}) == refill_by_looping(counters, contenders)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["join", "charge", "refill", "begin"]),
            st.sampled_from("abc"),
            st.integers(-300, 500),
        ),
        max_size=30,
    )
)
def test_counters_are_plain_numbers_through_any_history(steps: list[tuple[str, str, int]]) -> None:
    """Joins, charges, refills and resets in any order do what they would do to a dictionary of numbers."""
    table: DeficitTable[str] = DeficitTable()
    naive: dict[str, tuple[float, int]] = {}
    for step, key, amount in steps:
        match step:
            case "join":
                table.join(key, quantum=abs(amount) + 1, deficit=amount)
                naive[key] = naive[key][0] if key in naive else amount, abs(amount) + 1
            case "charge":
                table.charge(key, amount)
                naive.update({each: (naive[each][0] - amount, naive[each][1]) for each in naive if each == key})
            case "refill" if key in naive:
                table.refill([key])
                _, deficit = refill_by_looping(naive, [key])
                naive = {each: (deficit[each], quantum) for each, (_, quantum) in naive.items()}
            case "begin":
                table.epoch += 1
                naive = {each: (quantum, quantum) for each, (_, quantum) in naive.items()}
        assert {each: table.deficit(each) for each in table} == {each: deficit for each, (deficit, _) in naive.items()}


@given(
    debt=st.floats(0, 1e9), quantum=st.floats(1e-3, 1e6), bystander=st.floats(-1e9, 1e9), weight=st.floats(1e-2, 100)
)
def test_a_refill_makes_its_contender_positive_despite_rounding(
    debt: float, quantum: float, bystander: float, weight: float
) -> None:
    """For any fractions, a refill makes its contender positive, and no counter exceeds one quantum."""
    table: DeficitTable[str] = DeficitTable()
    table.join("contender", quantum, -debt)
    table.join("bystander", quantum * weight, bystander)
    table.refill(["contender"])
    assert 0 < table.deficit("contender") <= quantum * (1 + 1e-6) + debt * 1e-12
    assert table.deficit("bystander") <= max(bystander, quantum * weight * (1 + 1e-6) + abs(bystander) * 1e-12)


def test_nothing_is_refilled_while_a_contender_is_positive() -> None:
    """All waiting clients use up their deficits before a refill, since otherwise deficits bound nothing."""
    table = table_of({"positive": (1, 100), "in debt": (-50, 100), "absent": (-70, 100)})
    assert table.refill(["positive", "in debt"]) == 0
    assert table.refill([]) == 0
    assert [table.deficit(key) for key in table] == [1, -50, -70]


def test_debts_shrink_in_absence() -> None:
    """A client that does not wait is refilled with the others, up to one quantum and no further."""
    table = table_of({"waits": (-250, 100), "small debt": (-20, 100), "large debt": (-900, 100)})
    assert table.refill(["waits"]) == 3
    assert [table.deficit(key) for key in table] == [50, 100, -600]


def test_a_positive_counter_is_topped_up_to_one_quantum() -> None:
    """Without that, a client that uses half of its share would run out in the middle of every second round."""
    table = table_of({"waits": (-20, 100), "used half": (50, 100), "was given more": (300, 100)})
    table.refill(["waits"])
    assert [table.deficit(key) for key in table] == [80, 100, 300]


@pytest.mark.parametrize("debt", [10**9, 10**12])
def test_a_deep_debt_takes_one_step(debt: int) -> None:
    """Rounds are counted and not run, however deep a debt is."""
    table = table_of({"debtor": (-debt, 1)})
    assert table.refill(["debtor"]) == debt + 1
    assert table.deficit("debtor") == 1


def test_joining_again_keeps_the_deficit_and_takes_the_quantum() -> None:
    """A client cannot shed debt by joining again; a new weight counts from the next refill."""
    table = table_of({"a": (-10, 100)})
    table.join("a", 7, deficit=100)
    assert table.deficit("a") == -10
    table.refill(["a"])
    assert table.deficit("a") == 4


def test_a_reset_makes_all_counters_one_quantum() -> None:
    """A reset leaves neither debt nor surplus from before, and refills continue from there."""
    table = table_of({"debtor": (-10, 100), "creditor": (60, 100), "heavy": (-900, 300)})
    table.epoch += 1
    assert [table.deficit(key) for key in table] == [100, 100, 300]
    table.charge("debtor", 250)
    table.refill(["debtor"])
    assert [table.deficit(key) for key in table] == [50, 100, 300]


def test_a_key_that_never_joined_has_no_counter() -> None:
    """Such a key has the deficit 0, a charge to it is ignored, and it affects no other key."""
    table = table_of({"b": (-5, 100)})
    table.charge("a", 5)
    assert ("a" in table, table.deficit("a"), list(table)) == (False, 0.0, ["b"])


def test_forgotten_keys_without_debt_are_dropped() -> None:
    """A deficit below the quantum stays in the table and is found by its key again."""
    table: DeficitTable[str] = DeficitTable(debtors=10)
    for key, cost in (("even", 0.0), ("less", 1.0), ("debt", 500.0)):
        table.join(key, 100.0, 100.0)
        table.charge(key, cost)
        table.forget(key)
    assert list(table) == ["less", "debt"]
    table.join("debt", 100.0, 100.0)
    assert table.deficit("debt") == -400.0
    table.epoch += 1
    table.forget("debt")
    assert list(table) == []


# Clients, in groups or alone


QUANTUM = 100.0
TEAM = GroupId("team")
MEMBERS = [ClientId(name) for name in ("ann", "bob", "cyd")]
ALONE = ClientId("dan")


def request(client: ClientId) -> Request:
    group = None if client == ALONE else TEAM
    return Request(RequestId(client), client, "m", (), weight=2.0 if client == "bob" else 1.0, group=group)


clients = st.sampled_from([*MEMBERS, ALONE])
steps_of_clients = st.one_of(
    st.tuples(st.just("begin"), clients, st.just(0)),
    st.tuples(st.just("end"), clients, st.just(0)),
    st.tuples(st.just("charge"), clients, st.integers(-50, 3000)),
    st.tuples(st.just("refill"), clients, st.just(0)),
)
debts = st.lists(st.integers(0, 5000), min_size=4, max_size=4)


@given(debts, st.lists(steps_of_clients, max_size=40))
def test_the_groups_clock_equals_a_loop(debts: list[int], steps: list[tuple[str, ClientId, int]]) -> None:
    """No counter is ever a quantum away from that of the loop, however weights change meanwhile."""
    shares = Shares()
    table, expected, active = ClientDeficits(shares), dict[ClientId, float](), list[ClientId]()
    for client, debt in zip((*MEMBERS, ALONE), debts, strict=True):
        shares.add_request(request(client))
        active.append(client)
        table.register(request(client), QUANTUM, active=True)
        expected[client] = QUANTUM * shares.effective_weight(request(client)) - debt
        table.charge(client, debt)
    for what, client, cost in steps:
        if what == "begin":
            shares.add_request(request(client))
            active.append(client)
        elif what == "end" and client in active:
            shares.remove_request(client)
            active.remove(client)
        elif what == "charge":
            table.charge(client, cost)
            expected[client] -= cost
        elif what == "refill":
            before = table.rounds
            table.refill_for(client)
            for _ in range(round(table.rounds - before)):
                for each, deficit in expected.items():
                    quantum = QUANTUM * shares.effective_weight(request(each))
                    expected[each] = max(deficit, min(deficit + quantum, quantum))
        for each, deficit in expected.items():
            assert table.deficit(each) == pytest.approx(deficit, abs=2 * QUANTUM + 1e-6)


@given(st.lists(st.tuples(st.sampled_from(MEMBERS), st.integers(1, 900)), min_size=1, max_size=20), st.data())
def test_the_earliest_scheduled_client_needs_the_fewest_rounds(
    charges: list[tuple[ClientId, int]], data: st.DataObject
) -> None:
    """The schedule stays right even if the weights of a group change after its members were scheduled."""
    shares = Shares()
    table = ClientDeficits(shares)
    schedule = RefillSchedule(table, lambda client: table.deficit(client) <= 0)
    for client in (*MEMBERS, ALONE):
        shares.add_request(request(client))
        table.register(request(client), QUANTUM, active=True)
        table.charge(client, 100)
    for client, cost in charges:
        table.charge(client, cost)
    for client in (*MEMBERS, ALONE):
        schedule.schedule(client, [], most=1000)
    for client in data.draw(st.lists(st.sampled_from(MEMBERS), max_size=2, unique=True)):
        shares.remove_request(client)
    first = schedule.earliest(lambda _: True)
    rounds = {client: table.rounds_to_positive(client) for client in (*MEMBERS, ALONE)}
    assert first is not None
    assert rounds[first] == min(rounds.values())


def test_a_member_that_becomes_active_has_at_most_its_share_of_the_group() -> None:
    """The member gets no more, new or known, because what the others have used is used."""
    shares = Shares()
    table = ClientDeficits(shares)
    for client in MEMBERS:
        shares.add_request(request(client))
        table.register(request(client), QUANTUM, active=False)
    table.charge(MEMBERS[0], 500)
    held = table.deficit(MEMBERS[1])
    table.register(request(MEMBERS[1]), QUANTUM, active=True)
    assert table.deficit(MEMBERS[1]) == held > 0
    table.register(request(MEMBERS[1]), QUANTUM, active=False)
    assert table.deficit(MEMBERS[1]) == pytest.approx(-200.0)  # half of the group's -400
    new = Request(RequestId("eve"), ClientId("eve"), "m", (), group=TEAM)
    shares.add_request(new)
    table.register(new, QUANTUM, active=False)
    assert table.deficit(new.client) == pytest.approx(-80.0)  # a fifth of it


def test_a_client_may_move_to_another_group() -> None:
    """The client keeps its deficit, and from then on the other group's clock counts."""
    shares = Shares()
    table = ClientDeficits(shares)
    ann = request(MEMBERS[0])
    shares.add_request(ann)
    table.register(ann, QUANTUM, active=False)
    table.charge(ann.client, 350)
    alone = Request(RequestId("x"), ann.client, "m", ())
    shares.add_request(alone)
    assert table.register(alone, QUANTUM, active=True)
    assert table.deficit(ann.client) == -250.0
    table.refill_for(ann.client)
    assert (table.deficit(ann.client), table.rounds) == (50.0, 3)


# Workers of one client


ADA = ClientId("ada")
W1, W2, W3 = (WorkerId(name) for name in ("w1", "w2", "w3"))


def request_of_ada(weight: float = 1.0) -> Request:
    return Request(RequestId("r"), ADA, "llama", (), weight=weight)


def test_some_deficit_of_a_client_is_always_positive() -> None:
    """When all of a client's deficits are used up, quanta are added until one is positive (Algorithm 2, the loop of
    SELECTWORKER).
    """
    worker_deficits = WorkerDeficits(100.0, lambda _: 1.0, Shares())
    table = worker_deficits.refilled_table(request_of_ada(), [W1, W2])
    assert [table.deficit(w) for w in (W1, W2)] == [100, 100]
    worker_deficits.charge(ADA, W1, 150)
    worker_deficits.charge(ADA, W2, 420)
    table = worker_deficits.refilled_table(request_of_ada(), [W1, W2])
    assert [table.deficit(w) for w in (W1, W2)] == [50, -220]


def test_a_new_worker_starts_with_the_highest_deficit() -> None:
    """A new worker gets a client's highest deficit, or it would get no requests until every other
    deficit is used up.
    """
    worker_deficits = WorkerDeficits(100.0, lambda _: 1.0, Shares())
    worker_deficits.refilled_table(request_of_ada(), [W1, W2])
    worker_deficits.charge(ADA, W1, 30)
    worker_deficits.charge(ADA, W2, 60)
    assert worker_deficits.refilled_table(request_of_ada(), [W1, W2, W3]).deficit(W3) == 70


def test_a_quantum_scales_with_weight_and_speed() -> None:
    """A worker half as fast holds a client for the same time, and so for half the cost."""
    speeds = {W1: 1.5, W2: 0.5}
    table = WorkerDeficits(100.0, speeds.__getitem__, Shares()).refilled_table(request_of_ada(weight=2.0), [W1, W2])
    assert [table.deficit(w) for w in (W1, W2)] == [300, 100]


def test_a_worker_that_a_client_was_never_placed_among_has_no_counter() -> None:
    """A charge creates no counter for a worker that the client was never placed among."""
    worker_deficits = WorkerDeficits(100.0, lambda _: 1.0, Shares())
    worker_deficits.charge(ADA, W1, 5)
    assert worker_deficits.deficit(ADA, W1) is None
    assert worker_deficits.deficit(ClientId("bob"), W1) is None
