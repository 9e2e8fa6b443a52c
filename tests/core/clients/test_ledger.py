"""In the service ledger, charged = served + reserved, and a settled bill equals the engine's usage."""

from collections.abc import Iterable
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.clients.ledger import Bill, Ledger
from router.core.model.cost import NOTHING, Charge, LinearCost, Tokens
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId
from router.core.model.saved import DailyUsage

LIMIT = 100
WORKER = WorkerId("w")

counts = st.integers(0, 90)
usages = st.builds(Usage, counts, counts, st.none() | counts)


def request(number: int, client: str = "ada") -> Request:
    return Request(RequestId(f"r{number}"), ClientId(client), "llama", ())


def tokens_of(rows: Iterable[DailyUsage]) -> dict[ClientId, Tokens]:
    """Return the tokens of each client that used any, of one day and model."""
    tokens = {
        row.client: Tokens(row.input_tokens - row.cached_tokens, row.cached_tokens, row.output_tokens) for row in rows
    }
    return {client: used for client, used in tokens.items() if used != NOTHING}


def new_ledger(limit: int = LIMIT) -> Ledger:
    return Ledger(limit, LinearCost())


class LedgerMachine(RuleBasedStateMachine):
    """Compares any interleaving of bills with the sum of all charges."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = new_ledger()
        self.arrivals = 0
        self.bills: dict[RequestId, Tokens] = {}
        self.opened: dict[RequestId, Bill] = {}
        self.trusted: dict[RequestId, int] = {}
        self.clients: dict[RequestId, ClientId] = {}
        self.closed: dict[ClientId, Tokens] = {}

    def record(self, request: RequestId, charge: Charge) -> None:
        assert charge.before == self.bills.get(request, Tokens())
        assert (charge.client, charge.worker) == (self.clients[request], WORKER)
        self.bills[request] = charge.after

    def close(self, request: RequestId, charge: Charge) -> None:
        self.record(request, charge)
        client = self.clients[request]
        self.closed[client] = self.closed.get(client, Tokens()).plus(self.bills.pop(request))
        del self.trusted[request]

    @rule(client=st.sampled_from(["ada", "bob"]), size=st.integers(1, 90), data=st.data())
    def open(self, client: str, size: int, data: st.DataObject) -> None:
        cached = data.draw(st.integers(0, size - 1))
        self.arrivals += 1
        opened = request(self.arrivals, client)
        self.clients[opened.id] = opened.client
        bill = self.opened[opened.id] = self.ledger.open(opened, WORKER, size, cached)
        charge = self.ledger.charge_since(bill, NOTHING)
        assert charge.after.cached <= cached
        assert charge.after.cached + charge.after.extend == size
        self.trusted[opened.id] = charge.after.cached
        self.record(opened.id, charge)

    @precondition(lambda self: self.bills)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(list(self.bills)))
        assert self.ledger.start(self.opened[chosen]) in (self.bills[chosen], Tokens())

    @precondition(lambda self: self.bills)
    @rule(data=st.data(), output=counts)
    def progress(self, data: st.DataObject, output: int) -> None:
        chosen = data.draw(st.sampled_from(list(self.bills)))
        before = self.bills[chosen].output
        self.ledger.start(self.opened[chosen])
        self.record(chosen, self.ledger.progress(self.opened[chosen], output))
        assert self.bills[chosen].output == max(before, output)

    @precondition(lambda self: self.bills)
    @rule(data=st.data(), usage=st.none() | usages)
    def settle(self, data: st.DataObject, usage: Usage | None) -> None:
        chosen = data.draw(st.sampled_from(list(self.bills)))
        self.ledger.start(self.opened[chosen])
        self.close(chosen, self.ledger.settle(self.opened[chosen], usage))

    @precondition(lambda self: self.bills)
    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(list(self.bills)))
        self.close(chosen, self.ledger.refund(self.opened[chosen]))

    @invariant()
    def conserved(self) -> None:
        """Each client's account is the sum of its charges, open and closed."""
        self.ledger.check_conservation()
        assert {bill.request for bill in self.ledger.bills} == self.bills.keys()
        for client, account in self.ledger.accounts.items():
            open_bills = [tokens for bill, tokens in self.bills.items() if self.clients[bill] == client]
            assert account.charged == reduce(Tokens.plus, open_bills, self.closed.get(client, Tokens()))
            assert self.ledger.in_flight(client) == len(open_bills)

    @invariant()
    def used(self) -> None:
        """The usage of each client is what was settled, and is saved with all that the client was served."""
        ((_, settled),) = list(self.ledger.usage.days()) or [(0, [])]
        saved = [row for piece in self.ledger.saved_usage() for row in piece.rows]
        served = {client: account.served for client, account in self.ledger.accounts.items()}
        for rows, expected in ((settled, self.closed), (saved, served)):
            assert tokens_of(rows) == {client: tokens for client, tokens in expected.items() if tokens != NOTHING}

    @invariant()
    def capped(self) -> None:
        """No client has more uncharged, predicted cached tokens in flight than the limit."""
        for client in set(self.clients.values()):
            assert sum(t for bill, t in self.trusted.items() if self.clients[bill] == client) <= LIMIT


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=30)


@given(opened=counts, output=counts, usage=usages)
def test_a_settled_bill_equals_the_usage(opened: int, output: int, usage: Usage) -> None:
    """The client pays the usage, whatever was estimated and streamed. Cached tokens never exceed the input."""
    ledger = new_ledger()
    bill = ledger.open(request(1), WORKER, opened + 1, opened // 2)
    ledger.start(bill)
    ledger.progress(bill, output)
    ledger.settle(bill, usage)
    served = ledger.accounts[ClientId("ada")].served
    assert (served.extend + served.cached, served.output) == (usage.input_tokens, usage.output_tokens)
    if usage.cached_tokens is not None:
        assert served.cached == min(usage.cached_tokens, usage.input_tokens)


def test_without_usage_a_bill_is_what_was_charged() -> None:
    """Without usage the bill keeps the estimated input and the counted output."""
    ledger = new_ledger()
    bill = ledger.open(request(1), WORKER, 50, 20)
    ledger.start(bill)
    ledger.progress(bill, 7)
    ledger.settle(bill, None)
    assert ledger.accounts[ClientId("ada")].served == Tokens(30, 20, 7)


def test_input_counts_as_served_once_after_its_prefill() -> None:
    """Until the first token the input is reserved; a second start changes nothing."""
    ledger = new_ledger()
    bill = ledger.open(request(1), WORKER, 50, 20)
    account = ledger.accounts[ClientId("ada")]
    assert (account.reserved, account.served) == (Tokens(30, 20), Tokens())
    assert [ledger.start(bill), ledger.start(bill)] == [Tokens(30, 20), Tokens()]
    assert (account.reserved, account.served) == (Tokens(), Tokens(30, 20))


def test_a_refused_request_costs_nothing() -> None:
    """The whole reservation is refunded."""
    ledger = new_ledger()
    bill = ledger.open(request(1), WORKER, 50, 20)
    assert ledger.refund(bill).cost == -30
    assert ledger.accounts[ClientId("ada")].charged == Tokens()


def test_beyond_the_limit_a_predicted_match_is_charged() -> None:
    """Predicted cached tokens beyond the limit are reserved as extend, and closed bills free the limit again."""
    ledger = new_ledger(limit=100)
    first = ledger.open(request(1), WORKER, 90, 80)
    assert first.tokens == Tokens(10, 80)
    assert ledger.open(request(2), WORKER, 90, 80).tokens == Tokens(70, 20)
    assert ledger.open(request(3, "bob"), WORKER, 90, 80).tokens == Tokens(10, 80)
    ledger.refund(first)
    assert ledger.open(request(4), WORKER, 90, 80).tokens == Tokens(10, 80)


def test_bills_without_a_cached_token_are_closed_one_by_one() -> None:
    """Closing such bills does not reduce the count of trusted tokens."""
    ledger = new_ledger()
    for bill in [ledger.open(request(number), WORKER, 50, 0) for number in (1, 2)]:
        ledger.settle(bill, Usage(50, 1))
    assert not list(ledger.bills)


def test_a_broken_account_is_found() -> None:
    """The check fails for a bill in another account, for trust without a bill and for negative service."""
    ledger = new_ledger()
    strays = new_ledger()
    account, stray = ledger.open(request(1), WORKER, 50, 0).account, strays.open(request(2), WORKER, 50, 0)
    account.bills[stray] = None
    with pytest.raises(AssertionError, match="a bill of another account"):
        ledger.check_conservation()
    del account.bills[stray]
    account.trusted += 1
    with pytest.raises(AssertionError, match="trusted without a bill"):
        ledger.check_conservation()
    account.trusted -= 1
    account.serve(Tokens(1), Tokens())
    with pytest.raises(AssertionError, match="ada"):
        ledger.check_conservation()


def test_a_bill_is_closed_once() -> None:
    """A second end of the same attempt is an error, and not another refund."""
    ledger = new_ledger()
    bill = ledger.open(request(1), WORKER, 50, 20)
    ledger.refund(bill)
    with pytest.raises(KeyError):
        ledger.refund(bill)
    assert ledger.accounts[ClientId("ada")].charged == Tokens()


@given(before=st.builds(Tokens, counts, counts, counts), after=st.builds(Tokens, counts, counts, counts))
def test_the_cost_of_a_charge_is_a_difference(before: Tokens, after: Tokens) -> None:
    """At VTC's cost, cached input costs as much as other input; at the default cost it is free."""
    extend, output = after.extend - before.extend, after.output - before.output
    assert LinearCost().difference(before, after) == extend + 2 * output
    assert LinearCost(cached=1.0).difference(before, after) == extend + after.cached - before.cached + 2 * output
