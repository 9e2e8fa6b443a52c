"""DLPM, deficit longest prefix match: longest match first, among the eligible clients.

"Locality-aware Fair Scheduling in LLM Serving", section 4.1, Algorithm 1. It differs in this:

- Deficits are refilled in closed form, and positive ones are topped up to one quantum.
- A client that begins to wait goes before the longest match, and then a client with nothing in flight at the worker.
- A new client starts with one quantum.
- A client cannot shed debt by leaving and returning. But when no client waits, all are reset to one quantum, because
  use of an idle machine takes nothing from others.
"""

from collections.abc import Collection, Iterable, Iterator

from router.core.model.cost import Charge, Tokens
from router.core.model.request import ClientId, GroupId, Request, RequestId, WorkerId
from router.core.policies.base import Fits, Order, Turn
from router.core.policies.context import PolicyContext
from router.core.policies.deficit.eligibility import Eligibility
from router.core.policies.dlpm.dlpm_parameters import DlpmParameters
from router.core.policies.dlpm.longest_match import LongestMatchQueue
from router.core.policies.dlpm.refill_hold import AwaitingFirstToken


class Dlpm(Order):
    """Keeps the counters q_i of one worker's queue; longest match among the requests of eligible clients."""

    def __init__(self, context: PolicyContext, worker: WorkerId) -> None:
        self._parameters = context.parameters.of(DlpmParameters)
        self._cost = context.cost
        self._view = view = context.view
        self._worker = worker
        self._eligibility = Eligibility(
            self._on_priority_change, self._parameters, self._rate, context.shares, context.debtors
        )
        self._eligibility.set_sparse_limit(int(self._parameters.sparse_first))
        self._queue = LongestMatchQueue(
            lambda request: view.watch_at(request, worker),
            view.unwatch,
            self._eligibility.waiting_priority_class,
            self._parameters.patience,
            self._parameters.oldest_every,
            self._eligibility.turns if self._parameters.overdue_after else None,
        )
        self._awaiting_first_token = AwaitingFirstToken()

    def __len__(self) -> int:
        return len(self._queue)

    def waiting(self) -> Collection[RequestId]:
        return self._queue.requests

    def push(self, request: Request) -> None:
        if not self._queue and not self._awaiting_first_token:
            self._eligibility.reset()
        matters = self._eligibility.may_get_head_start(request.client)
        self._eligibility.add_waiting(request, self._input_cost(request) if matters else 0.0)
        self._queue.push(request)

    def remove(self, request: RequestId) -> Request:
        removed = self._queue.remove(request)
        self._eligibility.remove_waiting(removed)
        return removed

    def pass_through(self, request: Request, now: float) -> bool:
        """Refills a client that is not eligible, as no other client competes with it."""
        if not self._awaiting_first_token:
            self._eligibility.reset()
        return self._eligibility.may_pass_through(request, refill=not self._refill_waits_for_engine(now))

    def select(self, fits: Fits, now: float) -> Turn | None:
        """Refills the counters if no waiting client is eligible."""
        self._refill(now)
        return self._queue.longest(fits)

    def next_request(self, now: float) -> Request | None:
        self._refill(now)
        return self._queue.next_request

    def _refill(self, now: float) -> None:
        self._eligibility.mark_overdue()
        if not self._refill_waits_for_engine(now):
            self._eligibility.refill()

    def match_changed(self, requests: Iterable[RequestId]) -> None:
        self._queue.match_changed(requests)

    def request_dispatched(self, request: Request, now: float) -> None:
        self._eligibility.request_dispatched(request)
        self._awaiting_first_token.add(request, now)

    def resume(self, request: Request, now: float) -> None:
        self._eligibility.resume(request)
        self._awaiting_first_token.add(request, now)

    def request_charged(self, charge: Charge) -> None:
        self._eligibility.charge(charge.client, charge.cost)

    def request_started(self, request: Request) -> None:
        self._awaiting_first_token.remove(request.id)

    def request_ended(self, request: Request) -> None:
        self._awaiting_first_token.remove(request.id)
        self._eligibility.request_ended(request)

    def deficit(self, client: ClientId) -> float | None:
        """q_i, in cost units; None for a client that this worker never saw."""
        return self._eligibility.deficit(client)

    def grant(self, client: ClientId, cost: float) -> None:
        self._eligibility.charge(client, -cost)

    def forget(self, client: ClientId) -> None:
        self._eligibility.forget(client)

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        return self._eligibility.saved()

    def restore(self, client: ClientId, value: float, scale: float) -> None:
        self._eligibility.restore(client, value, scale)

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        return self._eligibility.saved_groups()

    def restore_group(self, group: GroupId, value: float, scale: float) -> None:
        self._eligibility.restore_group(group, value, scale)

    @staticmethod
    def gap_quantum(context: PolicyContext) -> float:
        """Return the quantum of the gap bound, in cost units."""
        return context.parameters.of(DlpmParameters).deficit_range

    def _input_cost(self, request: Request) -> float:
        size, match = self._view.size_and_match(request)
        cached = match.get(self._worker, 0)
        return self._cost(Tokens(size - cached, cached, 0))

    def _rate(self) -> float | None:
        return self._view.rate((self._worker,))

    def _on_priority_change(self, client: ClientId) -> None:
        self._queue.update_priority(client, self._eligibility.waiting_priority_class(client))

    def _refill_waits_for_engine(self, now: float) -> bool:
        """Return whether an engine that orders by longest match has not started a request of an eligible client."""
        if not self._view.reorders(self._worker):
            return False
        return self._awaiting_first_token.has_eligible_since(
            now - self._parameters.engine_lpm_seconds, self._eligibility.priority_class
        )
