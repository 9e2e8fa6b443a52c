"""Usage by day: what is settled counts on its day, old days are dropped, and no token leaves the others unseen."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.ledger import Ledger
from router.core.clients.usage_days import OTHERS, UsageDays
from router.core.model.cost import LinearCost, Tokens
from router.core.model.events import ChargedRequest
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId
from router.core.model.saved import DailyUsage, UsageRows

DAY = 20_000
ANN, BOB = ClientId("ann"), ClientId("bob")
WORKER = WorkerId("w")

used = st.builds(
    DailyUsage,
    st.integers(DAY, DAY + 3),
    st.sampled_from([ClientId(name) for name in "abcdefgh"]),
    st.sampled_from(["llama", "qwen"]),
    *[st.integers(0, 9)] * 6,
)


def usage(client: str = "ann", day: int = DAY, model: str = "llama", tokens: int = 1) -> DailyUsage:
    return DailyUsage(day, ClientId(client), model, 1, tokens)


def is_named(client: ClientId) -> bool:
    return client < "d"


def rows(days: UsageDays) -> list[DailyUsage]:
    return [row for _, of_day in days.days() for row in of_day]


def totals(found: Iterable[DailyUsage]) -> tuple[int, ...]:
    """Return the sum of each count over these rows."""
    return tuple(map(sum, zip(DailyUsage(0, OTHERS, "").counts, *[row.counts for row in found], strict=True)))


def ledger_of(day: int) -> Ledger:
    ledger = Ledger(1000, LinearCost())
    ledger.usage.begin_day(day)
    return ledger


def request(name: str, client: ClientId = ANN) -> Request:
    return Request(RequestId(name), client, "llama", ())


def test_a_bill_counts_on_the_day_on_which_it_is_settled() -> None:
    """A call over midnight belongs to the later day, as a whole, and a past day does not change any more."""
    ledger = ledger_of(DAY)
    bill = ledger.open(request("a"), WORKER, 50, 20)
    ledger.start(bill)
    ledger.progress(bill, 3)
    ledger.usage.begin_day(DAY + 1)
    ledger.settle(bill, Usage(60, 7, 10))
    assert rows(ledger.usage) == [DailyUsage(DAY + 1, ANN, "llama", 1, 60, 10, 7)]


def test_what_the_engine_does_not_say_counts_as_estimated() -> None:
    """Without usage all tokens are estimates; without the cached tokens, those of the input."""
    ledger = ledger_of(DAY)
    for name, said in (("a", Usage(60, 7, 10)), ("b", Usage(60, 7)), ("c", None)):
        bill = ledger.open(request(name), WORKER, 50, 20)
        ledger.start(bill)
        ledger.progress(bill, 3)
        ledger.settle(bill, said)
    assert rows(ledger.usage) == [DailyUsage(DAY, ANN, "llama", 3, 170, 50, 17, 110, 3)]


def test_a_refused_call_is_no_usage() -> None:
    """A worker that did not accept a call leaves no row, and its retry counts as one call."""
    ledger = ledger_of(DAY)
    ledger.refund(ledger.open(request("a"), WORKER, 50, 20))
    assert not rows(ledger.usage)
    for pays_prompt in (True, False):
        bill = ledger.open(request("a"), WORKER, 50 * pays_prompt, 0, pays_prompt=pays_prompt)
        ledger.settle(bill, Usage(50 * pays_prompt, 2, 0))
    assert rows(ledger.usage) == [DailyUsage(DAY, ANN, "llama", 1, 50, 0, 4)]


def test_days_that_are_too_old_are_dropped() -> None:
    """The present day and those before it are kept, as many as are set, even if the router slept over some."""
    days = UsageDays(keep=2)
    for day in (DAY, DAY + 1, DAY + 2):
        days.begin_day(day)
        days.add(usage(day=day))
    assert [row.day for row in rows(days)] == [DAY + 1, DAY + 2]
    days.begin_day(DAY + 9)
    assert not rows(days)


def test_a_client_finds_only_its_own_rows() -> None:
    """They come in order of days, over all its models."""
    days = UsageDays()
    for row in (usage(day=DAY + 1), usage("bob"), usage(model="qwen"), usage()):
        days.add(row)
    assert [row[:3] for row in days.rows_of(ANN)] == [
        (DAY, ANN, "llama"),
        (DAY, ANN, "qwen"),
        (DAY + 1, ANN, "llama"),
    ]
    assert not days.rows_of(ClientId("cy"))


def test_the_rows_used_least_recently_are_folded_first() -> None:
    """Beyond the limit, they go from the oldest day to the row of all others; named clients keep theirs."""
    days = UsageDays(most_unnamed=2, named=is_named)
    for name in ("x", "y", "ann", "x", "z", "bob"):
        days.add(usage(name))
    assert {row.client: row.calls for row in rows(days)} == {"ann": 1, "bob": 1, "x": 2, "z": 1, OTHERS: 1}
    days.add(usage("x", day=DAY + 1))
    assert {(row.day, row.client): row.calls for row in rows(days)} == {
        (DAY, "ann"): 1,
        (DAY, "bob"): 1,
        (DAY, "z"): 1,
        (DAY, OTHERS): 3,
        (DAY + 1, "x"): 1,
    }


@given(history=st.lists(used, max_size=40), limit=st.integers(1, 6))
def test_nothing_is_lost_and_the_memory_is_bounded(history: list[DailyUsage], limit: int) -> None:
    """The sums of each day and model stay what was added, and unnamed clients have no more rows than the limit."""
    days = UsageDays(most_unnamed=limit, named=is_named)
    for row in history:
        days.add(row)
    assert len([row for row in rows(days) if row.client != OTHERS and not is_named(row.client)]) <= limit
    for day, model in {row[0:3:2] for row in history}:
        assert totals(row for row in rows(days) if (row.day, row.model) == (day, model)) == totals(
            row for row in history if (row.day, row.model) == (day, model)
        )


@given(history=st.lists(used, max_size=40), later=st.lists(used, max_size=5))
def test_what_is_saved_is_restored(history: list[DailyUsage], later: list[DailyUsage]) -> None:
    """Saved rows are those of now, also after an earlier save, and another run has them all."""
    days = UsageDays(most_unnamed=5, named=is_named)
    for row in history:
        days.add(row)
    days.saved([])
    for row in later:
        days.add(row)
    copy = UsageDays(most_unnamed=5, named=is_named)
    for row in [row for piece in days.saved([]) for row in piece.rows]:
        copy.add(row)
    assert sorted(rows(copy)) == sorted(rows(days))


def test_the_pieces_of_past_days_stay_the_same() -> None:
    """So that the state file need not encode them at each save."""
    days = UsageDays()
    days.add(usage())
    days.begin_day(DAY + 1)
    days.add(usage(day=DAY + 1))
    first = days.saved([])
    days.add(usage(day=DAY + 1))
    second = days.saved([])
    assert second[0] is first[0]
    assert second[1] != first[1]


def test_what_an_open_bill_charges_is_saved_and_taken_back() -> None:
    """A restart without the call keeps what it was charged so far; if the call goes on, it is counted once."""
    ledger = ledger_of(DAY)
    bill = ledger.open(request("a"), WORKER, 50, 20)
    waiting = ledger.open(request("b", BOB), WORKER, 50, 20)
    ledger.start(bill)
    ledger.progress(bill, 3)
    (saved,) = ledger.saved_usage()
    assert saved == UsageRows((DailyUsage(DAY, ANN, "llama", 1, 50, 20, 3, 50, 3),))
    assert not rows(ledger.usage)
    assert not waiting.started
    other = ledger_of(DAY + 1)
    for row in saved.rows:
        other.usage.add(row)
    charged = ChargedRequest(RequestId("a"), ANN, WORKER, Tokens(30, 20, 3), started=True, earlier=None, day=DAY)
    other.take_back(charged, "llama")
    assert not rows(other.usage)


def test_what_was_folded_is_taken_back_from_the_others() -> None:
    """Usage of a client that has lost its row is in the row of all others."""
    days = UsageDays(most_unnamed=1)
    for name in ("x", "y"):
        days.add(usage(name, tokens=5))
    days.take_back(usage("x", tokens=2)._replace(calls=0))
    assert rows(days) == [usage("y", tokens=5), usage(OTHERS, tokens=3)]


def test_what_is_taken_back_leaves_no_more_cached_tokens_than_input() -> None:
    """Also where it was folded and its client has a new row since; else an amount could be negative."""
    days = UsageDays(most_unnamed=1)
    before = DailyUsage(DAY, ANN, "llama", 1, input_tokens=60, cached_tokens=10, estimated_input=10)
    for each in (before, usage("bob"), DailyUsage(DAY, ANN, "llama", 1, 100, cached_tokens=90, estimated_input=100)):
        days.add(each)
    days.take_back(before)
    assert days.rows_of(ANN) == [DailyUsage(DAY, ANN, "llama", 0, 40, cached_tokens=40, estimated_input=40)]
