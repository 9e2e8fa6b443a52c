"""The service ledger: what each client was charged, and how much of that was served or is only reserved.

A request's bill is opened at dispatch with an estimate (rule "reserve"), grows with every streamed output token, and is
settled with the engine's own usage when the request ends. Every change is returned as a `Charge` with its cost, from
which each policy updates its own deficits or counters. What is settled also counts as usage of the day.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

from router.core.clients.usage_days import UsageDays
from router.core.model.cost import NOTHING, Charge, LinearCost, Tokens
from router.core.model.events import ChargedRequest
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId
from router.core.model.saved import DailyUsage, UsageRows


class Bill:
    """The bill of one attempt: of a request at one worker."""

    __slots__ = (
        "account",
        "client",
        "cost",
        "model",
        "pays_prompt",
        "request",
        "started",
        "tokens",
        "trusted",
        "worker",
    )

    def __init__(
        self,
        account: "Account",
        request: RequestId,
        client: ClientId,
        worker: WorkerId,
        model: str,
        pays_prompt: bool,
        tokens: Tokens,
        trusted: int,
        cost: float,
    ) -> None:
        self.account = account
        self.request = request
        self.client = client
        self.worker = worker
        self.model = model
        self.pays_prompt = pays_prompt
        """Whether it charges for the prompt, which one bill of a request does."""
        self.tokens = tokens
        """Tokens charged so far."""
        self.trusted = trusted
        """Input tokens that were not charged because they were predicted to be cached."""
        self.cost = cost
        """The cost of these tokens, in cost units."""
        self.started = False
        """Whether the prefill is over. Before that, the tokens are only reserved."""

    def usage_on(self, day: int, estimated: Tokens) -> DailyUsage:
        """Return the usage for which the bill charges, on a day. `estimated`: which of its tokens are estimates."""
        return daily_usage(day, self.client, self.model, self.tokens, estimated, pays_prompt=self.pays_prompt)


@dataclass(slots=True)
class Account:
    """One client's totals over all its requests. Invariant: charged = served + reserved."""

    extend: int = 0
    cached: int = 0
    output: int = 0
    """Together with `extend` and `cached`, the tokens that the client was served."""
    bills: dict[Bill, None] = field(default_factory=dict)
    """The open bills, in order of dispatch."""
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
        """Tokens charged that are not served yet: the input of requests whose prefill is not over."""
        return reduce(Tokens.plus, [bill.tokens for bill in self.bills if not bill.started], NOTHING)

    @property
    def charged(self) -> Tokens:
        """Tokens charged by all bills, including open ones."""
        return self.served.plus(self.reserved)


class Ledger:
    """The account of every client, with the bills of its requests in flight."""

    def __init__(self, cached_in_flight_limit: int, cost: LinearCost, usage: UsageDays | None = None) -> None:
        """`cached_in_flight_limit`: tokens per client, see `open`; `cost`: of each `Charge`; `usage`: counts what is
        settled.
        """
        self._limit = cached_in_flight_limit
        self._extend, self._cached, self._output = cost.extend, cost.cached, cost.output
        self.usage: Final = UsageDays() if usage is None else usage
        self._accounts: defaultdict[ClientId, Account] = defaultdict(Account)
        self.forgotten = NOTHING
        """Tokens served to clients whose accounts were closed."""

    @property
    def accounts(self) -> Mapping[ClientId, Account]:
        """Accounts of all clients that were charged and not forgotten since."""
        return self._accounts

    @property
    def bills(self) -> Iterator[Bill]:
        """All open bills, client by client."""
        return (bill for account in self._accounts.values() for bill in account.bills)

    def in_flight(self, client: ClientId) -> int:
        """Return the number of a client's open bills."""
        account = self._accounts.get(client)
        return 0 if account is None else len(account.bills)

    def forget(self, client: ClientId) -> None:
        """Close the account of a client without open bills."""
        account = self._accounts.pop(client, None)
        if account is not None:
            self.forgotten = self.forgotten.plus(account.served)

    def restore(self, client: ClientId, served: Tokens) -> None:
        """Open a client's account with what it was served before a restart."""
        self._accounts[client] = Account(*served)

    def take_back(self, charged: ChargedRequest, model: str) -> None:
        """Subtract restored service and usage that will be charged again, as far as they are still there."""
        served, client = charged.charged, charged.client
        if (account := self._accounts.get(client)) is not None:
            account.serve(Tokens(*map(min, served, account.served)), NOTHING)
        self.usage.take_back(daily_usage(charged.day, client, model, served, served, pays_prompt=charged.pays_prompt))

    def saved_usage(self) -> list[UsageRows]:
        """Return the rows of the state file about usage. They include what started bills charge so far, as the saved
        accounts do.
        """
        return self.usage.saved([bill.usage_on(self.usage.day, bill.tokens) for bill in self.bills if bill.started])

    def open(
        self, request: Request, worker: WorkerId, input_tokens: int, cached_tokens: int, *, pays_prompt: bool = True
    ) -> Bill:
        """Reserve a dispatched request's input. Returns the bill; its first charge is `charge_since(bill, NOTHING)`.

        Predicted cached tokens are not charged, which is a promise to the client. The debt that a client may run up
        through wrong predictions is bounded: while its predicted cached tokens in flight exceed the limit, further
        input is reserved as if it was not cached, and refunded when the engine's usage shows that it was.

        `pays_prompt`: as in `Bill`; if not, nothing is reserved.
        """
        account = self._accounts[request.client]
        if not pays_prompt:
            input_tokens = cached_tokens = 0
        trusted = min(cached_tokens, max(0, self._limit - account.trusted))
        tokens = Tokens(input_tokens - trusted, trusted, 0)
        cost = self._price(tokens)
        bill = Bill(account, request.id, request.client, worker, request.model, pays_prompt, tokens, trusted, cost)
        account.bills[bill] = None
        account.trusted += trusted
        return bill

    def start(self, bill: Bill) -> Tokens:
        """Count the reserved input as served, because the prefill is over. Returns the tokens that became served."""
        if bill.started:
            return NOTHING
        bill.started = True
        bill.account.serve(NOTHING, bill.tokens)
        return bill.tokens

    def progress(self, bill: Bill, output_tokens: int) -> Charge:
        """Charge a started request's output up to this cumulative count. A count that decreased changes nothing."""
        before = bill.tokens
        bill.tokens = after = Tokens(before.extend, before.cached, max(before.output, output_tokens))
        bill.account.serve(before, after)
        return self._charge(bill, before)

    def settle(
        self,
        bill: Bill,
        usage: Usage | None,
        min_extend: int = 0,
        *,
        output: int | None = None,
        cached_is_estimate: bool = False,
        resent: int = 0,
    ) -> Charge:
        """Close a started request's bill with the engine's usage, or without usage with what was charged so far.

        `min_extend`: if the engine does not report cached tokens, at least this many input tokens count as computed,
        or all of them if there are fewer. `output`: output tokens to bill if there is no usage; None for those charged
        so far. `cached_is_estimate`: whether the cached tokens of `usage` are not the engine's own. `resent`: input
        tokens computed beyond those of the usage.
        """
        after, said = bill.tokens, usage
        if usage is None:
            usage = Usage(after.extend + after.cached, after.output if output is None else output)
        cached = usage.cached_tokens
        if cached is None:
            cached = min(after.cached, max(0, usage.input_tokens - min_extend))
            cached_is_estimate = True
        cached = min(cached, usage.input_tokens)
        charge = self._close(bill, Tokens(usage.input_tokens - cached + resent, cached, usage.output_tokens))
        estimated = Tokens(
            extend=resent + (usage.input_tokens if cached_is_estimate else 0),
            output=usage.output_tokens if said is None else 0,
        )
        self.usage.add(bill.usage_on(self.usage.day, estimated))
        return charge

    def refund(self, bill: Bill) -> Charge:
        """Close the bill of a request that the engine refused before it accepted it. Nothing is charged."""
        return self._close(bill, NOTHING)

    def charge_since(self, bill: Bill, before: Tokens) -> Charge:
        """Return the first charge of a bill: its change from these tokens, which an earlier run has charged."""
        cost = bill.cost - self._price(before)
        return Charge(bill.request, bill.client, bill.worker, before, bill.tokens, cost)

    def _charge(self, bill: Bill, before: Tokens) -> Charge:
        """Return the change of a bill to the tokens that it has now, and note what these cost."""
        after, cost_before = bill.tokens, bill.cost
        bill.cost = self._price(after)
        return Charge(bill.request, bill.client, bill.worker, before, after, bill.cost - cost_before)

    def _price(self, tokens: Tokens) -> float:
        """Return the cost of these tokens as `LinearCost` does, written out because every charge asks for it."""
        extend, cached, output = tokens
        return self._extend * extend + self._cached * cached + self._output * output

    def _close(self, bill: Bill, after: Tokens) -> Charge:
        account, before = bill.account, bill.tokens
        del account.bills[bill]
        account.trusted -= bill.trusted
        account.serve(before if bill.started else NOTHING, after)
        bill.tokens = after
        return self._charge(bill, before)

    def check_conservation(self) -> None:
        """Raise AssertionError unless each account has its own client's bills, trusts what these say, and was served
        no less than nothing.
        """
        for client, account in self._accounts.items():
            owned = all(bill.account is account and bill.client == client for bill in account.bills)
            assert owned, f"{client}: a bill of another account"
            assert account.trusted == sum(bill.trusted for bill in account.bills), f"{client}: trusted without a bill"
            assert min(account.served) >= 0, f"{client}: {account}"


def daily_usage(
    day: int, client: ClientId, model: str, tokens: Tokens, estimated: Tokens, *, pays_prompt: bool
) -> DailyUsage:
    """Return one bill's tokens as usage of a day. `estimated`: which of the tokens are estimates."""
    input_tokens, estimated_input = tokens.extend + tokens.cached, estimated.extend + estimated.cached
    return DailyUsage(
        day,
        client,
        model,
        int(pays_prompt),
        input_tokens,
        tokens.cached,
        tokens.output,
        estimated_input,
        estimated.output,
    )
