"""The hot sessions without a call, until they have been idle for too long."""

from collections import OrderedDict
from collections.abc import Iterator
from math import inf

from router.core.clients.sessions.session import Session


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
