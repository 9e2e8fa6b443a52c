"""The calls that the gate holds back, by client and session, in the order in which sessions get places."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from router.core.clients.sessions.session import Session, SessionClient
from router.core.model.request import Request, RequestId

Ranked = tuple[tuple[bool, float, int], Session]
"""A session and its rank, which is unique, and does not change while the session has paused calls."""


class PausedCalls:
    """All paused calls. A session's `paused` and `paused_since` change only here."""

    def __init__(self) -> None:
        self._clients: dict[SessionClient, list[Ranked]] = {}
        """The sessions with paused calls of each client, by rank."""
        self._count = 0
        self.ended = 0
        """How many calls were held back and are not any more."""
        self.seconds = 0.0
        """For how long these were held back in total."""

    def __len__(self) -> int:
        return self._count

    @property
    def sessions(self) -> Iterator[Session]:
        """Iterate over the sessions with paused calls, in the order in which they are considered for places. None may
        come or go meanwhile.
        """
        order = [(client.account, client.number, sessions) for client, sessions in self._clients.items()]
        order.sort()
        for _, _, sessions in order:
            for _, session in sessions:
                yield session

    @property
    def least_account(self) -> float:
        """The least account of the clients with paused calls, in cost units. There is one."""
        return min([client.account for client in self._clients])

    @property
    def by_client(self) -> Iterator[Session]:
        """Iterate over the same sessions, the clients in the order in which they began to wait."""
        for sessions in self._clients.values():
            for _, session in sessions:
                yield session

    def add(self, session: Session, request: Request, now: float) -> None:
        """Hold back a call of a session without a place."""
        if not session.paused:
            session.paused_since = now
            insort(self._clients.setdefault(session.client, []), (session.rank, session))
        session.paused[request.id] = request
        self._count += 1

    def remove(self, session: Session, request: RequestId, now: float) -> Request:
        """Stop holding back a call, and return it."""
        call = session.paused.pop(request)
        self._count -= 1
        self.ended += 1
        self.seconds += now - session.paused_since
        if not session.paused:
            session.passed = 0
            sessions = self._clients[session.client]
            del sessions[bisect_left(sessions, (session.rank,))]
            if not sessions:
                del self._clients[session.client]
        return call

    def check_integrity(self, sessions: list[Session]) -> None:
        """Raise AssertionError if they contradict these sessions, which are all there are."""
        listed = list(self.by_client)
        assert set(listed) == {each for each in sessions if each.paused}, "other sessions have paused calls"
        assert self._count == sum([len(each.paused) for each in listed]), f"{self._count} paused calls"
        assert not any(each.worker for each in listed), "a session with a place has paused calls"
        for own in self._clients.values():
            assert own == sorted((each.rank, each) for _, each in own), "not in order"
