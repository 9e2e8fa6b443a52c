"""An independent check of a scheduler's fairness: books kept from its events and commands alone.

In a queue with quantum Q^u, let S_i be what client i was served per weight, and let each term be the largest seen of i:

    span_i = Q^u + (w_e · (input + predicted-cached in flight + reserved input in flight)
                    + w_q · output reserved in flight) / w_i

The deficit of i, together with what is reserved and not served, moves within its span; and a refill round adds one
quantum, per weight, to every waiting client, and at most that to others. So while f is backlogged, S_g - S_f rises by
no more than span_f + span_g over any interval, whether g is backlogged or not: properties 1 and 2 of the DLPM paper,
section 3. No pair's sum exceeds the router's 2(U' + E + P + Q^u) + 2R.

That is for inputs of known size. If sizes are estimated, a request may exceed its reservation and its prediction; the
span then includes the largest such excess, times the most requests that i had in flight. If the scheduler learns of
output later than it is computed, the span also includes the most output that it did not know of in one request, times
the same number.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field

from router.core.model.commands import Command, Dispatch, Reject
from router.core.model.cost import LinearCost, Tokens
from router.core.model.events import Arrived, Cancelled, Event, Failed, Finished, Progressed, Started
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId

ROUNDING = 1e-6


class UnfairError(AssertionError):
    """A backlogged client fell further behind another than the theorem allows."""


@dataclass(slots=True)
class Held:
    """Tokens that a client has in flight in one queue, or the most of each kind that it ever had."""

    input: int = 0
    """Input of its largest request."""
    output: int = 0
    trusted: int = 0
    """Predicted to be cached, and so not charged."""
    reserved: int = 0
    """The rest of the input."""
    requests: int = 0
    excess: float = 0.0
    """By how much a request exceeded everything known about it, in cost units."""


@dataclass(slots=True)
class Call:
    """A dispatched request, with what it was served so far."""

    request: Request
    queue: WorkerId | None
    size: int
    trusted: int
    started: bool = False
    extend: int = 0
    output: int = 0


@dataclass(slots=True)
class Interval:
    """A client's backlog: for each other client, S_other - S_client at its beginning, and the least since."""

    number: int
    start: dict[ClientId, float]
    least: dict[ClientId, float]


@dataclass(slots=True)
class Queue:
    """What the clients of one queue were served and had in flight."""

    service: dict[ClientId, float] = field(default_factory=dict)
    """Service per weight."""
    now: dict[ClientId, Held] = field(default_factory=dict)
    most: dict[ClientId, Held] = field(default_factory=dict)
    backlogs: dict[ClientId, Interval] = field(default_factory=dict)


class Books:
    """Service, backlogs and requests in flight, by queue and client; a queue is a worker's, or None for a pool."""

    def __init__(
        self,
        cost: LinearCost,
        quantum: float,
        weights: Mapping[ClientId, float],
        trusted_limit: int,
        estimate: Callable[[Request], int],
        served: Callable[[ClientId], Tokens],
        estimated: Callable[[RequestId], Tokens | None],
        comparable: Callable[[ClientId, ClientId], bool] | None = None,
    ) -> None:
        """`estimate`: the estimated input of a request at its dispatch, in tokens.

        `served`: what the ledger has for a client. If a call is broken off without a report of what was cached, the
        ledger says what was computed, between the prediction and the whole input. `estimated`: what the ledger has for
        a call in flight, or None while it is only reserved; for an unstreamed answer the ledger has its estimated
        output. `comparable`: which clients are compared; None for all.
        """
        self._comparable = comparable
        self._cost = cost
        self._quantum = quantum
        self._weights = weights
        self._trusted_limit = trusted_limit
        self._estimate = estimate
        self._served = served
        self._estimated = estimated
        self._totals: dict[ClientId, Tokens] = {}
        """What each client was served, as kept here."""
        self._waiting: dict[RequestId, Request] = {}
        self._calls: dict[RequestId, Call] = {}
        self._where: dict[tuple[WorkerId | None, ClientId], None] = {}
        """The clients waiting in each queue, as the policy reports them."""
        self._intervals = 0
        self.queues: dict[WorkerId | None, Queue] = {}
        self.unreported = 0
        """The most output tokens of one stream that the scheduler did not know of until one report; set by a test in
        which the books know more than the scheduler.
        """
        self._reported_at_once = 0
        """The most output tokens of one stream in one event."""
        self.tightness = 0.0
        """The largest ratio of any difference to its bound."""

    def backlog_began(self, queue: WorkerId | None, client: ClientId, now: float) -> None:  # noqa: ARG002
        self._where[queue, client] = None

    def backlog_ended(self, queue: WorkerId | None, client: ClientId, now: float) -> None:  # noqa: ARG002
        del self._where[queue, client]

    def note(self, event: Event, commands: Iterable[Command], *, pooled: bool) -> None:
        """Apply an event and the commands that followed. Raises `UnfairError`."""
        self._follow_estimates()
        self._take_in(event)
        for name, queue in self.queues.items():
            self._check(name, queue)
        for command in commands:
            match command:
                case Dispatch(request, worker, cached):
                    self._open(self._waiting.pop(request), None if pooled else worker, cached)
                case Reject(request):
                    del self._waiting[request]
        self._follow_backlogs()

    def _take_in(self, event: Event) -> None:
        match event:
            case Arrived(request):
                self._waiting[request.id] = request
            case Started(name):
                self._start(name)
            case Progressed(output_tokens):
                for name, tokens in output_tokens.items():
                    self._start(name)
                    self._serve(name, self._calls[name].extend, max(tokens, self._calls[name].output))
            case Failed(name, accepted=False):
                self._serve(name, 0, 0)
                self._close(name)
            case Finished(name, usage):
                self._settle(name, usage)
            case Failed(name, _, usage) | Cancelled(name, usage):
                if self._waiting.pop(name, None) is None:
                    self._settle(name, usage, broken_off=True)

    def _follow_estimates(self) -> None:
        """Apply what the ledger estimates of unstreamed answers, which start and grow without an event."""
        for name, call in self._calls.items():
            if not call.request.streamed and (tokens := self._estimated(name)) is not None:
                self._start(name)
                self._serve(name, call.extend, tokens.output)

    def _open(self, request: Request, queue: WorkerId | None, cached: int) -> None:
        client = request.client
        in_flight = sum(call.trusted for call in self._calls.values() if call.request.client == client)
        trusted = min(cached, max(0, self._trusted_limit - in_flight))
        size = self._estimate(request)
        self._calls[request.id] = Call(request, queue, size, trusted)
        books = self._queue(queue)
        now, most = books.now.setdefault(client, Held()), books.most.setdefault(client, Held())
        now.output += request.output_limit or 0
        now.trusted += trusted
        now.reserved += size - trusted
        now.requests += 1
        most.input = max(most.input, size)
        most.output = max(most.output, now.output)
        most.trusted = max(most.trusted, now.trusted)
        most.reserved = max(most.reserved, now.reserved)
        most.requests = max(most.requests, now.requests)

    def _start(self, name: RequestId) -> None:
        call = self._calls[name]
        if not call.started:
            call.started = True
            self._serve(name, call.size - call.trusted, 0)

    def _serve(self, name: RequestId, extend: int, output: int) -> None:
        """Set what a request was served so far."""
        call = self._calls[name]
        had, had_output = call.extend, call.output
        cost = self._cost.extend * (extend - had) + self._cost.output * (output - had_output)
        call.extend, call.output = extend, output
        if call.request.streamed:
            self._reported_at_once = max(self._reported_at_once, output - had_output)
        queue, client = self._queue(call.queue), call.request.client
        self._totals[client] = self._totals.get(client, Tokens()).plus(Tokens(extend - had, 0, output - had_output))
        queue.service[client] = queue.service.get(client, 0.0) + cost / self._weights[client]
        known = self._cost.extend * call.size + self._cost.output * (call.request.output_limit or 0)
        came_to = self._cost.extend * extend + self._cost.output * output
        queue.most[client].excess = max(queue.most[client].excess, came_to - known)

    def _settle(self, name: RequestId, usage: Usage | None, *, broken_off: bool = False) -> None:
        self._start(name)
        call = self._calls[name]
        if usage is not None:
            cached = call.trusted if usage.cached_tokens is None else usage.cached_tokens
            self._serve(name, usage.input_tokens - cached, usage.output_tokens)
        client, whole = call.request.client, not call.request.streamed
        missing, had = self._served(client), self._totals[client]
        if broken_off and (usage is None or usage.cached_tokens is None):
            beyond = missing.extend - had.extend
            assert 0 <= beyond <= call.trusted, "what was computed lies between the predicted and the whole input"
            self._serve(name, call.extend + beyond, call.output)
        if whole and usage is None:
            output = call.output + missing.output - had.output
            limit = call.request.output_limit
            assert 0 <= output <= (output if limit is None else limit), "an estimate is kept within the limit"
            self._serve(name, call.extend, output)
        self._close(name)

    def _close(self, name: RequestId) -> None:
        call = self._calls.pop(name)
        now = self._queue(call.queue).now[call.request.client]
        now.output -= call.request.output_limit or 0
        now.trusted -= call.trusted
        now.reserved -= call.size - call.trusted
        now.requests -= 1

    def _queue(self, name: WorkerId | None) -> Queue:
        return self.queues.setdefault(name, Queue())

    def _check(self, name: WorkerId | None, queue: Queue) -> None:
        for client, backlog in queue.backlogs.items():
            for other in self._weights:
                if self._comparable is not None and not self._comparable(client, other):
                    continue
                ahead = self._ahead(queue, other, client)
                rise, bound = ahead - backlog.least[other], self._span(queue, client) + self._span(queue, other)
                self.tightness = max(self.tightness, rise / bound)
                if rise > bound + ROUNDING:
                    raise UnfairError(f"at {name}, {other} gained {rise} on {client}, which waited; allowed: {bound}")
                backlog.least[other] = min(ahead, backlog.least[other])

    def _follow_backlogs(self) -> None:
        """Begin and end the intervals in which clients wait, as they are after an event."""
        assert {client for _, client in self._where} == {request.client for request in self._waiting.values()}
        for name, client in self._where:
            queue = self._queue(name)
            if client not in queue.backlogs:
                start = {other: self._ahead(queue, other, client) for other in self._weights}
                self._intervals += 1
                queue.backlogs[client] = Interval(self._intervals, start, dict(start))
        for name, queue in self.queues.items():
            for client in [client for client in queue.backlogs if (name, client) not in self._where]:
                del queue.backlogs[client]

    def _ahead(self, queue: Queue, other: ClientId, client: ClientId) -> float:
        return queue.service.get(other, 0.0) - queue.service.get(client, 0.0)

    def _consumed(self, most: Held, unreported: int) -> float:
        """Return U' + E + R + P and the excess, in cost units."""
        input_tokens = most.input + most.trusted + most.reserved
        excess = most.requests * (most.excess + self._cost.output * unreported)
        return self._cost.extend * input_tokens + self._cost.output * most.output + excess

    def _span(self, queue: Queue, client: ClientId) -> float:
        return self._quantum + self._consumed(queue.most.get(client, Held()), self.unreported) / self._weights[client]

    def gap(self, name: WorkerId | None) -> float:
        """Return the largest present difference between two backlogged clients, since the later backlog began."""
        queue = self._queue(name)
        gaps = [
            abs(self._ahead(queue, other, client) - later.start[other])
            for client, later in queue.backlogs.items()
            for other, earlier in queue.backlogs.items()
            if earlier.number < later.number
        ]
        return max(gaps, default=0.0)

    def needed(self, name: WorkerId | None) -> float:
        """Return the largest bound of any pair of clients; no bound reported for this queue may be smaller."""
        queue = self._queue(name)
        spans = sorted(self._span(queue, client) for client in queue.most)
        return max(2 * self._quantum, sum(spans[-2:]))

    def formula(self, name: WorkerId | None) -> float:
        """Return 2(U' + E + P + Q^u) + 2R with the largest terms of any client, per weight of the lightest client."""
        most = self._queue(name).most
        if not most:
            return 2 * self._quantum
        largest = Held(*[max(values) for values in zip(*map(astuple, most.values()), strict=True)])
        consumed = self._consumed(largest, max(self.unreported, self._reported_at_once))
        return 2 * (consumed / min(self._weights[client] for client in most) + self._quantum)
