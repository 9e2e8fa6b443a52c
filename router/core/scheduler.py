"""The scheduler: events in, commands out. Synchronous, total and deterministic.

Theory of operation
===================
`handle(event, now)` applies one event and returns the commands that follow from it; the same events at the same times
give the same commands. It never blocks and never reads a clock. The policy owns the queued requests and chooses the
next one to dispatch; each worker's window decides whether that worker has room. `Attempts` keeps the books of a request
while a worker has it: its bill and its share of every counter. The scheduler itself keeps the set of live requests,
rejects requests, retries those that workers returned, and sets the wake-up timer.

A request is WAITING, then at a worker in an ATTEMPT, and ends once; after each attempt but the last it waits again:

    WAITING ──> ATTEMPT(worker, stage) ──> ended
       ^             │       ^  │
       └── Returned ─┘       │  └── Prefilled ──> POOLED
       ^                     └───── Dispatch ──────┘ │
       └───────────────── too old, or lost ──────────┘

    state              Started  Progressed  Finished, Failed  Returned  Cancelled  otherwise
    -----------------  -------  ----------  ----------------  --------  ---------  -------------------------------------
    WAITING, queued    -        -           -                 -         ended      chosen: Dispatch, ATTEMPT
                                                                                   expired or over a limit: Reject
    ATTEMPT, SENT      STARTED  STARTED     ended             WAITING   ended      its worker leaves: no change
    ATTEMPT, STARTED   -        charged     ended             WAITING   ended      its worker leaves: no change
    WAITING, returned  -        -           -                 -         ended      room elsewhere: Dispatch, ATTEMPT
                                                                                   expired, or no try or no worker left:
                                                                                   Reject
    POOLED             -        -           -                 -         ended      room to decode: Dispatch, ATTEMPT
                                                                                   too old, or its prefill worker left:
                                                                                   WAITING, as if returned

Where a model has prefill workers, a request has two attempts: `Prefilled` ends the first, at a prefill worker, and the
second, at a decode worker, ends the request (see `handoffs`). If that worker returns it, or `HandoffLost` says that the
prompt is no longer there, it is prefilled again. Where both workers must be called at once, both attempts begin with
one decision: the second one is the request's ATTEMPT, beside which `RequestState.prefill` is the first one, until
`Prefilled` or whatever ends the second.

The policy owns a queued request, the front one that a worker has, and the scheduler one that a worker returned or has
prefilled.

An ended request is in no count any more: the policy and the queue limits, or `Attempts`, have dropped it, and `_close`
comes last. An event about an ended request is late and changes nothing, because the front's events and the scheduler's
commands can cross. When a worker returns a request, that attempt ends like any other, and the retry is a new one.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from random import Random

from router.core.attempts import Attempts
from router.core.books import Books
from router.core.cache.prefix_map import Oracle
from router.core.carried_requests import CarriedRequests
from router.core.clients.fairness import Fairness
from router.core.clients.queue_limits import QueueLimits
from router.core.clients.undelivered import Undelivered
from router.core.handoffs import PrefillGate
from router.core.known_clients import KnownClients
from router.core.membership import Membership, WorkerEvent
from router.core.model.commands import Command, Refusal, Reject, WakeAt
from router.core.model.cost import NOTHING
from router.core.model.events import (
    Arrived,
    Cancelled,
    ChargedRequest,
    Credited,
    DayBegan,
    Event,
    Failed,
    Fault,
    Finished,
    Forgotten,
    FrontAway,
    FrontBack,
    HandoffLost,
    Held,
    Prefilled,
    Progressed,
    Released,
    Resumed,
    Returned,
    Started,
    Ticked,
    WorkerLeft,
)
from router.core.model.request import ClientId, Leg, Request, RequestId, WorkerId
from router.core.next_attempts import NextAttempts, Outcome
from router.core.policies.base import Choice, PolicyFactory
from router.core.policies.context import Parameters
from router.core.requests import Attempt, RequestState, RequestTable, new_state
from router.core.scheduler_settings import SchedulerSettings


class Scheduler:
    """Schedules the requests of one fleet with one policy."""

    def __init__(
        self,
        policy: PolicyFactory,
        settings: SchedulerSettings,
        parameters: Parameters,
        random: Random,
        oracle: Oracle | None = None,
    ) -> None:
        """`oracle`: replaces the believed matches in simulations, see `PrefixMap`."""
        self.settings = settings
        self._requests: dict[RequestId, RequestState] = {}
        """Changed by `RequestTable` only."""
        books = Books(settings, self._requests, oracle)
        self.estimates, self.ledger, self.fleet = books.estimates, books.ledger, books.fleet
        self.prefixes, self.mirror, self.blocks = books.prefixes, books.prefixes.mirror, books.prefixes.blocks
        self.shares, self.backlog = books.shares, books.backlog
        self.policy = policy(books.policy_context(settings, parameters, random))
        self.fairness = Fairness(settings.cost, self.shares, pooled=self.policy.properties.pooled)
        self.backlog.subscribe(self.fairness)
        self._next_attempts = NextAttempts(settings, books, self.policy, self.fairness)
        self.handoffs, self._retries = self._next_attempts.handoffs, self._next_attempts.retries
        self._gate = PrefillGate(self.fleet, self.handoffs, settings.handoff_seconds)
        self._follows_calls = self.policy.properties.follows_calls
        self._table = RequestTable(self._requests, self.shares, self.fairness.turns, self.policy)
        self.membership = Membership(
            self.fleet, self.prefixes, books.outputs, self.policy, self.fairness, requeue=self._requeue
        )
        self.clients = KnownClients(settings.client_limit, self.shares, self.ledger, self.fairness, self.policy)
        self.weights: Mapping[ClientId, float] = self.clients.weights
        self._attempts = Attempts(books, self.policy, self.fairness, self.membership, self._gate)
        self._queue_limits = QueueLimits(settings.waiting)
        self._carried = CarriedRequests(
            self.fleet,
            self.membership,
            self.clients,
            self.policy,
            self._attempts,
            self._table,
            self._next_attempts,
        )
        self._awaiting: dict[RequestId, Request] = {}
        """Queued requests that the policy does not know, as the one worker of each is ejected and comes back."""
        self._awaiting_changes = 0
        """How often the fleet had changed when they were looked at last."""
        self._arrivals = 0
        """The new requests that were taken so far: each adds to what may be retried."""
        self._undelivered = Undelivered()
        self._newly_queued = False
        """Whether this event gave the policy requests that it may dispatch before the queue limits have counted
        them.
        """
        self._wake_at = inf
        self._commands: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply an event and return the commands that follow from it. `now`, in seconds, must never decrease.

        Raises ValueError for an `Arrived` whose request id is already live.
        """
        self._commands = []
        self._newly_queued = False
        if self._wake_at <= now:  # every deadline has a wake-up at or before it
            self.fleet.advance(now)
        if self._attempts.next_estimate <= now:
            self._attempts.charge_estimates(now)
        self._apply(event, now)
        if self.fleet.ejected:
            self.membership.readmit(now)
        if self.fleet.silent_workers:
            self.membership.eject_silent(now)
        if self._awaiting and self._awaiting_changes != self.fleet.changes:
            self._requeue_awaiting(now)
        if len(self.weights) > self.settings.client_limit and isinstance(event, Arrived):
            self.clients.forget_surplus()  # before the dispatches: a session that is forgotten leaves room for others
        if self.fleet.held:
            self.policy.queue_newcomer(now)
        else:
            self._dispatch_waiting(now)
        if isinstance(event, Arrived):
            self._enforce_queue_limits(event.request, now)
        self._schedule_wake_up(now)
        return self._commands

    @property
    def live(self) -> int:
        """How many requests have arrived and not ended."""
        return len(self._requests)

    @property
    def attempts(self) -> Mapping[RequestId, Attempt]:
        """The attempt of each request that is at a worker."""
        return {request: attempt for request, state in self._requests.items() if (attempt := state.attempt) is not None}

    @property
    def prefills(self) -> Mapping[RequestId, Attempt]:
        """The attempt that computes the prompt of each request that a decode worker has at the same time."""
        return {request: prefill for request, state in self._requests.items() if (prefill := state.prefill) is not None}

    def charged_requests(self) -> Iterator[ChargedRequest]:
        """Yield what each live request was charged, except those that were never charged, and what an earlier run has
        charged for those that have not been reported. Changes nothing.
        """
        yield from self._carried.unreported()
        for request, state in self._requests.items():
            attempts = [attempt for attempt in (state.prefill, state.attempt) if attempt is not None]
            for attempt in attempts:
                bill = attempt.bill
                yield ChargedRequest(
                    request,
                    bill.client,
                    bill.worker,
                    bill.tokens,
                    bill.started,
                    state.charged,
                    attempt.leg,
                    day=self.ledger.usage.day,
                )
            if not attempts and state.charged is not None:
                yield ChargedRequest(request, state.request.client, None, NOTHING, started=False, earlier=state.charged)

    @property
    def waiting(self) -> int:
        """How many live requests are at no worker: queued, prefilled, or waiting for a retry."""
        return len(self._queue_limits) + len(self._next_attempts)

    def is_untouched(self, request: RequestId) -> bool:
        """Return whether a request waits that no worker has had."""
        return request in self._queue_limits.waiters and self._requests[request].charged is None

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case Progressed(output_tokens):
                self._progress(output_tokens, now)
            case Arrived():
                self._enqueue(event, now)
            case Started(request):
                if (state := self._requests.get(request)) is not None:
                    self._attempts.start(state, now)
            case Finished():
                self._finish(event, now)
            case Cancelled():
                self._cancel(event, now)
            case Failed():
                self._end_attempt(event, now)
            case Returned() | Prefilled() | HandoffLost():
                self._take_from_worker(event, now)
            case Ticked() | DayBegan():
                self._pass_time(event, now)
            case Held() | Resumed() | Released() | FrontAway() | FrontBack():
                self._follow_fronts(event, now)
            case Credited() | Forgotten():
                self.clients.apply(event)
            case _:
                self._change_fleet(event, now)

    def _pass_time(self, event: Ticked | DayBegan, now: float) -> None:
        """Apply that time has passed."""
        match event:
            case Ticked():
                self._expire(now)
            case DayBegan(day):
                self.ledger.usage.begin_day(day)

    def _take_from_worker(self, event: Returned | Prefilled | HandoffLost, now: float) -> None:
        """Take a request from a worker that is done with it, although it has not ended."""
        match event:
            case Returned():
                self._queue_retry(event, now)
            case Prefilled():
                self._pool(event, now)
            case HandoffLost(request):
                self._prefill_again(request, now)

    def _change_fleet(self, event: WorkerEvent, now: float) -> None:
        """Apply what is reported of a worker."""
        self.membership.apply(event, now)
        self._attempts.report_match_changes()
        if isinstance(event, WorkerLeft):
            self._next_attempts.worker_left(event.worker)

    def _enqueue(self, event: Arrived, now: float) -> None:
        request = event.request
        carried = self._carried.take(request.id) if event.again else ()
        if carried and carried[0].worker is not None:
            self._take_back(request, carried, now)
            return
        if request.id in self._requests:
            raise ValueError(f"request {request.id} is live")
        self.clients.remember(request.client, request.weight)
        if not request.pinned:
            self.membership.note_unpinned()
        elif request.whole:
            self.membership.note_whole()
        is_served = bool(self.fleet.candidates(request))
        if not (is_served or self.fleet.bound_comes_back(request)):
            self._commands.append(Reject(request.id, Refusal.NO_WORKER))
        else:
            state = new_state(request, now, carried[0] if carried else None)
            if request.retry_key is not None and (paid := self._undelivered.take(request, now)) is not None:
                state.pay(paid)
            self._table.open_request(state, now)
            self._arrivals += 1
            if is_served:
                self._newly_queued = True
                self.policy.enqueue(request, now)
            else:
                self._awaiting[request.id] = request

    def _follow_fronts(self, event: Held | Resumed | Released | FrontAway | FrontBack, now: float) -> None:
        """Go on with the requests that fronts have of an earlier run, or while their fronts are away."""
        match event:
            case FrontAway(requests) | FrontBack(requests):
                follow = self._attempts.set_aside if isinstance(event, FrontAway) else self._attempts.bring_back
                for request in requests:
                    if (state := self._requests.get(request)) is not None:
                        follow(state, now)
            case Held(charged):
                self.fleet.held = True
                self._carried.note_charges(charged)
            case Resumed():
                self._carried.resume(event, now)
            case Released(complete):
                self.fleet.held = False
                if complete:
                    self._carried.forget_charges()

    def _take_back(self, request: Request, carried: Sequence[ChargedRequest], now: float) -> None:
        """Queue again a request that an earlier run meant for workers, but whose front never learned that."""
        self._carried.resume_all(request, carried, now)
        # Of the prompt, so that neither of two workers has computed anything.
        self._queue_retry(Returned(request.id, accepted=False, fault=Fault.FULL, leg=carried[0].leg), now)

    def _enforce_queue_limits(self, arrival: Request, now: float) -> None:
        """Queue an arrival that found no room at any worker, and reject the requests that then exceed a limit.

        This runs after dispatching, because a full queue must not keep an idle worker idle.
        """
        state = self._requests.get(arrival.id)
        if state is None or state.attempt is not None or state in self._next_attempts:
            return
        self._queue_limits.enter(arrival, now, self.shares.effective_weight(arrival))
        if self.fleet.held:  # the workers may have room for it
            return
        rejected = self._queue_limits.surplus(arrival.id)
        for request, reason in rejected:
            self._remove_queued(self._requests[request], now)
            self._commands.append(Reject(request, reason, self._queue_limits.retry_after(now)))
        if rejected:  # a request behind a rejected one may fit where that one did not
            self._dispatch_queued(now)

    def _dispatch_waiting(self, now: float) -> None:
        """Dispatch what may go: hand-offs, which do not keep, then what was just queued, retries, and the queue."""
        if self.handoffs.requests:
            self._carry_out(self._next_attempts.ready_handoffs(now), now)
        if self.fleet.has_roles:
            self._gate.open_or_close(now)
        if self._retries.requests:
            if self._newly_queued and (choice := self.policy.next(now)) is not None:
                self._dispatch(choice, now)
            self._carry_out(self._next_attempts.ready_retries(now), now)
        self._dispatch_queued(now)

    def _dispatch_queued(self, now: float) -> None:
        """Dispatch what the policy chooses until it chooses nothing. The policy is asked only while requests are
        queued.
        """
        while (self._newly_queued or self._queue_limits.waiters) and (choice := self.policy.next(now)) is not None:
            self._dispatch(choice, now)

    def _dispatch(self, choice: Choice, now: float) -> None:
        request = choice.request.id
        if request in self._queue_limits.waiters:
            self._queue_limits.leave(request, now, served=True)
        else:  # it passes through
            self._newly_queued = False
            self._queue_limits.count_dispatch(now)
        self._send(self._requests[request], choice, now)

    def _send(self, state: RequestState, choice: Choice, now: float) -> None:
        fleet = self.fleet
        if fleet.has_roles and fleet[choice.worker].worker.hands_over_at_once and not choice.request.whole:
            decode = self._next_attempts.decoder_beside(state, now)
            self._commands += self._attempts.send_both(state, choice, decode, now)
            self._gate.open_or_close(now)
            return
        self._commands.append(dispatch := self._attempts.send(state, choice, now))
        if dispatch.leg is Leg.PREFILL:
            self._gate.open_or_close(now)

    def _carry_out(self, outcomes: Iterator[Outcome], now: float) -> None:
        """Dispatch or reject requests for which the next attempt is decided, each before the next one is."""
        for state, outcome in outcomes:
            if isinstance(outcome, Refusal):
                self._refuse(state, outcome, now)
            else:
                self._send(state, outcome, now)

    def _pool(self, event: Prefilled, now: float) -> None:
        """Let a request that was prefilled wait for a decode worker."""
        state = self._requests.get(event.request)
        if state is None:
            return
        if state.prefill is not None:
            self._attempts.end_prefill(state, state.prefill, event.usage, now)
        elif (handoff := self._attempts.hand_off(state, event.usage, now)) is not None:
            self.handoffs.add(state, handoff)

    def _prefill_again(self, request: RequestId, now: float) -> None:
        """Take back a request that was dispatched to a decode worker and not sent there."""
        state = self._requests.get(request)
        if state is None or state.attempt is None or state.handoff is None:
            return
        self._attempts.refund(state, state.attempt, now)
        self._next_attempts.prefill_again(state)

    def _progress(self, output_tokens: Mapping[RequestId, int], now: float) -> None:
        for request, tokens in output_tokens.items():
            if (state := self._requests.get(request)) is not None:
                self._attempts.progress(state, tokens, now)

    def _finish(self, event: Finished, now: float) -> None:
        state = self._requests.get(event.request)
        if state is not None and self._attempts.finish(state, event.usage, event.answers, now):
            if self._follows_calls:
                self.policy.answer_ended(state.request, event.answers, event.ended_turn)
            self._table.close_request(state.request, now)

    def _cancel(self, event: Cancelled, now: float) -> None:
        if (state := self._requests.get(event.request)) is None:
            return
        is_delivered = state.is_delivered
        self._withdraw(state, event, now)
        if event.front_died and not is_delivered:
            self._undelivered.add(state.request, state.charged, now)

    def _withdraw(self, state: RequestState, event: Cancelled, now: float) -> None:
        """End a request, wherever it is."""
        if state.attempt is not None:
            self._attempts.cancel(state, state.attempt, event.usage, now)
            if state.charged_output:
                self.estimates.outputs.answer_ended(state.request, state.charged_output)
            self._table.close_request(state.request, now)
        elif state in self._next_attempts:
            self._next_attempts.remove(state)
            self._table.close_request(state.request, now)
        else:
            self._remove_queued(state, now)

    def _end_attempt(self, event: Failed | Returned, now: float) -> tuple[RequestState, WorkerId] | None:
        """End the attempt of a request that failed at its worker. Returns the request's state and the worker, or None
        if no worker has the request.
        """
        state = self._requests.get(event.request)
        if state is None or (attempt := state.attempt) is None:
            return None
        failed = self._attempts.fail(state, attempt, event, now)
        self._table.close_request(state.request, now)
        worker = failed.worker.worker.id
        self.membership.on_failure(worker, event.fault, now)
        return state, worker

    def _queue_retry(self, event: Returned, now: float) -> None:
        """End the attempt of a request that its worker returned, and queue it for a retry or reject it."""
        if (ended := self._end_attempt(event, now)) is None:
            return
        state, worker = ended
        if state.handoff is not None and event.fault is Fault.ERROR and event.accepted:
            state.kept_in_vain = state.handoff.worker
        state.handoff = None
        self._table.open_request(state, now)
        in_use = self.fleet.in_use(worker)
        may_retry = self._retries.add(state, event, worker, now, in_use=in_use, arrivals=self._arrivals)
        if not may_retry and not self.fleet.held:
            if len(state.suspects) == 1:
                self.membership.blame_suspects(state, now)
            self._next_attempts.remove(state)
            self._refuse(state, Refusal.NO_RETRY, now)

    def _refuse(self, state: RequestState, reason: Refusal, now: float) -> None:
        """Reject permanently a request that has had an attempt. What its attempts cost stays charged."""
        self._table.close_request(state.request, now)
        self._remember_repeated(state)
        self._commands.append(Reject(state.request.id, reason))

    def _remove_queued(self, state: RequestState, now: float) -> None:
        """End a queued request."""
        if self._awaiting.pop(state.request.id, None) is None:
            self.policy.withdraw(state.request.id, now)
        self._close_queued(state, now)

    def _close_queued(self, state: RequestState, now: float) -> None:
        """End a request that no worker has had and the policy does not know any more."""
        self._queue_limits.leave(state.request.id, now, served=False)
        self._table.close_request(state.request, now)
        self._remember_repeated(state)

    def _remember_repeated(self, state: RequestState) -> None:
        """Let a client repeat again the call that a refused request repeats, if no worker computed anything of it."""
        if state.paid is not None and state.charged == state.paid.charged:
            self._undelivered.remember(state.request, state.paid)

    def _requeue(self, requests: Sequence[Request], now: float) -> None:
        """Enqueue at the policy again the requests that it gave up, or reject those that no worker serves any more."""
        waiters = self._queue_limits.waiters
        self._newly_queued |= any(request.id not in waiters for request in requests)
        for request in requests:
            if self.fleet.candidates(request):
                self.policy.enqueue(request, now)
            elif self.fleet.bound_comes_back(request):
                self._awaiting[request.id] = request
            else:
                self._close_queued(self._requests[request.id], now)
                self._commands.append(Reject(request.id, Refusal.NO_WORKER))

    def _requeue_awaiting(self, now: float) -> None:
        """Look again, once the fleet has changed, at the requests that wait for an ejected worker."""
        self._awaiting_changes = self.fleet.changes
        requests, self._awaiting = [*self._awaiting.values()], {}
        self._requeue(requests, now)

    def _expire(self, now: float) -> None:
        self._wake_at = inf
        for request in self._queue_limits.expired(now):
            self._remove_queued(self._requests[request], now)
            self._commands.append(Reject(request, Refusal.EXPIRED, self._queue_limits.retry_after(now)))
        for state in self._next_attempts.expired(now):
            self._next_attempts.remove(state)
            self._refuse(state, Refusal.EXPIRED, now)

    def _schedule_wake_up(self, now: float) -> None:
        """Ask to be woken at the next deadline, unless an earlier wake-up is set. A needless wake-up is cheap."""
        deadline = min(self.fleet.index.next_deadline, self._attempts.next_estimate)
        if self.fleet.ejected:
            deadline = min(deadline, self.fleet.next_readmission)
        if self._retries.requests or self.handoffs.requests:
            deadline = min(deadline, self._next_attempts.next_deadline)
        if self._queue_limits.waiters:
            deadline = min(deadline, self._queue_limits.next_deadline, self.policy.next_deadline)
        if deadline < self._wake_at and (wake_at := max(deadline, now)) != self._wake_at:
            self._wake_at = wake_at
            self._commands.append(WakeAt(wake_at))
