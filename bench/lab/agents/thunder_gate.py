"""A gate by the rules of ThunderAgent ("ThunderAgent: A Simple, Fast and Program-Aware Agentic Inference System",
arXiv 2602.13692), as a baseline.

Every five seconds, a worker whose programs exceed its KV cache pauses the smallest ones: first those between calls, at
once, then those with a call, when it ends. Then paused programs with a call that waits get room again, the smallest
first, each at the worker with most room. A new program starts at once only if none waits and it fits. Its clients tell
ThunderAgent when a program is over; here one is over after the longest pause that a session makes between calls.
"""

from math import inf
from typing import Final

from router.core.clients.sessions.session import Session
from router.core.model.request import Request, WorkerId
from router.core.policies.base import Choice, Policy, PolicyFactory
from router.core.policies.context import PolicyContext
from router.core.policies.sessions.places import Loss
from router.core.policies.sessions.session_gate import SessionGate
from router.core.policies.sessions.session_parameters import SessionParameters

SECONDS: Final = 5.0
"""Between two looks at the workers."""
BUFFER: Final = 256
"""Tokens reserved for each program beside its context."""


class ThunderGate(SessionGate):
    """Pauses and resumes sessions by size."""

    def __init__(self, inner: Policy, context: PolicyContext, idle: float) -> None:
        """`idle`: seconds after which a session without a call is over."""
        parameters = SessionParameters(fill=1.0, idle=idle, idle_after_turn=idle, growth=BUFFER)
        super().__init__(inner, context, parameters)
        self._next_look = 0.0
        self._marked: dict[Session, None] = {}
        """Sessions with a call that are paused when it ends."""

    def enqueue(self, request: Request, now: float) -> None:
        session = self.session_of(request.id)
        if session is None:
            self._let_in(request, now)
            return
        if session.worker is None and not len(self.paused) and (worker := self._roomiest_for(session, request)):
            self._give_place(session, request, worker, now)
        if session.worker is None:
            self._pause(session, request, now)
        else:
            self._let_in_at(request, session.worker, now)

    def call_ended(self, request: Request, now: float) -> None:
        session = self.session_of(request.id)
        super().call_ended(request, now)
        if session is not None and not session.calls and session in self._marked:
            del self._marked[session]
            if session.worker is not None:
                self.places.revoke(session, Loss.OVERFULL)

    def next(self, now: float) -> Choice | None:
        self._advance(now)
        if now >= self._next_look:
            self._next_look = now + SECONDS
            self._look(now)
        self._changed = False
        return super().next(now)

    @property
    def next_deadline(self) -> float:
        inner = self.inner.next_deadline if self._inside else inf
        return min(inner, self._next_look) if len(self.paused) else inner

    def _look(self, now: float) -> None:
        for worker, _ in list(self.places):
            while self.places.cold_tokens(worker):
                self.places.revoke(self.places.coldest(worker), Loss.ENDED)
        for worker, _ in list(self.places):
            self._relieve(worker)
        waiting = sorted(self.paused.sessions, key=lambda session: (session.reserved, session.number))
        for session in waiting:
            request = next(iter(session.paused.values()))
            if (roomiest := self._roomiest_for(session, request)) is not None:
                self._give_place(session, request, roomiest, now)

    def _relieve(self, worker: WorkerId) -> None:
        capacity = self._view.kv_tokens(worker) or 0
        smallest = sorted(self.places.at(worker), key=lambda session: (session.reserved, session.number))
        for session in smallest:
            if self.places.reserved(worker) <= capacity:
                return
            if not session.calls:
                self.places.revoke(session, Loss.OVERFULL)
        excess = self.places.reserved(worker) - capacity
        excess -= sum(session.reserved for session in self.places.at(worker) if session in self._marked)
        for session in smallest:
            if excess <= 0:
                return
            if session.worker == worker and session not in self._marked:
                self._marked[session] = None
                excess -= session.reserved

    def _roomiest_for(self, session: Session, request: Request) -> WorkerId | None:
        rooms = [
            ((self._view.kv_tokens(worker) or 0) - self.places.reserved(worker), worker)
            for worker in self._view.able(request)
        ]
        room, worker = max(rooms)
        alone = not self.places.reserved(worker)
        return worker if session.reserved <= room or alone else None


def thunder(policy: PolicyFactory, idle: float) -> PolicyFactory:
    """Return the policy with ThunderAgent's gate before it."""

    def build(context: PolicyContext) -> Policy:
        return ThunderGate(policy(context), context, idle)

    return build
