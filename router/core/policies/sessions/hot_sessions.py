"""Which sessions are hot, and whether all that is hot fits in the KV cache."""

from collections import OrderedDict
from collections.abc import Iterator
from math import inf

from router.core.clients.sessions.session import Session
from router.core.clients.sessions.session_table import SessionTable
from router.core.policies.sessions.places import Loss, Places
from router.core.policies.sessions.pools import SessionPool, SessionPools
from router.core.policies.sessions.session_parameters import SessionParameters


class IdleSessions:
    """Sessions between calls, in two queues by the limit that they have."""

    def __init__(self, idle: float, idle_after_turn: float) -> None:
        """`idle`, `idle_after_turn`: the limits in seconds. The second is for sessions whose last answer ended the
        turn, and for those with a place that have made only one call: a client could hold places by calls that each
        have a new label.
        """
        self._idle_limit = idle
        self._limit_after_turn = idle_after_turn
        # Not plain dicts, which find their first key by walking past all keys removed before it.
        self._idle: OrderedDict[Session, None] = OrderedDict()
        self._after_turn: OrderedDict[Session, None] = OrderedDict()

    def add(self, session: Session) -> None:
        """Note that a session's last call has ended at its `idle_since`."""
        is_single = session.worker is not None and not session.came_back
        (self._after_turn if session.ended_turn or is_single else self._idle)[session] = None

    def discard(self, session: Session) -> None:
        """Note that a session has a call again, or is forgotten."""
        self._idle.pop(session, None)
        self._after_turn.pop(session, None)

    def remove_cold(self, now: float) -> Iterator[Session]:
        """Remove and yield the sessions that have been idle for longer than their limits."""
        for idle, limit in self._queues:
            while idle:
                session = next(iter(idle))
                if session.idle_since + limit > now:
                    break
                del idle[session]
                yield session

    @property
    def next_deadline(self) -> float:
        """When the next limit ends, in seconds; infinite without a session."""
        return min([next(iter(idle)).idle_since + limit for idle, limit in self._queues if idle], default=inf)

    @property
    def _queues(self) -> tuple[tuple[OrderedDict[Session, None], float], ...]:
        return (self._idle, self._idle_limit), (self._after_turn, self._limit_after_turn)


class HotSessions:
    """The sessions with a call, or idle for less than the limit. A session's `hot` and `context` change only here."""

    def __init__(self, table: SessionTable, places: Places, pools: SessionPools, parameters: SessionParameters) -> None:
        self._table = table
        self._places = places
        self._pools = pools
        self._parameters = parameters
        self._idle = IdleSessions(parameters.idle, parameters.idle_after_turn)

    def fit(self, pool: SessionPool, now: float) -> bool:
        """Return whether they fit in what sessions may have of a pool's KV cache; also if its size is not known."""
        capacity = pool.capacity(now)
        return capacity is None or pool.hot_tokens <= self._parameters.fill * capacity

    def overflow(self, model: str, now: float) -> bool:
        """Return whether they exceed the whole KV cache of a model's workers."""
        pool = self._pools(model)
        capacity = pool.capacity(now)
        return capacity is not None and pool.hot_tokens > capacity

    def wake(self, session: Session, now: float) -> None:
        """Note that a session without a call has one now."""
        self._places.withhold(session)
        self._idle.discard(session)
        session.ended_turn = False
        if session.hot:
            return
        if session.worker is not None:
            self._places.set_cold(session, cold=False)
        else:
            session.since = now
            session.displaced = False
        client = session.client
        if not client.hot:
            others = [other.served for other in self._table.clients.values() if other.hot]
            client.served = max(client.served, min(others, default=client.served))
        session.hot = True
        client.hot += 1
        self._pools(session.model).hot_tokens += session.reserved

    def rest(self, session: Session, now: float) -> None:
        """Note that a session's last call has ended."""
        session.idle_since = now
        self._idle.add(session)
        self._places.offer(session)

    def remove(self, session: Session) -> None:
        """Note that a hot session without a call is not hot any more."""
        self._idle.discard(session)
        session.hot = False
        session.client.hot -= 1
        self._places.withhold(session)
        pool = self._pools(session.model)
        pool.hot_tokens -= session.reserved
        if session.worker is not None:
            self._places.set_cold(session, cold=True)
        if pool.hot_tokens <= 0:
            self._vacate(pool)

    def _vacate(self, pool: SessionPool) -> None:
        """Take the places of a pool's sessions, none of which is hot any more."""
        for worker in pool.workers:
            for session in tuple(self._places.at(worker)):
                if not session.hot:
                    self._places.revoke(session, Loss.ENDED)

    def remove_cold(self, now: float) -> bool:
        """Remove the sessions that have been idle for longer than the limit. Returns whether there were any."""
        cold = False
        for session in self._idle.remove_cold(now):
            self.remove(session)
            cold = True
        return cold

    @property
    def next_deadline(self) -> float:
        """When the next idle limit ends, in seconds; infinite if no session is idle."""
        return self._idle.next_deadline

    def resize(self, session: Session, context: int) -> None:
        """Set the size of a session's context, in tokens."""
        session.context = context
        reserved = context + self._parameters.growth
        if session.hot:
            self._pools(session.model).hot_tokens += reserved - session.reserved
        self._places.resize(session, reserved)

    def find_pools_anew(self) -> None:
        """Find the pools after the workers have changed, and count the hot sessions in them."""
        self._pools.clear()
        for session in self:
            self._pools(session.model).hot_tokens += session.reserved

    def __iter__(self) -> Iterator[Session]:
        return (session for session in self._table if session.hot)

    def check_integrity(self) -> None:
        """Raise AssertionError if they contradict the sessions."""
        assert not any(each.calls and not each.hot for each in self._table), "a session with a call is not hot"
        for client in self._table.clients.values():
            hot = [each for each in self if each.client is client]
            assert client.hot == len(hot), f"{client.name}: {client.hot} hot sessions"
        tokens = sum([each.reserved for each in self])
        assert tokens == sum([pool.hot_tokens for pool in self._pools]), f"{tokens} hot tokens"
