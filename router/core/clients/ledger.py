"""The service ledger: what each client was charged, and how much of that was served or is only reserved.

A request's bill is opened at dispatch with an estimate (rule "reserve"), grows with every streamed output token, and is
settled with the engine's own usage when the request ends. Every change is returned as a `Charge`, from which each
policy updates its own deficits or counters at its own cost.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

from router.core.model.cost import NOTHING, Charge, Tokens
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId


@dataclass(slots=True)
class Bill:
    """The bill of one dispatched request."""

    client: ClientId
    worker: WorkerId
    tokens: Tokens
    """Tokens charged so far."""
    trusted: int
    """Input tokens that were not charged because they were predicted to be cached."""


@dataclass(slots=True)
class Account:
    """One client's totals over all its requests. Invariant: charged = served + reserved."""

    extend: int = 0
    cached: int = 0
    output: int = 0
    """Together with `extend` and `cached`, the tokens that the client was served."""
    unstarted: dict[RequestId, Tokens] = field(default_factory=dict)
    """Reserved tokens: the input of requests whose prefill is not over."""
    bills: int = 0
    """Number of open bills."""
    trusted: int = 0
    """Input tokens that open bills do not charge because they were predicted to be cached."""

    def serve(self, before: Tokens, after: Tokens) -> None:
        """Add the difference between two bills to what the client was served."""
        self.extend += after.extend - before.extend
        self.cached += after.cached - before.cached
        self.output += after.output - before.output

    @property
    def served(self) -> Tokens:
        """Tokens charged that were served."""
        return Tokens(self.extend, self.cached, self.output)

    @property
    def reserved(self) -> Tokens:
        """Tokens charged that are not served yet."""
        return reduce(Tokens.plus, self.unstarted.values(), NOTHING)

    @property
    def charged(self) -> Tokens:
        """Tokens charged by all bills, including open ones."""
        return self.served.plus(self.reserved)


class Ledger:
    """Bills of the requests in flight, and the account of every client."""

    def __init__(self, cached_in_flight_limit: int) -> None:
        """`cached_in_flight_limit`: tokens per client, see `open`."""
        self._limit = cached_in_flight_limit
        self._bills: dict[RequestId, Bill] = {}
        self._accounts: defaultdict[ClientId, Account] = defaultdict(Account)
        self.forgotten = NOTHING
        """Tokens served to clients whose accounts were closed."""

    @property
    def accounts(self) -> Mapping[ClientId, Account]:
        """Accounts of all clients that were charged and not forgotten since."""
        return self._accounts

    @property
    def bills(self) -> Mapping[RequestId, Bill]:
        """Bills of the requests in flight."""
        return self._bills

    def in_flight(self, client: ClientId) -> int:
        """Return the number of a client's open bills."""
        account = self._accounts.get(client)
        return 0 if account is None else account.bills

    def forget(self, client: ClientId) -> None:
        """Close the account of a client without open bills."""
        account = self._accounts.pop(client, None)
        if account is not None:
            self.forgotten = self.forgotten.plus(account.served)

    def restore(self, client: ClientId, served: Tokens) -> None:
        """Open a client's account with what it was served before a restart."""
        self._accounts[client] = Account(*served)

    def open(self, request: Request, worker: WorkerId, input_tokens: int, cached_tokens: int) -> Charge:
        """Reserve a dispatched request's input.

        Predicted cached tokens are not charged, which is a promise to the client. The debt that a client may run up
        through wrong predictions is bounded: while its predicted cached tokens in flight exceed the limit, further
        input is reserved as if it was not cached, and refunded when the engine's usage shows that it was.
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
        """Count the reserved input as served, because the prefill is over. Returns the tokens that became served."""
        account = self._accounts[self._bills[request].client]
        reserved = account.unstarted.pop(request, NOTHING)
        account.serve(NOTHING, reserved)
        return reserved

    def progress(self, request: RequestId, output_tokens: int) -> Charge:
        """Charge a started request's output up to this cumulative count. A count that decreased changes nothing."""
        bill = self._bills[request]
        before = bill.tokens
        bill.tokens = after = Tokens(before.extend, before.cached, max(before.output, output_tokens))
        self._accounts[bill.client].serve(before, after)
        return Charge(request, bill.client, bill.worker, before, after)

    def settle(
        self, request: RequestId, usage: Usage | None, min_extend: int = 0, *, output: int | None = None
    ) -> Charge:
        """Close a started request's bill with the engine's usage, or without usage with what was charged so far.

        `min_extend`: if the engine does not report cached tokens, at least this many input tokens count as computed,
        or all of them if there are fewer. `output`: output tokens to bill if there is no usage; None for those charged
        so far.
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
        """Close the bill of a request that the engine refused before it accepted it. Nothing is charged."""
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
        """Raise AssertionError unless all reservations belong to open bills and no client was
        served less than nothing.
        """
        for client, account in self._accounts.items():
            for request, tokens in account.unstarted.items():
                bill = self._bills.get(request)
                billed = bill is not None and (bill.client, bill.tokens) == (client, tokens)
                assert billed, f"{client}: reserved without a bill"
            assert min(account.served) >= 0, f"{client}: {account}"
