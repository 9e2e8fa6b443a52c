"""The scheduler: events in, commands out. Synchronous, total, deterministic.

Theory of operation
===================
`handle(event, now)` takes in what happened and answers what is to be done; the same events at the same times give
the same commands. It never waits, and never asks what time it is. The policy owns the requests that wait, and says
which goes next; the window of each worker says whether one may. What follows from a request that is at a worker, its
bill and its place in every count, is moved by `dispatched`. The scheduler keeps what is left: which requests there are
and where each is in its life, what has to be turned away, what came back, and the alarm.

A request's lifecycle, and who owns it:

    state      owner      Started  Progressed  Finished  Failed  Returned  Cancelled  otherwise
    ---------  ---------  -------  ----------  --------  ------  --------  ---------  ------------------------------
    WAITING    policy     -        -           -         -       -         gone       its turn: Dispatch, IN_FLIGHT
                                                                                      too late, too much: Reject
    IN_FLIGHT  gateway    STARTED  STARTED     gone      gone    RETURNED  gone       its worker leaves: stays
    STARTED    gateway    -        charged     gone      gone    RETURNED  gone       its worker leaves: stays
    RETURNED   scheduler  -        -           -         -       -         gone       room elsewhere: Dispatch
                                                                                      too late, no more tries: Reject

"Gone" is gone from every count: from the policy and the waiting room, or by `dispatched` from what its worker has,
and `_bury` comes last. An event about a request that is gone is late news and changes nothing: the gateway's events and
ours may cross. What comes back ends at its worker like all else, and is sent again as if it had just been given out.
"""

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from typing import Final

from router.core.attempts import Attempts
from router.core.cache.prefix_map import Oracle, PrefixMap
from router.core.clients.backlog import Backlog
from router.core.clients.fairness import Fairness
from router.core.clients.ledger import Ledger
from router.core.clients.queue_limits import QueueLimits
from router.core.clients.shares import Shares
from router.core.fleet.cluster import Cluster
from router.core.fleet_view import SchedulerView
from router.core.known_clients import KnownClients
from router.core.membership import Membership
from router.core.model.commands import Command, Refusal, Reject, WakeAt
from router.core.model.events import (
    Arrived,
    Cancelled,
    Credited,
    Event,
    Failed,
    Fault,
    Finished,
    Forgotten,
    Progressed,
    Returned,
    Started,
    Ticked,
)
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.base import Choice, PolicyFactory
from router.core.policies.context import Parameters, PolicyContext
from router.core.predict.token_estimates import Estimates
from router.core.requests import RequestState, RetryQueue, RequestStage
from router.core.settings import SchedulerSettings

CHUNKS_PER_MEASURED_PREFIX: Final = 80
"""Of chunks in the prefix tree, for each place that is remembered of a prompt: 50,000 by default."""


class Scheduler:
    """One policy over one fleet."""

    def __init__(
        self,
        policy: PolicyFactory,
        settings: SchedulerSettings,
        parameters: Parameters,
        random: Random,
        oracle: Oracle | None = None,
    ) -> None:
        """`oracle`: see `PrefixMap`."""
        self.settings = settings
        self.estimates = Estimates(landmarks=settings.prefix_limit // CHUNKS_PER_MEASURED_PREFIX)
        self.ledger = Ledger(settings.cached_in_flight)
        self.cluster = Cluster(settings.window, settings.health, settings.departed_limit)
        self.backlog = Backlog()
        self.prefixes = PrefixMap(
            settings.prefix_limit, self.estimates, settings.match_minimum, settings.kv_tokens, settings.tracking, oracle
        )
        self.mirror = self.prefixes.mirror
        self.blocks = self.prefixes.blocks
        self._view = view = SchedulerView(self.cluster, self.prefixes, self.estimates)
        self.shares = Shares()
        around = PolicyContext(
            view, settings.cost, random, parameters, self.backlog, settings.debtor_limit, self.shares
        )
        self.policy = policy(around)
        self.fairness = Fairness(settings.cost, self.shares, pooled=self.policy.properties.pooled)
        self.backlog.subscribe(self.fairness)
        self.membership = Membership(self.cluster, self.prefixes, self.policy, self.fairness, self._place_anew)
        self.clients = KnownClients(settings.client_limit, self.shares, self.ledger, self.fairness, self.policy)
        self.weights: Mapping[ClientId, float] = self.clients.weights
        self._dispatched = Attempts(
            self.cluster,
            self.prefixes,
            self._view,
            self.estimates,
            self.ledger,
            self.policy,
            self.fairness,
            self.membership,
            settings.cost,
        )
        self._live: dict[RequestId, RequestState] = {}
        self._room = QueueLimits(settings.waiting)
        self._retry_queue = RetryQueue(settings.health, settings.waiting.time_to_live)
        """It goes before all that waits."""
        self._placed = False
        """Whether this event gave the policy requests, which may be promised a place and may not have gone yet."""
        self._wake = inf
        self._out: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in an event and answer what follows from it; `now` never falls.

        Raises ValueError for an `Arrived` whose id is in use.
        """
        self._out = []
        self._placed = False
        if self._wake <= now:  # no deadline comes before the alarm
            self.cluster.advance(now)
        if self._dispatched.next_estimate <= now:
            self._dispatched.charge_estimates(now)
        self._take_in(event, now)
        if self.cluster.barred:
            self.membership.readmit(now)
        if self.cluster.quiet:
            self.membership.eject_silent(now)
        if self._retry_queue.requests:
            if self._placed and (choice := self.policy.next(now)) is not None:
                self._dispatch(choice, now)
            self._resend(now)
        self._give_turns(now)
        if isinstance(event, Arrived):
            self._make_room(event.request, now)
            self.clients.forget_surplus()
        self._set_alarm(now)
        return self._out

    @property
    def live(self) -> int:
        """Requests between their arrival and their end."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Those that no worker has yet."""
        return len(self._room) + len(self._retry_queue.requests)

    def _take_in(self, event: Event, now: float) -> None:
        match event:
            case Progressed(output_tokens):
                self._progress(output_tokens, now)
            case Arrived(request):
                self._arrive(request, now)
            case Started(request):
                if (live := self._live.get(request)) is not None:
                    self._dispatched.start(live, now)
            case Finished(request, usage, answers):
                live = self._live.get(request)
                if live is not None and self._dispatched.finish(live, usage, answers, now):
                    self._bury(live.request, now)
            case Cancelled():
                self._cancel(event, now)
            case Failed():
                self._fail(event, now)
            case Returned():
                self._take_back(event, now)
            case Ticked():
                self._tick(now)
            case Credited() | Forgotten():
                self.clients.apply(event)
            case _:
                self.membership.apply(event, now)
                self._view.report_match_changes(self.policy)

    def _arrive(self, request: Request, now: float) -> None:
        if request.id in self._live:
            raise ValueError(f"request {request.id} is live")
        self.clients.remember(request.client, request.weight)
        if not self.cluster.able(request):
            self._out.append(Reject(request.id, Refusal.NO_WORKER))
        else:
            self._bear(RequestState(request, now), now)
            self._retry_queue.count_arrival()
            self._placed = True
            self.policy.enqueue(request, now)

    def _bear(self, live: RequestState, now: float) -> None:
        """A request is there, be it new or back from a worker."""
        self._live[live.request.id] = live
        self.shares.begin(live.request)
        self.fairness.opened(live.request, live.waiting_since, now, begun=live.resumed_output > 0)

    def _bury(self, request: Request, now: float) -> None:
        """It is gone; the last that is done for it."""
        del self._live[request.id]
        self.fairness.closed(request, now)
        self.shares.end(request.client)

    def _make_room(self, arrival: Request, now: float) -> None:
        """Let an arrival that found no room anywhere wait, and refuse what is too much then.

        Asked after the turns are given: a full waiting room must not keep an idle worker idle.
        """
        if (live := self._live.get(arrival.id)) is None or live.stage is not RequestStage.WAITING:
            return
        self._room.enter(arrival, now, self.shares.of(arrival))
        surplus = self._room.surplus(arrival.id)
        for request, reason in surplus:
            self._withdraw(self._live[request], now)
            self._out.append(Reject(request, reason, self._room.retry_after(now)))
        if surplus:  # what was behind the head of a queue may fit where that did not
            self._give_turns(now)

    def _give_turns(self, now: float) -> None:
        """Send what the policy lets go; asked only while anything waits."""
        while (self._placed or self._room.waiters) and (choice := self.policy.next(now)) is not None:
            self._dispatch(choice, now)

    def _dispatch(self, choice: Choice, now: float) -> None:
        request = choice.request.id
        self._placed = self._placed and request in self._room.waiters
        self._room.leave(request, now, served=True)
        self._out.append(self._dispatched.send(self._live[request], choice, now))

    def _resend(self, now: float) -> None:
        """Send what came back to workers that have not failed it, first come, first served."""
        for live in list(self._retry_queue.requests.values()):
            request = live.request
            serving = self.cluster.able(request)
            others = [worker for worker in serving if worker not in live.failed_workers]
            if not others:
                self._abandon(live, Refusal.NO_RETRY if serving else Refusal.NO_WORKER, now)
            elif able := [worker for worker in others if self._view.admits(worker, request, live.resumed_output)]:
                self._retry_queue.remove(request.id)
                worker = self.policy.resend(request, able, now)
                self._out.append(self._dispatched.send(live, Choice(request, worker, "tried again"), now))

    def _progress(self, output_tokens: Mapping[RequestId, int], now: float) -> None:
        for request, tokens in output_tokens.items():
            if (live := self._live.get(request)) is not None:
                self._dispatched.progress(live, tokens, now)

    def _cancel(self, event: Cancelled, now: float) -> None:
        if (live := self._live.get(event.request)) is None:
            return
        if live.worker is not None:
            self._dispatched.break_off(live, event.usage, now)
            if live.charged_output:
                self.estimates.answers.learn(live.request, live.charged_output)
            self._bury(live.request, now)
        elif live.stage is RequestStage.RETURNED:
            self._bury(live.request, now)
            self._retry_queue.remove(event.request)
        else:
            self._withdraw(live, now)

    def _fail(self, event: Failed | Returned, now: float) -> RequestState | None:
        """End a request that failed at a worker; returns what was known of it, and None if it was at none."""
        live = self._live.get(event.request)
        if live is None or live.worker is None:
            return None
        if event.accepted:
            self._dispatched.break_off(live, event.usage, now, broken=event.fault is Fault.BROKEN)
        else:
            self._dispatched.refund(live, now)
        self._bury(live.request, now)
        self.membership.on_failure(live.worker, event.fault, now)
        return live

    def _take_back(self, event: Returned, now: float) -> None:
        """Let a request go to another worker as soon as one has room, if it may."""
        if (live := self._fail(event, now)) is None or live.worker is None:
            return
        self._bear(live, now)
        if not self._retry_queue.add(live, event, now, in_use=self.cluster.in_use(live.worker)):
            if len(live.suspects) == 1:
                self.membership.blame_suspects(live, now)
            self._abandon(live, Refusal.NO_RETRY, now)

    def _abandon(self, live: RequestState, reason: Refusal, now: float) -> None:
        """Give up a request that came back; what is owed for it is paid."""
        self._bury(live.request, now)
        self._retry_queue.remove(live.request.id)
        self._out.append(Reject(live.request.id, reason))

    def _withdraw(self, live: RequestState, now: float) -> None:
        """End a request that waits."""
        self.policy.withdraw(live.request.id, now)
        self._room.leave(live.request.id, now, served=False)
        self._bury(live.request, now)

    def _place_anew(self, requests: Sequence[Request], now: float) -> None:
        """Give requests that the policy gave up back to it, or turn away those that no worker serves."""
        self._placed = True
        for request in requests:
            if self.cluster.able(request):
                self.policy.enqueue(request, now)
            else:
                self._room.leave(request.id, now, served=False)
                self._bury(request, now)
                self._out.append(Reject(request.id, Refusal.NO_WORKER))

    def _tick(self, now: float) -> None:
        self._wake = inf
        for request in self._room.expired(now):
            self._withdraw(self._live[request], now)
            self._out.append(Reject(request, Refusal.EXPIRED, self._room.retry_after(now)))
        for live in self._retry_queue.expired(now):
            self._abandon(live, Refusal.EXPIRED, now)

    def _set_alarm(self, now: float) -> None:
        """Ask to be woken for the next deadline, unless an earlier alarm is set: a vain waking is cheap."""
        deadline = min(self.cluster.next_deadline, self._dispatched.next_estimate)
        if self._retry_queue.requests:
            deadline = min(deadline, self._retry_queue.next_deadline)
        if self._room.waiters:
            deadline = min(deadline, self._room.next_deadline, self.policy.next_deadline)
        if deadline < self._wake and (due := max(deadline, now)) != self._wake:
            self._wake = due
            self._out.append(WakeAt(due))
