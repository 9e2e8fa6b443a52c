"""The places of sessions at workers: what of each KV cache is reserved, and for whom."""

from collections.abc import Collection, Iterator

from router.core.clients.sessions.session import Session
from router.core.model.request import WorkerId


class WorkerPlaces:
    """The sessions with a place at one worker."""

    __slots__ = ("cold", "cold_tokens", "reserved", "sessions")

    def __init__(self) -> None:
        self.sessions: dict[Session, None] = {}
        self.reserved = 0
        """Tokens reserved for all of them."""
        self.cold: dict[Session, None] = {}
        """Those that have been idle for longer than the limit, in the order in which their limits ended."""
        self.cold_tokens = 0


class Places:
    """All places. A session's `worker` and `reserved` change only here."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerPlaces] = {}

    def __iter__(self) -> Iterator[tuple[WorkerId, int]]:
        """Iterate over the workers with places, each with the tokens that are reserved there."""
        for worker, places in self._workers.items():
            yield worker, places.reserved

    def reserved(self, worker: WorkerId) -> int:
        """Return the tokens that are reserved at a worker."""
        places = self._workers.get(worker)
        return 0 if places is None else places.reserved

    def at(self, worker: WorkerId) -> Collection[Session]:
        """Return the sessions with a place at a worker."""
        places = self._workers.get(worker)
        return () if places is None else places.sessions

    def cold_tokens(self, worker: WorkerId) -> int:
        """Return the tokens reserved at a worker for sessions that have been idle for too long."""
        places = self._workers.get(worker)
        return 0 if places is None else places.cold_tokens

    def coldest(self, worker: WorkerId) -> Session:
        """Return the session at a worker whose idle limit ended first. There is one."""
        return next(iter(self._workers[worker].cold))

    def give(self, session: Session, worker: WorkerId) -> None:
        """Give a session without a place one at this worker."""
        places = self._workers.get(worker)
        if places is None:
            places = self._workers[worker] = WorkerPlaces()
        places.sessions[session] = None
        places.reserved += session.reserved
        session.worker = worker

    def clear(self, session: Session) -> None:
        """Take the place of a session that has one."""
        assert session.worker is not None, "the session has a place"
        self.set_cold(session, cold=False)
        places = self._workers[session.worker]
        places.reserved -= session.reserved
        del places.sessions[session]
        if not places.sessions:
            del self._workers[session.worker]
        session.worker = None

    def resize(self, session: Session, reserved: int) -> None:
        """Reserve this many tokens for a session, if it has a place."""
        if session.worker is not None:
            places = self._workers[session.worker]
            places.reserved += reserved - session.reserved
            if session in places.cold:
                places.cold_tokens += reserved - session.reserved
        session.reserved = reserved

    def set_cold(self, session: Session, *, cold: bool) -> None:
        """Note whether a session with a place has been idle for too long."""
        assert session.worker is not None, "the session has a place"
        places = self._workers[session.worker]
        if cold and session not in places.cold:
            places.cold[session] = None
            places.cold_tokens += session.reserved
        elif not cold and session in places.cold:
            del places.cold[session]
            places.cold_tokens -= session.reserved
