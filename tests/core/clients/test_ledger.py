"""The service ledger: charged = served + reserved, and a bill comes to what the engine says."""

from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.clients.ledger import Ledger
from router.core.model.cost import Charge, LinearCost, Tokens
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId

LIMIT = 100
WORKER = WorkerId("w")

counts = st.integers(0, 90)
usages = st.builds(Usage, counts, counts, st.none() | counts)


def request(number: int, client: str = "ada") -> Request:
    return Request(RequestId(f"r{number}"), ClientId(client), "llama", ())


def ledger(limit: int = LIMIT) -> Ledger:
    return Ledger(limit)


class LedgerMachine(RuleBasedStateMachine):
    """Any interleaving of bills, beside a ledger that adds up the charges as they come out."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts = ledger()
        self.arrivals = 0
        self.bills: dict[RequestId, Tokens] = {}
        self.trusted: dict[RequestId, int] = {}
        self.clients: dict[RequestId, ClientId] = {}
        self.closed: dict[ClientId, Tokens] = {}

    def note(self, request: RequestId, charge: Charge) -> None:
        assert charge.before == self.bills.get(request, Tokens())
        assert (charge.client, charge.worker) == (self.clients[request], WORKER)
        self.bills[request] = charge.after

    def close(self, request: RequestId, charge: Charge) -> None:
        self.note(request, charge)
        client = self.clients[request]
        self.closed[client] = self.closed.get(client, Tokens()).plus(self.bills.pop(request))
        del self.trusted[request]

    @rule(client=st.sampled_from(["ada", "bob"]), size=st.integers(1, 90), data=st.data())
    def open(self, client: str, size: int, data: st.DataObject) -> None:
        cached = data.draw(st.integers(0, size - 1))
        self.arrivals += 1
        opened = request(self.arrivals, client)
        self.clients[opened.id] = opened.client
        charge = self.accounts.open(opened, WORKER, size, cached)
        assert charge.after.cached <= cached
        assert charge.after.cached + charge.after.extend == size
        self.trusted[opened.id] = charge.after.cached
        self.note(opened.id, charge)

    @precondition(lambda self: self.bills)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(list(self.bills)))
        assert self.accounts.start(chosen) in (self.bills[chosen], Tokens())

    @precondition(lambda self: self.bills)
    @rule(data=st.data(), output=counts)
    def progress(self, data: st.DataObject, output: int) -> None:
        chosen = data.draw(st.sampled_from(list(self.bills)))
        before = self.bills[chosen].output
        self.accounts.start(chosen)
        self.note(chosen, self.accounts.progress(chosen, output))
        assert self.bills[chosen].output == max(before, output)

    @precondition(lambda self: self.bills)
    @rule(data=st.data(), usage=st.none() | usages)
    def settle(self, data: st.DataObject, usage: Usage | None) -> None:
        chosen = data.draw(st.sampled_from(list(self.bills)))
        self.accounts.start(chosen)
        self.close(chosen, self.accounts.settle(chosen, usage))

    @precondition(lambda self: self.bills)
    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(list(self.bills)))
        self.close(chosen, self.accounts.refund(chosen))

    @invariant()
    def conserved(self) -> None:
        """Each client's account is the sum of its charges, open and closed."""
        self.accounts.check_conservation()
        assert self.accounts.bills.keys() == self.bills.keys()
        for client, account in self.accounts.accounts.items():
            open_bills = [tokens for bill, tokens in self.bills.items() if self.clients[bill] == client]
            assert account.charged == reduce(Tokens.plus, open_bills, self.closed.get(client, Tokens()))
            assert self.accounts.in_flight(client) == len(open_bills)

    @invariant()
    def capped(self) -> None:
        """No client has more predicted-cached tokens in flight uncharged than the limit."""
        for client in set(self.clients.values()):
            assert sum(t for bill, t in self.trusted.items() if self.clients[bill] == client) <= LIMIT


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=30)


@given(opened=counts, output=counts, usage=usages)
def test_a_settled_bill_is_the_engines(opened: int, output: int, usage: Usage) -> None:
    """Whatever was estimated and streamed, the client pays the usage, of which no more is cached than was input."""
    accounts = ledger()
    accounts.open(request(1), WORKER, opened + 1, opened // 2)
    accounts.start(RequestId("r1"))
    accounts.progress(RequestId("r1"), output)
    accounts.settle(RequestId("r1"), usage)
    served = accounts.accounts[ClientId("ada")].served
    assert (served.extend + served.cached, served.output) == (usage.input_tokens, usage.output_tokens)
    if usage.cached_tokens is not None:
        assert served.cached == min(usage.cached_tokens, usage.input_tokens)


def test_without_usage_a_bill_is_what_was_charged() -> None:
    """An engine that says nothing leaves the estimate of the input and the count of the output."""
    accounts = ledger()
    accounts.open(request(1), WORKER, 50, 20)
    accounts.start(RequestId("r1"))
    accounts.progress(RequestId("r1"), 7)
    accounts.settle(RequestId("r1"), None)
    assert accounts.accounts[ClientId("ada")].served == Tokens(30, 20, 7)


def test_input_is_served_when_its_prefill_is_over_and_once_only() -> None:
    """Until the first token the input is reserved; a second start changes nothing."""
    accounts = ledger()
    accounts.open(request(1), WORKER, 50, 20)
    account = accounts.accounts[ClientId("ada")]
    assert (account.reserved, account.served) == (Tokens(30, 20), Tokens())
    assert [accounts.start(RequestId("r1")), accounts.start(RequestId("r1"))] == [Tokens(30, 20), Tokens()]
    assert (account.reserved, account.served) == (Tokens(), Tokens(30, 20))


def test_a_refused_call_costs_nothing() -> None:
    """The whole reservation comes back."""
    accounts = ledger()
    accounts.open(request(1), WORKER, 50, 20)
    assert accounts.refund(RequestId("r1")).at(LinearCost()) == -30
    assert accounts.accounts[ClientId("ada")].charged == Tokens()


def test_beyond_the_limit_a_predicted_match_is_charged() -> None:
    """What would exceed the limit of trust is reserved as extend, and trust returns when a bill is closed."""
    accounts = ledger(limit=100)
    assert accounts.open(request(1), WORKER, 90, 80).after == Tokens(10, 80)
    assert accounts.open(request(2), WORKER, 90, 80).after == Tokens(70, 20)
    assert accounts.open(request(3, "bob"), WORKER, 90, 80).after == Tokens(10, 80)
    accounts.refund(RequestId("r1"))
    assert accounts.open(request(4), WORKER, 90, 80).after == Tokens(10, 80)


def test_bills_without_a_cached_token_are_closed_one_by_one() -> None:
    """Trust that was never given is not missed when the second of two such bills is closed."""
    accounts = ledger()
    for number in (1, 2):
        accounts.open(request(number), WORKER, 50, 0)
    for number in (1, 2):
        accounts.settle(RequestId(f"r{number}"), Usage(50, 1))
    assert not accounts.bills


def test_a_broken_account_is_found() -> None:
    """The check fails when a reservation has no bill, and when less than nothing is served."""
    accounts = ledger()
    accounts.open(request(1), WORKER, 50, 0)
    account = accounts.accounts[ClientId("ada")]
    account.unstarted[RequestId("r2")] = Tokens(50)
    with pytest.raises(AssertionError, match="reserved without a bill"):
        accounts.check_conservation()
    del account.unstarted[RequestId("r2")]
    account.serve(Tokens(1), Tokens())
    with pytest.raises(AssertionError, match="ada"):
        accounts.check_conservation()


@given(before=st.builds(Tokens, counts, counts, counts), after=st.builds(Tokens, counts, counts, counts))
def test_a_charge_is_a_difference_of_prices(before: Tokens, after: Tokens) -> None:
    """At VTC's price cached input costs what other input costs; at the default nothing."""
    charge = Charge(RequestId("r1"), ClientId("ada"), WORKER, before, after)
    extend, output = after.extend - before.extend, after.output - before.output
    assert charge.at(LinearCost()) == extend + 2 * output
    assert charge.at(LinearCost(cached=1.0)) == extend + after.cached - before.cached + 2 * output
