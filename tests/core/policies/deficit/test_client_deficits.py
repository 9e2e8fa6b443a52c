"""The counters of clients in groups, kept by the group's clock, equal a loop over all counters in every round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request, RequestId
from router.core.policies.deficit.deficits import ClientDeficits
from router.core.policies.deficit.refill_schedule import RefillSchedule

QUANTUM = 100.0
TEAM = GroupId("team")
MEMBERS = [ClientId(name) for name in ("ann", "bob", "cyd")]
ALONE = ClientId("dan")


def request(client: ClientId) -> Request:
    group = None if client == ALONE else TEAM
    return Request(RequestId(client), client, "m", (), weight=2.0 if client == "bob" else 1.0, group=group)


clients = st.sampled_from([*MEMBERS, ALONE])
steps = st.one_of(
    st.tuples(st.just("begin"), clients, st.just(0)),
    st.tuples(st.just("end"), clients, st.just(0)),
    st.tuples(st.just("charge"), clients, st.integers(-50, 3000)),
    st.tuples(st.just("refill"), clients, st.just(0)),
)


debts = st.lists(st.integers(0, 5000), min_size=4, max_size=4)


@given(debts, st.lists(steps, max_size=40))
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
