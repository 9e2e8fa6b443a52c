"""The gate: admits agent sessions to the fleet's KV cache, before any policy.

Agents resend a growing prompt. While the contexts of all active sessions exceed the KV cache of the fleet, their calls
evict each other's prefixes, nearly every call is prefilled in full, and slow calls keep sessions active. Fewer sessions
at a time are served faster than all at once. So the gate gives sessions places, and holds back the calls of sessions
without one. A place reserves, in one worker's KV cache, room for the session's context and for what it will grow by.

- *Open.* While what is hot (sessions with a call, or idle for less than a limit) fits in `fill` times the KV cache,
  every call goes to the policy as it is, and a session's place is where its last call was dispatched.
- *Closed.* Calls of sessions with places go to the policy, for their worker only. The others wait.
- *Order.* The next place goes to the client with the least service per weight, the unspent turns of its sessions
  included, and within the client to the session that began first. Service is counted as in VTC ("Fairness in Serving
  Large Language Models", Algorithm 2). A session that fits may pass one that does not, `PATIENCE` times; then room is
  kept for that one, at the worker with most of it.
- *Losing a place.* Only between calls, and only if somebody waits. After an idle limit a session loses its place to
  anyone, the longest idle first. Before that, it loses it to a client with less service, if its turn is spent, its
  worker is overfull, or its own client has been served more than the other one will have been after a turn. A turn is
  `turn` times the cost of the session's context, and begins when its first prefill is over: a session that has just
  been computed again is used before it is evicted again.
- *Overfull.* A worker may have more reserved than its KV cache holds, because contexts grow beyond `fill`, or because
  sessions got their places while the gate was open. Once all that is hot exceeds the whole KV cache of the fleet, a
  next call there counts as one that waits: either others lose their places, or it does. Until then the contexts still
  fit, and nobody need be computed again.

Calls below `grace` tokens, and those of no session, are not held back and reserve nothing. Where the KV capacity of a
worker is not known, the gate of its models is open.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from router.core.clients.sessions.session import Session, SessionClient
from router.core.clients.sessions.session_table import SessionTable
from router.core.model.commands import Deficit
from router.core.model.cost import Charge
from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.model.saved import Counters, Groups
from router.core.policies.base import Choice, Policy, PolicyFactory
from router.core.policies.context import PolicyContext
from router.core.policies.sessions.hot_sessions import HotSessions
from router.core.policies.sessions.paused_calls import PausedCalls
from router.core.policies.sessions.places import Loss, Places
from router.core.policies.sessions.pools import SessionPools
from router.core.policies.sessions.session_admission import SessionAdmission
from router.core.policies.sessions.session_parameters import SessionParameters


class SessionGate(Policy):
    """Holds back the calls of sessions without a place, and lets the inner policy schedule all others."""

    def __init__(self, inner: Policy, context: PolicyContext, parameters: SessionParameters) -> None:
        self.inner = inner
        self.properties = replace(inner.properties, follows_calls=True)
        self.table = SessionTable(parameters.limit, by_label=parameters.by_label, by_prefix=parameters.by_prefix)
        self.places = Places(self.table, parameters.turn * context.cost.extend)
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
        self._hot = HotSessions(self.table, self.places, self._pools, parameters)
        claim = (1.0 + parameters.turn) * context.cost.extend
        self._admission = SessionAdmission(
            context.view, self._pools, self.places, self.paused, fill=parameters.fill, claim=claim
        )
        self._bound: dict[RequestId, Request] = {}
        """The calls that wait in the inner policy for the worker of their session only, each as it arrived."""
        self._sessions: dict[RequestId, Session] = {}
        """The session of each live call that has one."""
        self._inside = 0
        """How many requests wait in the inner policy."""
        self._changed = False
        """Whether anything has happened since the last look at the waiting sessions that may let one of them in."""
        self._most_admitted = 0

    def is_open(self, model: str, now: float) -> bool:
        """Return whether calls to this model go to the policy as they arrive."""
        return self._hot.fit(self._pools(model), now)

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
            self._hot.wake(session, now)
        session.calls[request.id] = size
        self._sessions[request.id] = session
        self._resize(session, size)
        if self.table.has_surplus:
            for old in self.table.to_forget():
                self._forget_session(old)

    def enqueue(self, request: Request, now: float) -> None:
        session = self._sessions.get(request.id)
        if session is None or self.is_open(session.model, now):
            self._let_in(request, now)
        else:
            if session.worker is not None and len(session.calls) == 1 and self._hot.overflow(session.model, now):
                self._changed |= self._admission.trim(session.worker, session)  # it may take more than is lacking
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
        self._let_in(replace(request, worker=worker, in_place=True), now)

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
            self.places.move(session, worker)
            self._changed = True

    def request_sent(self, request: Request, charge: Charge, uncached: int, output: float) -> Deficit:
        deficit = self.inner.request_sent(request, charge, uncached, output)
        self._count(charge)
        return deficit

    def request_charged(self, charge: Charge) -> None:
        self.inner.request_charged(charge)
        self._count(charge)

    def _count(self, charge: Charge) -> None:
        """Count a charge as service of its client and its session."""
        client = self._clients.get(charge.client)
        if client is None:
            return
        cost = charge.cost
        client.served += cost / client.weight
        session = self._sessions.get(charge.request)
        if session is not None:
            if session.prefilled and cost > 0.0:
                self.places.spend(session, cost)
            extend, cached, output = charge.after
            if extend + cached:
                session.calls[charge.request] = extend + cached + output

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
        client = self._clients.get(request.client)
        if client is not None and (client.spent or self._is_ahead(client)):
            self._changed = True
        session = self._sessions.pop(request.id, None)
        if session is None:
            return
        size = session.calls.pop(request.id)
        if session.calls:
            return
        self._resize(session, size)
        if request.last_of_session:
            self._hot.remove(session)
            self._forget_session(session)
            return
        self._hot.rest(session, now)
        # Nothing else of a call's end lets a waiting session in: room, or sessions that can lose their places.
        worker = session.worker
        if session.client.spent or worker is None or self._admission.is_overfull(worker):
            self._changed = True

    def _is_ahead(self, client: SessionClient) -> bool:
        """Return whether a client has been served more than one that waits."""
        return len(self.paused) > 0 and client.served > self.paused.least_account

    def _resize(self, session: Session, context: int) -> None:
        """Set the size of a session's context. A smaller one leaves room for others."""
        before = session.reserved
        self._hot.resize(session, context)
        if session.reserved < before:
            self._changed = True

    def _advance(self, now: float) -> None:
        """Find the sessions that have been idle for longer than the limit."""
        if self._hot.remove_cold(now):
            self._changed = True

    @property
    def next_deadline(self) -> float:
        """The earlier of the inner policy's deadline and the end of the next idle limit."""
        deadline = self.inner.next_deadline if self._inside else inf
        return min(deadline, self._hot.next_deadline) if len(self.paused) else deadline

    # Places

    def _give_place(self, session: Session, request: Request, worker: WorkerId, now: float) -> None:
        """Give a session a place, and a turn, for this call of it, and let its paused calls in."""
        if session.lost_context:
            held = self._view.match(request).get(worker, 0)
            self.recomputed_tokens += max(0, min(session.lost_context, session.context) - held)
            session.lost_context = 0
        self.places.give(session, worker)
        self._widen_gap(session.client)
        for paused in tuple(session.paused):
            call = self._unpause(session, paused, now)
            if worker in self._view.able(call):
                self._let_in_at(call, worker, now)
            else:
                self._let_in(call, now)
        session.displaced = False

    def _widen_gap(self, client: SessionClient) -> None:
        """Raise the bound on the service gap to what the unspent turns of this client's sessions may add to it."""
        if self._inner_gap is not None and client.admitted_tokens > self._most_admitted:
            self._most_admitted = client.admitted_tokens
            turns = (1.0 + self.parameters.turn) * self._cost.extend * self._most_admitted
            self.properties = replace(self.properties, gap_quantum=self._inner_gap + turns)

    def _forget_session(self, session: Session) -> None:
        """Forget a session without a call."""
        if session.hot:
            self._hot.remove(session)
        if session.worker is not None:
            self.places.revoke(session, Loss.ENDED)
        self.table.drop(session)
        self._changed = True

    # Admission

    def _admit(self, now: float) -> None:
        """Give places to waiting sessions, in order, as far as they fit."""
        if any(self._hot.fit(pool, now) for pool in self._pools):
            self._let_all_in(now)
        for session, worker in self._admission.admitted():
            self._give_place(session, next(iter(session.paused.values())), worker, now)

    def _let_all_in(self, now: float) -> None:
        """Let the paused calls in whose gate is open."""
        for session in tuple(self.paused.sessions):
            if self.is_open(session.model, now):
                for request in tuple(session.paused):
                    self._let_in(self._unpause(session, request, now), now)

    # Workers, clients, state

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        self.inner.match_changed(worker, requests)

    def queue_newcomer(self, now: float) -> None:
        self.inner.queue_newcomer(now)

    def on_cache_lost(self, worker: WorkerId) -> None:
        self.inner.on_cache_lost(worker)
        for session in tuple(self.places.at(worker)):
            if not session.calls:
                self._displace(session)

    def _displace(self, session: Session) -> None:
        """Take the place of a session through no fault of its own: it goes first within its client."""
        self.places.revoke(session, Loss.WORKER)
        session.displaced = True
        self._changed = True

    def worker_joined(self, worker: WorkerId, now: float) -> None:
        self.inner.worker_joined(worker, now)
        self._hot.find_pools_anew()
        self._changed = True

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        left = self.inner.worker_left(worker, now)
        self._inside -= len(left)
        orphans = [self._bound.pop(request.id, request) for request in left]
        self._hot.find_pools_anew()
        for session in tuple(self.places.at(worker)):
            self._displace(session)
        for session in tuple(self.paused.by_client):
            unserved = [call for call in session.paused.values() if not self._is_shared(session, call)]
            orphans += [self._unpause(session, call.id, now) for call in unserved]
        return orphans

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
        self.places.check_integrity(sessions)
        self._hot.check_integrity()
        for client in self._clients.values():
            own = [each for each in sessions if each.client is client]
            assert set(client.sessions) == set(own), f"{client.name}: {len(client.sessions)} sessions"


def gated(policy: PolicyFactory, parameters: SessionParameters) -> PolicyFactory:
    """Return the policy with a gate for sessions before it."""

    def build(context: PolicyContext) -> Policy:
        return SessionGate(policy(context), context, parameters)

    return build
