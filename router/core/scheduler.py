"""The scheduler: events in, commands out. Synchronous, total, deterministic.

Theory of operation
===================
`handle(event, now)` takes in what happened and answers what is to be done; the same events at the same times give
the same commands. It never waits, and never asks what time it is. The policy owns the requests that wait, and says
which goes next; the window of each worker says whether one may; the scheduler keeps everything else about a request
from its arrival to its end: its bill, its place in every count, the prefixes that follow from it.

A request's lifecycle, and who owns it:

    state      owner      Started  Progressed  Finished  Failed  Returned  Cancelled  otherwise
    ---------  ---------  -------  ----------  --------  ------  --------  ---------  ------------------------------
    WAITING    policy     -        -           -         -       -         gone       its turn: Dispatch, IN_FLIGHT
                                                                                      too late, too much: Reject
    IN_FLIGHT  gateway    STARTED  STARTED     gone      gone    RETURNED  gone       its worker leaves: stays
    STARTED    gateway    -        charged     gone      gone    RETURNED  gone       its worker leaves: stays
    RETURNED   scheduler  -        -           -         -       -         gone       room elsewhere: Dispatch
                                                                                      too late, no more tries: Reject

"Gone" is one function, `_end`: bill closed, place in the window and in every count given back, nothing left. An
event about a request that is gone is late news and changes nothing: the gateway's events and ours may cross.

What comes back from a worker ends there as well: its bill is closed, with all that the worker may have computed, and
the next worker's bill begins without it, so that a client pays once for a prompt and once for each token of output.
What the next worker computes anew is the router's doing and is charged to nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from router.core.accounts import NOTHING, Accounts, Charge, LinearCost
from router.core.backlog import Backlog
from router.core.cache_rules import FOLLOWED, Tracking
from router.core.cluster import DEPARTED, Cluster
from router.core.estimates import Estimates
from router.core.fairness import Fairness
from router.core.fleet_view import SchedulerView
from router.core.health import HealthRules
from router.core.live import Live, ReturnedPool, State
from router.core.membership import Membership
from router.core.model import (
    Arrived,
    Cancelled,
    ClientId,
    Command,
    Credited,
    Decision,
    Dispatch,
    Event,
    Failed,
    Fault,
    Finished,
    Forgotten,
    Progressed,
    Refusal,
    Reject,
    Request,
    RequestId,
    Returned,
    Started,
    Ticked,
    Usage,
    WakeAt,
)
from router.core.policy import Choice, Parameters, PolicyFactory, Surroundings
from router.core.prefix_map import Oracle, PrefixMap
from router.core.prompt_key import PromptKey
from router.core.recent_clients import DEBTORS, RecentClients
from router.core.service_gap import Outstanding
from router.core.shares import Shares
from router.core.waiting_room import WaitingLimits, WaitingRoom
from router.core.window import LearnedWindow, Window

CHUNKS_OF_A_LANDMARK: Final = 80
"""Of chunks in the prefix tree, for each place that is remembered of a prompt: 50,000 by default."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the core can be told, apart from the policy's own parameters."""

    cost: LinearCost = field(default_factory=LinearCost)
    waiting: WaitingLimits = field(default_factory=WaitingLimits)
    window: Window = field(default_factory=LearnedWindow)
    """The limit of each worker, which has one like this of its own."""
    health: HealthRules = field(default_factory=HealthRules)
    prefix_limit: int = 4_000_000
    """Chunks in the prefix tree, over all workers; and as many blocks of those whose events tell what they hold."""
    match_minimum: int = 64
    """Tokens; a shorter match is no match."""
    kv_tokens: int = 400_000
    """Capacity believed of a worker that does not tell its own, in tokens."""
    tracking: Tracking = FOLLOWED
    """What is followed of the workers' caches."""
    client_limit: int = 10_000
    """Clients remembered that have nothing under way; of others, only what they owe ..."""
    debtor_limit: int = DEBTORS
    """... of so many in each queue, and if more owe anything, not of those that owe least."""
    departed_limit: int = DEPARTED
    """Workers remembered that left."""
    cached_in_flight: int = 1_000_000
    """Predicted-cached tokens that one client may have in flight uncharged."""


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
        self.estimates = Estimates(landmarks=settings.prefix_limit // CHUNKS_OF_A_LANDMARK)
        self.accounts = Accounts(settings.cached_in_flight)
        self.cluster = Cluster(settings.window, settings.health, settings.departed_limit)
        self.backlog = Backlog()
        self.prefixes = PrefixMap(
            settings.prefix_limit,
            self.estimates,
            settings.match_minimum,
            settings.kv_tokens,
            settings.tracking,
            oracle,
        )
        self.mirror = self.prefixes.mirror
        self.blocks = self.prefixes.blocks
        self._view = SchedulerView(self.cluster, self.prefixes)
        self.shares = Shares()
        self.policy = policy(
            Surroundings(
                self._view, settings.cost, random, parameters, self.backlog, settings.debtor_limit, self.shares
            )
        )
        self.fairness = Fairness(settings.cost, self.shares, pooled=self.policy.properties.pooled)
        self.backlog.subscribe(self.fairness)
        self.membership = Membership(self.cluster, self.prefixes, self.policy, self.fairness, self._place_anew)
        self.weights: dict[ClientId, float] = {}
        """Every client remembered, with the weight it had when it came last."""
        self._recent = RecentClients(settings.client_limit)
        self._live: dict[RequestId, Live] = {}
        self._room = WaitingRoom(settings.waiting)
        self._returned = ReturnedPool(settings.health, settings.waiting.time_to_live)
        """It goes before all that waits."""
        self._placed = False
        """Whether the policy was given a request by this event, so that it may have promised it a place."""
        self._wake: float | None = None
        self._out: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in an event and answer what follows from it; `now` never falls.

        Raises ValueError for an `Arrived` whose id is in use.
        """
        self._out = []
        self._placed = False
        self.cluster.advance(now)
        self._take_in(event, now)
        if self.cluster.barred:
            self.membership.unbar(now)
        if self.cluster.silent:
            self.membership.bar_silent(now)
        if self._returned:
            if self._placed and (choice := self.policy.next(now)) is not None:
                self._dispatch(choice, now)
            self._resend(now)
        while (choice := self.policy.next(now)) is not None:
            self._dispatch(choice, now)
        if isinstance(event, Arrived):
            self._make_room(event.request.id, now)
            self._forget_clients()
        self._set_alarm(now)
        return self._out

    @property
    def live(self) -> int:
        """Requests between their arrival and their end."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Those that no worker has yet."""
        return len(self._room) + len(self._returned)

    def meet(self, client: ClientId, weight: float) -> None:
        """A client is there."""
        self.weights[client] = weight
        self._recent.came(client)

    def _forget_clients(self) -> None:
        """Forget a few of those that have nothing under way, if there are too many."""
        for client in self._recent.to_forget(self._is_busy):
            self._forget(client)

    def _forget(self, client: ClientId) -> None:
        del self.weights[client]
        self.accounts.forget(client)
        self.fairness.forget(client)
        self.policy.forget(client)

    def _is_busy(self, client: ClientId) -> bool:
        if self.accounts.in_flight(client) or self.backlog.of_client(client):
            return True
        return any(live.request.client == client for live in self._returned)

    def _take_in(self, event: Event, now: float) -> None:
        match event:
            case Progressed(output_tokens):
                for request, tokens in output_tokens.items():
                    self._progress(request, tokens, now)
            case Arrived(request):
                self._arrive(request, now)
            case Started(request):
                self._start(request, now)
            case Finished(request, usage, answers):
                self._finish(request, usage, answers, now)
            case Cancelled(request, usage):
                self._cancel(request, usage, now)
            case Failed(request, accepted, usage, fault):
                self._fail(request, usage, fault, now, accepted=accepted)
            case Returned():
                self._take_back(event, now)
            case Ticked():
                self._tick(now)
            case Credited() | Forgotten():
                self._obey(event)
            case _:
                self.membership.take_in(event, now)
                self._tell_changes()

    def _obey(self, wish: Credited | Forgotten) -> None:
        """What an operator wants for a client."""
        match wish:
            case Credited(client, cost):
                self.policy.grant(client, cost)
                self.fairness.granted(client, cost)
            case Forgotten(client):
                if client in self.weights and not self._is_busy(client):
                    self._recent.drop(client)
                    self._forget(client)

    def _arrive(self, request: Request, now: float) -> None:
        if request.id in self._live:
            raise ValueError(f"request {request.id} is live")
        self.meet(request.client, request.weight)
        if not self.cluster.serving(request.model):
            self._out.append(Reject(request.id, Refusal.NO_WORKER))
        else:
            self._bear(Live(request, now))
            self._room.enter(request, now, self.shares.of(request))
            self._returned.arrived()
            self._enqueue(request, now)

    def _bear(self, live: Live) -> None:
        """A request is there, be it new or back from a worker."""
        self._live[live.request.id] = live
        self.shares.begin(live.request)

    def _bury(self, request: Request) -> None:
        """It is gone; the last that is done for it."""
        del self._live[request.id]
        self.shares.end(request.client)

    def _enqueue(self, request: Request, now: float) -> None:
        self._placed = True
        self.policy.enqueue(request, now)

    def _make_room(self, arrival: RequestId, now: float) -> None:
        """Refuse what is too much after an arrival that found no room anywhere.

        Asked after the turns are given: a full waiting room must not keep an idle worker idle.
        """
        for request, reason in self._room.surplus(arrival):
            self._withdraw(self._live[request], now)
            self._out.append(Reject(request, reason, self._room.retry_after(now)))

    def _dispatch(self, choice: Choice, now: float) -> None:
        self._room.leave(choice.request.id, now, served=True)
        self._send(choice, now)

    def _resend(self, now: float) -> None:
        """Send what came back to workers that have not failed it, first come, first served."""
        for live in self._returned:
            request = live.request
            others = [worker for worker in self.cluster.serving(request.model) if worker not in live.failed]
            if not others:
                served = self.cluster.serving(request.model)
                self._abandon(live, Refusal.NO_RETRY if served else Refusal.NO_WORKER)
                continue
            size, match = self.prefixes.look(request)
            size += live.paid_output
            if able := [worker for worker in others if self.cluster[worker].admits(size - match.get(worker, 0))]:
                self._returned.remove(request.id)
                worker = self.policy.resend(request, able, now)
                self._send(Choice(request, worker, "tried again"), now)

    def _send(self, choice: Choice, now: float) -> None:
        request, worker = choice.request, choice.worker
        size, match = self.prefixes.look(request)
        expected = self.estimates.expected_output(request)
        state = self.cluster[worker]
        turn = state.turn_of_next(now)
        cached = self.mirror.dispatched(request, worker, now, match.get(worker, 0), size, turn)
        live = self._live[request.id]
        live.state, live.worker = State.IN_FLIGHT, worker
        if live.paid is None:
            charge = self.accounts.open(request, worker, size, cached)
        else:
            charge = self.accounts.open(request, worker, 0, 0)
            size += live.paid.output
            expected = max(0, expected - live.paid.output)
        live.outstanding = Outstanding(expected, charge.after.cached, charge.after.extend)
        decision = Decision(
            request.client,
            match,
            self.policy.credit(request.client, worker),
            state.load,
            state.window.limits,
            choice.passed,
        )
        state.add(request.id, size - cached, expected, now, streamed=request.streamed)
        self.fairness.dispatched(request, worker, live.outstanding, now - live.since)
        self.policy.charged(charge)
        self._tell_changes()
        self.blocks.expect(request, worker)
        self._out.append(Dispatch(request.id, worker, cached, choice.why, decision))

    def _start(self, request: RequestId, now: float, *, seen: bool = True) -> None:
        live = self._live.get(request)
        if live is not None and live.worker is not None and live.state is State.IN_FLIGHT:
            live.state = State.STARTED
            state = self.cluster[live.worker]
            state.start(request, now, seen=seen)
            if seen:
                self.mirror.started(request, now)
                self._blame_suspects(live, now)
            self.policy.started(live.request, live.worker)
            served = self.settings.cost(self.accounts.start(request))
            state.serve(request, served, 0)
            self.fairness.served(live.request, live.worker, served, now)

    def _progress(self, request: RequestId, tokens: int, now: float) -> None:
        live = self._live.get(request)
        if live is not None and live.worker is not None:
            if live.state is State.IN_FLIGHT:
                self._start(request, now)
            self.cluster[live.worker].heard(now)
            self._serve(live, self.accounts.progress(request, tokens - live.paid_output), now)
            self.mirror.progressed(request, tokens)
            self._tell_changes()

    def _finish(self, request: RequestId, usage: Usage | None, answers: tuple[PromptKey, ...], now: float) -> None:
        live = self._live.get(request)
        if live is None or live.worker is None:
            return
        if usage is not None:
            self.estimates.learn(live.request, usage, answers)
        self.cluster[live.worker].succeeded(request, now)
        self._blame_suspects(live, now)
        self._settle(live, usage, now, answers)

    def _cancel(self, request: RequestId, usage: Usage | None, now: float) -> None:
        live = self._live.get(request)
        if live is None:
            return
        if live.state is State.RETURNED:
            self._bury(live.request)
            self._returned.remove(request)
        elif live.worker is None:
            self._withdraw(live, now)
        else:
            self._settle(live, usage, now)

    def _fail(
        self, request: RequestId, usage: Usage | None, fault: Fault, now: float, *, accepted: bool
    ) -> Live | None:
        """End a request that failed at a worker; returns what was known of it, and None if it was at none."""
        live = self._live.get(request)
        if live is None or live.worker is None:
            return None
        worker = live.worker
        if accepted:
            self._settle(live, usage, now)
        else:
            self.mirror.ended(request, None, (), now, computed=False)
            self._end(live, self.accounts.refund(request), now)
        if fault is Fault.BROKEN:
            self.membership.blame(worker, now)
        elif fault is Fault.FULL and worker in self.cluster:
            self.cluster[worker].turned_away(now)
        elif fault is Fault.ERROR and worker in self.cluster:
            self.cluster[worker].heard(now)
        return live

    def _take_back(self, event: Returned, now: float) -> None:
        """Let a request go to another worker as soon as one has room, if it may."""
        live = self._fail(event.request, event.usage, event.fault, now, accepted=event.accepted)
        if live is None or live.worker is None:
            return
        self._bear(live)
        if not self._returned.add(live, event, now, in_use=self.cluster.in_use(live.worker)):
            if len(live.suspects) == 1:
                self._blame_suspects(live, now)
            self._abandon(live, Refusal.NO_RETRY)

    def _abandon(self, live: Live, reason: Refusal) -> None:
        """Give up a request that came back; what is owed for it is paid."""
        self._bury(live.request)
        self._returned.remove(live.request.id)
        self._out.append(Reject(live.request.id, reason))

    def _blame_suspects(self, live: Live, now: float) -> None:
        """Another worker does what these did not."""
        suspects, live.suspects = live.suspects, ()
        for worker in suspects:
            self.membership.blame(worker, now)

    def _settle(self, live: Live, usage: Usage | None, now: float, answers: tuple[PromptKey, ...] = ()) -> None:
        """End a request that was computed, at least in part: what the engine did is paid."""
        self._start(live.request.id, now, seen=False)
        if live.paid is not None and usage is not None:
            usage = Usage(0, max(0, usage.output_tokens - live.paid.output), 0)
        self.mirror.ended(live.request.id, usage if live.paid is None else None, answers, now, computed=True)
        charge = self.accounts.settle(live.request.id, usage)
        live.paid = charge.after.plus(live.paid or NOTHING)
        self._end(live, charge, now)

    def _end(self, live: Live, charge: Charge, now: float) -> None:
        """Close a dispatched request: after this, nothing of it is left in any count."""
        request, worker = live.request, charge.worker
        if live.state is State.STARTED:
            self._serve(live, charge, now)
        else:
            self.policy.charged(charge)
        self.policy.ended(request, worker)
        self.blocks.ended(request.id, stored=live.state is State.STARTED)
        self.fairness.ended(request, worker, live.outstanding)
        self.cluster.remove(request.id, worker, now, computed=live.state is State.STARTED)
        self.membership.forget_if_gone(worker)
        self._tell_changes()
        self._bury(request)

    def _serve(self, live: Live, charge: Charge, now: float) -> None:
        self.policy.charged(charge)
        cost = charge.at(self.settings.cost)
        self.cluster[charge.worker].serve(live.request.id, cost, charge.after.output - charge.before.output)
        self.fairness.served(live.request, charge.worker, cost, now)
        self.fairness.came_to(charge.worker, live.outstanding, charge.after)

    def _withdraw(self, live: Live, now: float) -> None:
        """End a request that waits."""
        self.policy.withdraw(live.request.id, now)
        self._room.leave(live.request.id, now, served=False)
        self._bury(live.request)

    def _tell_changes(self) -> None:
        """What waits must know its matches at any time: an order by longest match is wrong with old ones."""
        if changed := self.prefixes.changed():
            for worker, requests in changed.items():
                self.policy.match_changed(worker, requests)

    def _place_anew(self, requests: Sequence[Request], now: float) -> None:
        """Give requests that the policy gave up back to it, or turn away those that no worker serves."""
        self._placed = True
        for request in requests:
            if self.cluster.serving(request.model):
                self._enqueue(request, now)
            else:
                self._room.leave(request.id, now, served=False)
                self._bury(request)
                self._out.append(Reject(request.id, Refusal.NO_WORKER))

    def _tick(self, now: float) -> None:
        self._wake = None
        for request in self._room.expired(now):
            self._withdraw(self._live[request], now)
            self._out.append(Reject(request, Refusal.EXPIRED, self._room.retry_after(now)))
        for live in self._returned.expired(now):
            self._abandon(live, Refusal.EXPIRED)

    def _set_alarm(self, now: float) -> None:
        """Ask to be woken for the next deadline, unless an earlier alarm is set: a vain waking is cheap."""
        due = self._wake
        returned = self._returned.next_deadline if self._returned else None
        for deadline in (self._room.next_deadline, self.cluster.next_deadline, self.policy.next_deadline, returned):
            if deadline is not None and (due is None or deadline < due):
                due = max(deadline, now)
        if due is not None and due != self._wake:
            self._wake = due
            self._out.append(WakeAt(due))
