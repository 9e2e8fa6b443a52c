"""The places of sessions at workers: what of each KV cache is reserved, for whom, and what is left of their turns."""

from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum

from router.core.clients.sessions.session import Session, SessionClient
from router.core.clients.sessions.session_table import SessionTable
from router.core.model.request import WorkerId


class Loss(StrEnum):
    """Why a session lost its place."""

    IDLE = "idle"
    TURN = "turn"
    OVERFULL = "overfull"
    AHEAD = "ahead"
    """Its client had been served more than another one will have been after a whole turn."""
    WORKER = "worker"
    """Its worker left, or lost its cache."""
    ENDED = "ended"
    """It ended, or was forgotten, or no session is hot any more."""


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
    """All places. A session's `worker`, `reserved` and `turn_left` change only here, and what is kept of them for its
    client.
    """

    def __init__(self, table: SessionTable, turn: float) -> None:
        """`turn`: the service of a turn, in cost units per token of context."""
        self._table = table
        self._turn = turn
        self._workers: dict[WorkerId, WorkerPlaces] = {}
        self.spenders: dict[SessionClient, None] = {}
        """The clients with sessions that have a place, a spent turn and no call."""
        self.losses: dict[Loss, int] = dict.fromkeys(Loss, 0)

    def __iter__(self) -> Iterator[tuple[WorkerId, int]]:
        """Iterate over the workers with places, each with the tokens that are reserved there."""
        for worker, places in self._workers.items():
            yield worker, places.reserved

    @property
    def clients(self) -> Iterator[SessionClient]:
        """Iterate over the clients that have places."""
        return (client for client in self._table.clients.values() if client.admitted_tokens)

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
        """Give a session without a place one at this worker, and a turn."""
        self._reserve(session, worker)
        self._table.place_changed(session)
        client = session.client
        client.admitted_tokens += session.reserved
        session.turn_left = self._turn * session.context
        client.unspent += session.turn_left
        session.prefilled = False

    def move(self, session: Session, worker: WorkerId) -> None:
        """Let a session with a place have it at another worker."""
        self._release(session)
        self._reserve(session, worker)

    def revoke(self, session: Session, reason: Loss) -> None:
        """Take the place of a session that has one."""
        self.losses[reason] += 1
        session.lost_context = session.context
        self._release(session)
        self._table.place_changed(session)
        client = session.client
        client.admitted_tokens -= session.reserved
        client.unspent -= session.turn_left
        self.withhold(session)
        session.turn_left = 0.0

    def _reserve(self, session: Session, worker: WorkerId) -> None:
        places = self._workers.get(worker)
        if places is None:
            places = self._workers[worker] = WorkerPlaces()
        places.sessions[session] = None
        places.reserved += session.reserved
        session.worker = worker

    def _release(self, session: Session) -> None:
        assert session.worker is not None, "the session has a place"
        self.set_cold(session, cold=False)
        places = self._workers[session.worker]
        places.reserved -= session.reserved
        del places.sessions[session]
        if not places.sessions:
            del self._workers[session.worker]
        session.worker = None

    def spend(self, session: Session, cost: float) -> None:
        """Take service from what is left of a session's turn."""
        if session.turn_left > 0.0:
            spent = min(session.turn_left, cost)
            session.turn_left -= spent
            session.client.unspent -= spent

    def offer(self, session: Session) -> None:
        """Note that a session has no call any more: if its turn is spent, its place can go to another client."""
        if session.worker is not None and session.turn_left <= 0.0:
            session.client.spent[session] = None
            self.spenders[session.client] = None

    def withhold(self, session: Session) -> None:
        """Note that a session has a call again, or no place, or has been idle for too long."""
        client = session.client
        if session in client.spent:
            del client.spent[session]
            if not client.spent:
                del self.spenders[client]

    def resize(self, session: Session, reserved: int) -> None:
        """Reserve this many tokens for a session, if it has a place."""
        if session.worker is not None:
            session.client.admitted_tokens += reserved - session.reserved
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

    def check_integrity(self, sessions: Sequence[Session]) -> None:
        """Raise AssertionError if the places contradict these sessions, which are all there are."""
        for worker, places in self._workers.items():
            own = [each for each in sessions if each.worker == worker]
            assert places.reserved == sum([each.reserved for each in own]), f"{worker}: {places.reserved} reserved"
            assert set(own) == set(places.sessions), f"{worker}: other sessions"
            cold = sum([each.reserved for each in own if not each.hot])
            assert cold == places.cold_tokens, f"{worker}: {cold} cold tokens"
        assert {each.worker for each in sessions if each.worker} == set(self._workers)
        for client in {each.client for each in sessions}:
            placed = [each for each in sessions if each.client is client and each.worker is not None]
            assert client.admitted_tokens == sum([each.reserved for each in placed]), f"{client.name}: admitted"
            assert abs(client.unspent - sum([each.turn_left for each in placed])) < 1.0, f"{client.name}: unspent"
            spent = {each for each in placed if each.hot and not each.calls and each.turn_left <= 0.0}
            assert set(client.spent) == spent, f"{client.name}: {len(client.spent)} spent sessions"
            assert (client in self.spenders) == bool(spent), f"{client.name}: its spent sessions"
