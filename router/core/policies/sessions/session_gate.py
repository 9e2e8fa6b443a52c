"""The gate: admits agent sessions to the fleet's KV cache, before any policy.

Agents resend a growing prompt. While the contexts of all active sessions exceed the KV cache of the fleet, their calls
evict each other's prefixes, nearly every call is prefilled in full, and slow calls keep sessions active. Fewer sessions
at a time are served faster than all at once. So the gate gives sessions places, each a reservation of its context and
what it will grow by in one worker's KV cache, and holds back the calls of those that have none.

- *Open.* While what is hot (sessions with a call, or idle for less than a limit) fits in `fill` times the KV cache,
  every call goes to the policy as it is, and a session's place is where its last call was dispatched.
- *Closed.* Calls of sessions with places go to the policy, for their worker only. The others wait.
- *Order.* The next place goes to the client with the least service per weight, the unspent turns of its sessions
  included, and within the client to the session that began first. Service is counted as in VTC ("Fairness in Serving
  Large Language Models", Algorithm 2). A session that fits may pass one that does not, `PATIENCE` times; then room is
  kept for that one, at the worker with most of it.
- *Losing a place.* Only between calls, and only if somebody waits: after an idle limit to anyone, the longest idle
  first; or, once its turn is spent or its worker has more reserved than it may, to a client with less service. A turn
  is `turn` times the cost of its context, and begins when its first prefill is over: a session that has just been
  computed again is used before it is evicted again.
- *Overfull.* A worker may have more reserved than it may, because contexts grow, or because sessions got their places
  while the gate was open. Then a next call there counts as one that waits: either others lose their places, or it does.

Calls below `grace` tokens, and those of no session, are not held back and reserve nothing. Where the KV capacity of a
worker is not known, the gate of its models is open.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

from router.core.clients.sessions.session import Session, SessionClient
from router.core.clients.sessions.session_table import SessionTable
from router.core.model.commands import Deficit
from router.core.model.cost import Charge
from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.model.saved import Counters, Groups
from router.core.policies.base import Choice, Policy, PolicyFactory
from router.core.policies.context import PolicyContext
from router.core.policies.sessions.paused_calls import PausedCalls
from router.core.policies.sessions.places import Places
from router.core.policies.sessions.pools import SessionPool, SessionPools
from router.core.policies.sessions.session_parameters import SessionParameters

PATIENCE: Final = 8
"""How many sessions may pass one that does not fit yet."""


class Loss(StrEnum):
    """Why a session lost its place."""

    IDLE = "idle"
    TURN = "turn"
    OVERFULL = "overfull"
    WORKER = "worker"
    """Its worker left, or lost its cache."""
    ENDED = "ended"
    """It ended, or was forgotten, or no session is hot any more."""


class Outlook(NamedTuple):
    """What the workers of a pool have for sessions that wait."""

    most: float
    """The most tokens that are free at one of them, or reserved for cold sessions there."""
    empty: bool
    """Whether at one of them nothing is reserved but for cold sessions."""
    overfull: bool
    """Whether one of them has more reserved than it may."""


class SessionGate(Policy):
    """Holds back the calls of sessions without a place, and lets the inner policy schedule all others."""

    def __init__(self, inner: Policy, context: PolicyContext, parameters: SessionParameters) -> None:
        self.inner = inner
        self.properties = inner.properties
        self.table = SessionTable(parameters.limit, by_label=parameters.by_label, by_prefix=parameters.by_prefix)
        self.places = Places()
        self.losses: dict[Loss, int] = dict.fromkeys(Loss, 0)
        self.paused = PausedCalls()
        self.recomputed_tokens = 0
        """Tokens of the contexts of sessions that got a place again which its worker did not hold any more."""
        self.parameters = parameters
        self._inner_gap = inner.properties.gap_quantum
        self._view = context.view
        self._cost = context.cost
        self._shares = context.shares
        self._backlog = context.backlog
        self._pools = SessionPools(context.view)
        self._clients = self.table.clients
        self._spenders: dict[SessionClient, None] = {}
        """The clients with sessions that have a place, a spent turn and no call."""
        self._sessions: dict[RequestId, Session] = {}
        """The session of each live call that has one."""
        self._bound: dict[RequestId, Request] = {}
        """The calls that wait in the inner policy for one worker only, as they arrived."""
        self._inside = 0
        """How many requests wait in the inner policy."""
        self._idle: OrderedDict[Session, None] = OrderedDict()
        """Hot sessions without a call whose last answer did not end the turn, the longest idle first."""
        self._idle_after_turn: OrderedDict[Session, None] = OrderedDict()
        """Those whose last answer ended the turn."""
        self._changed = False
        """Whether anything has happened since the last look at the waiting sessions that may let one of them in."""
        self._most_admitted = 0

    def is_open(self, model: str, now: float) -> bool:
        """Return whether calls to this model go to the policy as they arrive."""
        return self._is_open(self._pools(model), now)

    def _is_open(self, pool: SessionPool, now: float) -> bool:
        capacity = pool.capacity(now)
        return capacity is None or pool.hot_tokens <= self.parameters.fill * capacity

    def session_of(self, request: RequestId) -> Session | None:
        """Return the session of a live call; None if it has none."""
        return self._sessions.get(request)

    # What happens to calls

    def call_began(self, request: Request, now: float) -> None:
        self.inner.call_began(request, now)
        self._advance(now)
        size = self._view.input_tokens(request)
        if request.worker is not None or size < self.parameters.grace:
            return
        session = self.table.recognize(request, now)
        if session is None:
            return
        client = session.client
        client.weight = self._shares.effective_weight(request)
        if session.calls:
            size = max(size, session.context)
        else:
            self._wake(session, now)
        session.calls[request.id] = size
        self._sessions[request.id] = session
        self._resize(session, size)
        if self.table.has_surplus:
            for old in self.table.to_forget():
                self._forget_session(old)

    def enqueue(self, request: Request, now: float) -> None:
        session = self._sessions.get(request.id)
        if session is None or self._is_open(self._pools(session.model), now):
            self._let_in(request, now)
        else:
            if session.worker is not None and len(session.calls) == 1:
                self._trim(session.worker, session)
            worker = session.worker
            if worker is not None and worker in self._view.able(request):
                self._let_in_at(request, worker, now)
            elif worker is not None or not self._is_shared(session, request):
                self._let_in(request, now)  # while it waited, its session would keep the place that others wait for
            else:
                self._pause(session, request, now)

    def _is_shared(self, session: Session, request: Request) -> bool:
        """Return whether any worker that a call may go to gives places to its session."""
        return not self._view.able(request).keys().isdisjoint(self._pools(session.model).workers)

    def _let_in(self, request: Request, now: float) -> None:
        self._inside += 1
        self.inner.enqueue(request, now)

    def _let_in_at(self, request: Request, worker: WorkerId, now: float) -> None:
        self._bound[request.id] = request
        self._let_in(replace(request, worker=worker), now)

    def _pause(self, session: Session, request: Request, now: float) -> None:
        self.paused.add(session, request, now)
        self._backlog.add(None, session.client.name, now)
        self._changed = True

    def _unpause(self, session: Session, request: RequestId, now: float) -> Request:
        """Stop holding back a call, and return it."""
        self._backlog.remove(None, session.client.name, now)
        return self.paused.remove(session, request, now)

    def withdraw(self, request: RequestId, now: float) -> None:
        session = self._sessions.get(request)
        if session is not None and request in session.paused:
            self._unpause(session, request, now)
            self._changed = True
            return
        self._inside -= 1
        self._bound.pop(request, None)
        self.inner.withdraw(request, now)

    def next(self, now: float) -> Choice | None:
        self._advance(now)
        if self._changed and len(self.paused):
            self._changed = False
            self._admit(now)
        if not self._inside or (choice := self.inner.next(now)) is None:
            return None
        self._inside -= 1
        self._bound.pop(choice.request.id, None)
        self._follow(choice.request, choice.worker, now)
        return choice

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:
        worker = self.inner.resend(request, workers, now)
        self._follow(request, worker, now)
        return worker

    def resume(self, request: Request, worker: WorkerId, now: float) -> None:
        self.inner.resume(request, worker, now)
        self._follow(request, worker, now)

    def _follow(self, request: Request, worker: WorkerId, now: float) -> None:
        """Let the place of a session follow a call that is dispatched to a worker of its pool. Where the answer is
        computed apart from the prompt, the place is where the prompt is computed.
        """
        session = self._sessions.get(request.id)
        if session is None or request.prefilled or session.worker == worker:
            return
        if worker not in self._pools(session.model).workers:
            return
        if session.worker is None:
            self._give_place(session, request, worker, now)
        else:
            self.places.clear(session)
            self.places.give(session, worker)
            self._changed = True

    def request_charged(self, charge: Charge) -> None:
        self.inner.request_charged(charge)
        client = self._clients.get(charge.client)
        if client is None:
            return
        cost = charge.at(self._cost)
        client.served += cost / client.weight
        session = self._sessions.get(charge.request)
        if session is not None:
            if session.prefilled and cost > 0.0 and session.turn_left > 0.0:
                self._spend(session, cost)
            extend, cached, output = charge.after
            if extend + cached:
                session.calls[charge.request] = extend + cached + output

    def _spend(self, session: Session, cost: float) -> None:
        spent = min(session.turn_left, cost)
        session.turn_left -= spent
        session.client.unspent -= spent

    def request_started(self, request: Request, worker: WorkerId) -> None:
        self.inner.request_started(request, worker)
        session = self._sessions.get(request.id)
        if session is not None and session.worker == worker:
            session.prefilled = True

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        self.inner.request_ended(request, worker)

    def answer_ended(self, request: Request, answers: tuple[PromptKey, ...], ended_turn: bool | None) -> None:
        self.inner.answer_ended(request, answers, ended_turn)
        session = self._sessions.get(request.id)
        if session is not None:
            session.ended_turn = bool(ended_turn)
            self.table.answered(session, answers)

    def call_ended(self, request: Request, now: float) -> None:
        self.inner.call_ended(request, now)
        session = self._sessions.pop(request.id, None)
        if session is None:
            return
        size = session.calls.pop(request.id)
        if session.calls:
            return
        client, before = session.client, session.reserved
        self._resize(session, size)
        if request.last_of_session:
            self._cool(session)
            self._forget_session(session)
            return
        session.idle_since = now
        (self._idle_after_turn if session.ended_turn else self._idle)[session] = None
        if session.worker is not None and session.turn_left <= 0.0:
            client.spent[session] = None
            self._spenders[client] = None
        # Nothing else of a call's end lets a waiting session in: room, or sessions that can lose their places.
        if client.spent or session.worker is None or session.reserved < before or self._is_overfull(session.worker):
            self._changed = True

    def _unspend(self, session: Session) -> None:
        """Note that a session has a call again, or no place, or has been idle for too long."""
        client = session.client
        if session in client.spent:
            del client.spent[session]
            if not client.spent:
                del self._spenders[client]

    # How sessions become hot and cold

    def _wake(self, session: Session, now: float) -> None:
        """Note that a session without a call has one now."""
        client = session.client
        self._unspend(session)
        self._idle.pop(session, None)
        self._idle_after_turn.pop(session, None)
        session.ended_turn = False
        if session.hot:
            return
        if session.worker is not None:
            self.places.set_cold(session, cold=False)
        else:
            session.since = now
            session.displaced = False
        if not client.hot:
            others = [other.served for other in self._clients.values() if other.hot]
            client.served = max(client.served, min(others, default=client.served))
        session.hot = True
        client.hot += 1
        self._pools(session.model).hot_tokens += session.reserved

    def _cool(self, session: Session) -> None:
        """Note that a hot session without a call is not hot any more."""
        session.hot = False
        session.client.hot -= 1
        self._unspend(session)
        pool = self._pools(session.model)
        pool.hot_tokens -= session.reserved
        if session.worker is not None:
            self.places.set_cold(session, cold=True)
        if pool.hot_tokens <= 0:
            self._vacate(pool)

    def _vacate(self, pool: SessionPool) -> None:
        """Take the places of a pool's sessions, none of which is hot any more."""
        for worker in pool.workers:
            for session in tuple(self.places.at(worker)):
                if not session.hot:
                    self._take_place(session, Loss.ENDED)

    def _advance(self, now: float) -> None:
        """Find the sessions that have been idle for longer than the limit."""
        parameters = self.parameters
        for idle, limit in ((self._idle, parameters.idle), (self._idle_after_turn, parameters.idle_after_turn)):
            while idle:
                session = next(iter(idle))
                if session.idle_since + limit > now:
                    break
                del idle[session]
                self._cool(session)
                self._changed = True

    @property
    def next_deadline(self) -> float:
        """The earlier of the inner policy's deadline and the end of the next idle limit."""
        deadline = self.inner.next_deadline if self._inside else inf
        if len(self.paused):
            parameters = self.parameters
            for idle, limit in ((self._idle, parameters.idle), (self._idle_after_turn, parameters.idle_after_turn)):
                if idle:
                    deadline = min(deadline, next(iter(idle)).idle_since + limit)
        return deadline

    def _resize(self, session: Session, context: int) -> None:
        """Set the size of a session's context, in tokens."""
        session.context = context
        reserved = context + self.parameters.growth
        change = reserved - session.reserved
        if session.hot:
            self._pools(session.model).hot_tokens += change
        if session.worker is not None:
            session.client.admitted_tokens += change
        self.places.resize(session, reserved)

    # Places

    def _give_place(self, session: Session, request: Request, worker: WorkerId, now: float) -> None:
        """Give a session a place, and a turn, for this call of it, and let its paused calls in."""
        if session.lost_context:
            held = self._view.match(request).get(worker, 0)
            self.recomputed_tokens += max(0, min(session.lost_context, session.context) - held)
            session.lost_context = 0
        client = session.client
        self.places.give(session, worker)
        self.table.place_changed(session)
        client.admitted_tokens += session.reserved
        session.turn_left = self.parameters.turn * self._cost.extend * session.context
        client.unspent += session.turn_left
        session.prefilled = False
        self._widen_gap(client)
        for paused in tuple(session.paused):
            call = self._unpause(session, paused, now)
            if worker in self._view.able(call):
                self._let_in_at(call, worker, now)
            else:
                self._let_in(call, now)
        session.displaced = False

    def _take_place(self, session: Session, reason: Loss) -> None:
        client = session.client
        self.losses[reason] += 1
        session.lost_context = session.context
        self.places.clear(session)
        self.table.place_changed(session)
        client.admitted_tokens -= session.reserved
        client.unspent -= session.turn_left
        self._unspend(session)
        session.turn_left = 0.0

    def _widen_gap(self, client: SessionClient) -> None:
        """Raise the bound on the service gap to what the unspent turns of this client's sessions may add to it."""
        if self._inner_gap is not None and client.admitted_tokens > self._most_admitted:
            self._most_admitted = client.admitted_tokens
            turns = (1.0 + self.parameters.turn) * self._cost.extend * self._most_admitted
            self.properties = replace(self.inner.properties, gap_quantum=self._inner_gap + turns)

    def _forget_session(self, session: Session) -> None:
        """Forget a session without a call."""
        if session.hot:
            self._idle.pop(session, None)
            self._idle_after_turn.pop(session, None)
            self._cool(session)
        if session.worker is not None:
            self._take_place(session, Loss.ENDED)
        self.table.drop(session)
        self._changed = True

    # Admission

    def _admit(self, now: float) -> None:
        """Give places to waiting sessions, in order, as far as they fit."""
        if any(self._is_open(pool, now) for pool in self._pools):
            self._let_all_in(now)
        blocked: dict[Session, None] = {}
        kept: dict[WorkerId, None] = {}
        while self._admit_next(blocked, kept, now):
            for each in blocked:
                each.passed += 1

    def _outlook(self, pool: SessionPool) -> "Outlook":
        """Return what a waiting session can hope for at the workers of a pool."""
        most, empty, overfull = -inf, False, False
        for worker in pool.workers:
            capacity = self._view.kv_tokens(worker)
            if capacity is None:
                continue
            room, reserved = self.parameters.fill * capacity, self.places.reserved(worker)
            cold = self.places.cold_tokens(worker)
            most = max(most, room - reserved + cold)
            empty = empty or reserved == cold
            overfull = overfull or reserved > room
        return Outlook(most, empty, overfull)

    def _let_all_in(self, now: float) -> None:
        """Let the paused calls in whose gate is open."""
        for session in tuple(self.paused.sessions):
            if self._is_open(self._pools(session.model), now):
                for request in tuple(session.paused):
                    self._let_in(self._unpause(session, request, now), now)

    def _admit_next(self, blocked: dict[Session, None], kept: dict[WorkerId, None], now: float) -> bool:
        """Give a place to the first waiting session that fits and is not blocked. Returns whether one got a place.

        `blocked`: the sessions that do not fit. `kept`: the workers at which room is kept for such sessions.
        """
        outlooks = {pool: self._outlook(pool) for pool in self._pools}
        richest = max([client.account for client in self._spenders], default=-inf)
        for session in self.paused.sessions:
            if session in blocked:
                continue
            outlook = outlooks[self._pools(session.model)]
            gives_way = outlook.overfull or richest > session.client.account
            worker = None
            if gives_way or outlook.empty or session.reserved <= outlook.most:
                worker = self._worker_for(session, kept)
            if worker is not None:
                self._give_place(session, next(iter(session.paused.values())), worker, now)
                return True
            if len(blocked) == PATIENCE:
                return False
            blocked[session] = None
            if session.passed >= PATIENCE and (roomiest := self._roomiest(session, kept)) is not None:
                kept[roomiest] = None
        return False

    def _rooms(self, session: Session, kept: Mapping[WorkerId, None]) -> Iterator[tuple[WorkerId, float]]:
        """Yield the workers that a waiting session may go to, each with the tokens that sessions may have there."""
        request, shared = next(iter(session.paused.values())), self._pools(session.model).workers
        for worker in self._view.able(request):
            capacity = self._view.kv_tokens(worker)
            if capacity is not None and worker in shared and worker not in kept:
                yield worker, self.parameters.fill * capacity

    def _roomiest(self, session: Session, kept: Mapping[WorkerId, None]) -> WorkerId | None:
        """Return the worker at which room is kept for a session that was passed too often."""
        rooms = [(room - self.places.reserved(worker), worker) for worker, room in self._rooms(session, kept)]
        return max(rooms)[1] if rooms else None

    def _worker_for(self, session: Session, kept: Mapping[WorkerId, None]) -> WorkerId | None:
        """Return a worker at which a waiting session fits, after others have lost their places there if need be; first
        one that still holds most of it. None if it fits nowhere.
        """
        matched = self._view.match(next(iter(session.paused.values())))
        rooms = [
            (-matched.get(worker, 0), self.places.reserved(worker) - room, worker, room)
            for worker, room in self._rooms(session, kept)
        ]
        rooms.sort()
        for _, _, worker, room in rooms:
            if self._take_cold(session, worker, room):
                return worker
        for _, _, worker, room in rooms:
            if self._take_spent(session, worker, room):
                return worker
        return None

    def _lacks(self, session: Session, worker: WorkerId, room: float, spare: int = 0) -> bool:
        """Return whether a session would not fit at a worker, even if others left it `spare` tokens. One that is larger
        than the room fits if nothing else is reserved.
        """
        reserved = self.places.reserved(worker) - spare
        return reserved > 0 and reserved + session.reserved > room

    def _take_cold(self, session: Session, worker: WorkerId, room: float) -> bool:
        """Make room for a session by taking the places of those that have been idle for too long. Returns whether it
        fits; if not, nothing has changed.
        """
        if self._lacks(session, worker, room, self.places.cold_tokens(worker)):
            return False
        while self._lacks(session, worker, room):
            self._take_place(self.places.coldest(worker), Loss.IDLE)
        return True

    def _take_spent(self, session: Session, worker: WorkerId, room: float) -> bool:
        """Make room for a session by taking the places of sessions of clients with more service, as `_take_cold`."""
        spare, losers = self.places.cold_tokens(worker), list[Session]()
        overfull = self.places.reserved(worker) > room
        for loser in self._losers(session, worker, overfull=overfull):
            losers.append(loser)
            spare += loser.reserved
            if not self._lacks(session, worker, room, spare):
                break
        else:
            return False
        while self.places.cold_tokens(worker):
            self._take_place(self.places.coldest(worker), Loss.IDLE)
        for loser in losers:
            self._take_place(loser, Loss.TURN if loser.turn_left <= 0.0 else Loss.OVERFULL)
        return True

    def _is_overfull(self, worker: WorkerId) -> bool:
        """Return whether more is reserved at a worker than sessions may have."""
        capacity = self._view.kv_tokens(worker)
        return capacity is not None and self.places.reserved(worker) > self.parameters.fill * capacity

    def _trim(self, worker: WorkerId, calling: Session) -> None:
        """Take places at a worker that has more reserved than it may, because contexts have grown or it got its
        sessions while the gate was open: of sessions between calls, also of the one that begins its next call now, the
        cold ones first, then those of the client with most service.
        """
        if not self._is_overfull(worker):
            return
        room, places = self.parameters.fill * (self._view.kv_tokens(worker) or 0), self.places
        while places.reserved(worker) > room and places.cold_tokens(worker):
            self._take_place(places.coldest(worker), Loss.IDLE)
        losers = [each for each in places.at(worker) if not each.calls or each is calling]
        losers.sort(key=_by_account)
        for loser in losers:
            if places.reserved(worker) <= room or len(places.at(worker)) == 1:
                return
            self._take_place(loser, Loss.OVERFULL)

    def _losers(self, session: Session, worker: WorkerId, *, overfull: bool) -> Iterator[Session]:
        """Yield the sessions at a worker that can lose their places to this one, of the client with most service first.

        `overfull`: whether more is reserved at the worker than sessions may have.
        """
        account = session.client.account
        if overfull:
            losers = [
                each for each in self.places.at(worker) if not each.calls and each.hot and each.client.account > account
            ]
            losers.sort(key=_by_account)
            yield from losers
            return
        richer = [client for client in self._spenders if client.account > account]
        richer.sort(key=_account, reverse=True)
        for client in richer:
            yield from [each for each in client.spent if each.worker == worker]

    # Workers, clients, state

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        self.inner.match_changed(worker, requests)

    def hold(self, now: float) -> None:
        self.inner.hold(now)

    def on_cache_lost(self, worker: WorkerId) -> None:
        self.inner.on_cache_lost(worker)
        for session in tuple(self.places.at(worker)):
            if not session.calls:
                self._displace(session)

    def _displace(self, session: Session) -> None:
        """Take the place of a session through no fault of its own: it goes first within its client."""
        self._take_place(session, Loss.WORKER)
        session.displaced = True
        self._changed = True

    def worker_joined(self, worker: WorkerId, now: float) -> None:
        self.inner.worker_joined(worker, now)
        self._pools.find_anew(self._count_hot)
        self._changed = True

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        left = self.inner.worker_left(worker, now)
        self._inside -= len(left)
        orphans = [self._bound.pop(request.id, request) for request in left]
        self._pools.find_anew(self._count_hot)
        for session in tuple(self.places.at(worker)):
            self._displace(session)
        for session in tuple(self.paused.by_client):
            unserved = [call for call in session.paused.values() if not self._is_shared(session, call)]
            orphans += [self._unpause(session, call.id, now) for call in unserved]
        return orphans

    def _count_hot(self) -> None:
        for session in self.table:
            if session.hot:
                self._pools(session.model).hot_tokens += session.reserved

    def deficit(self, client: ClientId, worker: WorkerId) -> Deficit:
        return self.inner.deficit(client, worker)

    def grant(self, client: ClientId, cost: float) -> None:
        self.inner.grant(client, cost)
        known = self._clients.get(client)
        if known is not None:
            known.served -= cost / known.weight

    def forget(self, client: ClientId) -> None:
        self.inner.forget(client)
        known = self._clients.pop(client, None)
        if known is not None:
            for session in tuple(known.sessions):
                self._forget_session(session)

    def forget_worker(self, worker: WorkerId) -> None:
        self.inner.forget_worker(worker)

    def saved(self) -> Iterator[Counters | Groups]:
        return self.inner.saved()

    def restore(self, counters: Counters | Groups) -> None:
        self.inner.restore(counters)

    def check_integrity(self) -> None:
        """Raise AssertionError if the places or the paused calls contradict the sessions."""
        sessions = list(self.table)
        self.paused.check_integrity(sessions)
        for worker, reserved in self.places:
            own = [each for each in sessions if each.worker == worker]
            assert reserved == sum([each.reserved for each in own]), f"{worker}: {reserved} reserved"
            assert set(own) == set(self.places.at(worker)), f"{worker}: other sessions"
            cold = sum([each.reserved for each in own if not each.hot])
            assert cold == self.places.cold_tokens(worker), f"{worker}: {cold} cold tokens"
        assert {each.worker for each in sessions if each.worker} == {worker for worker, _ in self.places}
        for client in self._clients.values():
            own = [each for each in sessions if each.client is client]
            placed = [each for each in own if each.worker is not None]
            assert set(client.sessions) == set(own), f"{client.name}: {len(client.sessions)} sessions"
            assert client.hot == sum(each.hot for each in own), f"{client.name}: {client.hot} hot sessions"
            assert client.admitted_tokens == sum([each.reserved for each in placed]), f"{client.name}: admitted"
            assert abs(client.unspent - sum([each.turn_left for each in placed])) < 1.0, f"{client.name}: unspent"
        assert not any(each.calls and not each.hot for each in sessions), "a session with a call is not hot"
        hot = sum([each.reserved for each in sessions if each.hot])
        assert hot == sum([pool.hot_tokens for pool in self._pools]), f"{hot} hot tokens"


def gated(policy: PolicyFactory, parameters: SessionParameters) -> PolicyFactory:
    """Return the policy with a gate for sessions before it."""

    def build(context: PolicyContext) -> Policy:
        return SessionGate(policy(context), context, parameters)

    return build


def _account(client: SessionClient) -> float:
    return client.account


def _by_account(session: Session) -> tuple[float, bool, float]:
    """Sorts sessions in the order in which they lose their places: those of the client with most service first, of
    these the spent ones, and then the youngest.
    """
    return -session.client.account, session.turn_left > 0.0, -session.since
