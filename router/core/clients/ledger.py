"""The service ledger: who was charged what, of which how much is served and how much only reserved.

A request's bill is opened at dispatch with an estimate (rule "reserve"), grows with every output token
that streams, and is settled with the engine's own usage when the request ends. Every change comes out
as a `Charge`, from which each policy keeps its own counters at its own price.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

from router.core.model.cost import NOTHING, Charge, Tokens
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId


@dataclass(slots=True)
class Bill:
    """One dispatched request's running bill."""

    client: ClientId
    worker: WorkerId
    tokens: Tokens
    """Charged so far."""
    trusted: int
    """Input tokens that were not charged because they were predicted to be cached."""


@dataclass(slots=True)
class Account:
    """One client's totals over all its requests: charged = served + reserved, always."""

    extend: int = 0
    cached: int = 0
    output: int = 0
    """What it was served."""
    unstarted: dict[RequestId, Tokens] = field(default_factory=dict)
    """What is only reserved: the input of requests whose prefill is not over."""
    bills: int = 0
    """How many are open."""
    trusted: int = 0
    """Input tokens that these do not charge because they were predicted to be cached."""

    def serve(self, before: Tokens, after: Tokens) -> None:
        """It was served what lies between these two."""
        self.extend += after.extend - before.extend
        self.cached += after.cached - before.cached
        self.output += after.output - before.output

    @property
    def served(self) -> Tokens:
        """What of the charges is no reservation."""
        return Tokens(self.extend, self.cached, self.output)

    @property
    def reserved(self) -> Tokens:
        """What of the charges is not served."""
        return reduce(Tokens.plus, self.unstarted.values(), NOTHING)

    @property
    def charged(self) -> Tokens:
        """What its bills came to, open ones included."""
        return self.served.plus(self.reserved)


class Ledger:
    """Bills of the requests in flight and the account of every client."""

    def __init__(self, cached_in_flight_limit: int) -> None:
        """`cached_in_flight_limit`: see `open`; in tokens per client."""
        self._limit = cached_in_flight_limit
        self._bills: dict[RequestId, Bill] = {}
        self._accounts: defaultdict[ClientId, Account] = defaultdict(Account)
        self.forgotten = NOTHING
        """What clients were served whose accounts are no more."""

    @property
    def accounts(self) -> Mapping[ClientId, Account]:
        """Every client that was charged, and was not forgotten since."""
        return self._accounts

    @property
    def bills(self) -> Mapping[RequestId, Bill]:
        """The requests in flight."""
        return self._bills

    def in_flight(self, client: ClientId) -> int:
        """How many open bills a client has."""
        account = self._accounts.get(client)
        return 0 if account is None else account.bills

    def forget(self, client: ClientId) -> None:
        """Close the account of a client that has no open bill."""
        account = self._accounts.pop(client, None)
        if account is not None:
            self.forgotten = self.forgotten.plus(account.served)

    def restore(self, client: ClientId, served: Tokens) -> None:
        """Begin a client's account at what it was served before a restart."""
        self._accounts[client] = Account(*served)

    def open(self, request: Request, worker: WorkerId, input_tokens: int, cached_tokens: int) -> Charge:
        """Reserve a dispatched request's input.

        A prediction of cached tokens is a promise not to charge for them. What a client may owe through
        wrong predictions is bounded: above the limit of predicted-cached tokens in flight, its input is
        reserved as if it were not cached, and given back when the engine's usage shows that it was.
        """
        client = request.client
        account = self._accounts[client]
        trusted = min(cached_tokens, max(0, self._limit - account.trusted))
        tokens = Tokens(input_tokens - trusted, trusted, 0)
        self._bills[request.id] = Bill(client, worker, tokens, trusted)
        account.bills += 1
        account.trusted += trusted
        account.unstarted[request.id] = tokens
        return Charge(request.id, client, worker, NOTHING, tokens)

    def start(self, request: RequestId) -> Tokens:
        """Count the reserved input as served: the prefill is over. Returns what became served."""
        account = self._accounts[self._bills[request].client]
        reserved = account.unstarted.pop(request, NOTHING)
        account.serve(NOTHING, reserved)
        return reserved

    def progress(self, request: RequestId, output_tokens: int) -> Charge:
        """Charge a started request's output up to this cumulative count; a count that fell stays as it was."""
        bill = self._bills[request]
        before = bill.tokens
        bill.tokens = after = Tokens(before.extend, before.cached, max(before.output, output_tokens))
        self._accounts[bill.client].serve(before, after)
        return Charge(request, bill.client, bill.worker, before, after)

    def settle(
        self, request: RequestId, usage: Usage | None, min_extend: int = 0, *, output: int | None = None
    ) -> Charge:
        """Close a started request's bill at what the engine says; without its word, at what was charged so far.

        `min_extend`: where the engine does not say how much of the input was cached, at least so much of it is taken
        for computed, as far as there is so much. `output`: in tokens, without its word; None: what was charged so far.
        """
        after = self._bills[request].tokens
        if usage is None:
            usage = Usage(after.extend + after.cached, after.output if output is None else output)
        cached = usage.cached_tokens
        if cached is None:
            cached = min(after.cached, max(0, usage.input_tokens - min_extend))
        cached = min(cached, usage.input_tokens)
        return self._close(request, Tokens(usage.input_tokens - cached, cached, usage.output_tokens))

    def refund(self, request: RequestId) -> Charge:
        """Close the bill of a call that the engine refused before it accepted it: nothing is owed."""
        return self._close(request, NOTHING)

    def _close(self, request: RequestId, after: Tokens) -> Charge:
        bill = self._bills.pop(request)
        account = self._accounts[bill.client]
        account.bills -= 1
        account.trusted -= bill.trusted
        served = bill.tokens if account.unstarted.pop(request, None) is None else NOTHING
        account.serve(served, after)
        return Charge(request, bill.client, bill.worker, bill.tokens, after)

    def check_conservation(self) -> None:
        """Raise AssertionError unless what is reserved is that of open bills, and none was served less than nothing."""
        for client, account in self._accounts.items():
            for request, tokens in account.unstarted.items():
                bill = self._bills.get(request)
                billed = bill is not None and (bill.client, bill.tokens) == (client, tokens)
                assert billed, f"{client}: reserved without a bill"
            assert min(account.served) >= 0, f"{client}: {account}"
