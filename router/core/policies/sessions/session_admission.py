"""Which waiting sessions get places, at which workers, and whose places they take."""

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Final, NamedTuple

from router.core.clients.sessions.session import Session, SessionClient
from router.core.model.request import WorkerId
from router.core.policies.context import FleetView
from router.core.policies.sessions.paused_calls import PausedCalls
from router.core.policies.sessions.places import Loss, Places
from router.core.policies.sessions.pools import SessionPool, SessionPools

PATIENCE: Final = 8
"""How many sessions may pass one that does not fit yet."""


class Outlook(NamedTuple):
    """What the workers of a pool have for sessions that wait."""

    most: float
    """The most tokens that are free at one of them, or reserved for cold sessions there."""
    empty: bool
    """Whether at one of them nothing is reserved but for cold sessions."""
    overfull: bool
    """Whether one of them has more reserved than its KV cache holds."""


class SessionAdmission:
    """Finds places for waiting sessions, and takes those of others for them."""

    def __init__(
        self,
        view: FleetView,
        pools: SessionPools,
        places: Places,
        paused: PausedCalls,
        *,
        fill: float,
        claim: float,
    ) -> None:
        """`fill`: the share of a worker's KV cache that sessions may have. `claim`: what a place costs until its turn
        is over, first prefill included, in cost units per token of context.
        """
        self._claim = claim
        self._view = view
        self._pools = pools
        self._places = places
        self._paused = paused
        self._fill = fill

    def admitted(self) -> Iterator[tuple[Session, WorkerId]]:
        """Yield the waiting sessions that get places, in order, as far as they fit, each with the worker that has room
        for it. The caller gives each its place before it asks for the next one.
        """
        blocked: dict[Session, None] = {}
        kept: dict[WorkerId, None] = {}
        while (found := self._next(blocked, kept)) is not None:
            yield found
            for each in blocked:
                each.passed += 1

    def _next(self, blocked: dict[Session, None], kept: dict[WorkerId, None]) -> tuple[Session, WorkerId] | None:
        """Find room for the first waiting session that fits and is not blocked. Returns it with its worker.

        `blocked`: the sessions that do not fit. `kept`: the workers at which room is kept for such sessions.
        """
        outlooks = {pool: self._outlook(pool) for pool in self._pools}
        richest = max([client.account for client in self._places.spenders], default=-inf)
        most_served = max([client.served for client in self._places.clients], default=-inf)
        for session in self._paused.sessions:
            if session in blocked:
                continue
            outlook = outlooks[self._pools(session.model)]
            gives_way = outlook.overfull or richest > session.client.account
            gives_way = gives_way or most_served > self._claimed(session)
            worker = None
            if gives_way or outlook.empty or session.reserved <= outlook.most:
                worker = self._worker_for(session, kept)
            if worker is not None:
                return session, worker
            if len(blocked) == PATIENCE:
                return None
            blocked[session] = None
            if session.passed >= PATIENCE and (roomiest := self._roomiest(session, kept)) is not None:
                kept[roomiest] = None
        return None

    def _rooms(self, session: Session, kept: Mapping[WorkerId, None]) -> Iterator[tuple[WorkerId, float]]:
        """Yield the workers that a waiting session may go to, each with the tokens that sessions may have there."""
        request, shared = next(iter(session.paused.values())), self._pools(session.model).workers
        for worker in self._view.able(request):
            capacity = self._view.kv_tokens(worker)
            if capacity is not None and worker in shared and worker not in kept:
                yield worker, self._fill * capacity

    def _roomiest(self, session: Session, kept: Mapping[WorkerId, None]) -> WorkerId | None:
        """Return the worker at which room is kept for a session that was passed too often."""
        rooms = [(room - self._places.reserved(worker), worker) for worker, room in self._rooms(session, kept)]
        return max(rooms)[1] if rooms else None

    def _worker_for(self, session: Session, kept: Mapping[WorkerId, None]) -> WorkerId | None:
        """Return a worker at which a waiting session fits, after others have lost their places there if need be; first
        one that still holds most of it. None if it fits nowhere.
        """
        matched = self._view.match(next(iter(session.paused.values())))
        rooms = [
            (-matched.get(worker, 0), self._places.reserved(worker) - room, worker, room)
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
        reserved = self._places.reserved(worker) - spare
        return reserved > 0 and reserved + session.reserved > room

    def _take_cold(self, session: Session, worker: WorkerId, room: float) -> bool:
        """Make room for a session by taking the places of those that have been idle for too long. Returns whether it
        fits; if not, nothing has changed.
        """
        if self._lacks(session, worker, room, self._places.cold_tokens(worker)):
            return False
        while self._lacks(session, worker, room):
            self._places.revoke(self._places.coldest(worker), Loss.IDLE)
        return True

    def _take_spent(self, session: Session, worker: WorkerId, room: float) -> bool:
        """Make room for a session by taking the places of sessions of clients with more service, as `_take_cold`."""
        overfull = self.is_overfull(worker)
        losers = self._losers(session, worker, overfull=overfull)
        if not (enough := self._enough(session, worker, room, losers)):
            return False
        for loser in enough:
            early = Loss.OVERFULL if overfull else Loss.AHEAD
            self._places.revoke(loser, Loss.TURN if loser.turn_left <= 0.0 else early)
        return True

    def _enough(
        self, session: Session, worker: WorkerId, room: float, losers: Iterable[Session]
    ) -> list[Session] | None:
        """Return as many of these sessions, in this order, as must lose their places for another one to fit, after
        those that have been idle for too long, whose places are taken; None if they are too few, and nothing changes.
        """
        spare, enough = self._places.cold_tokens(worker), list[Session]()
        for loser in losers:
            enough.append(loser)
            spare += loser.reserved
            if not self._lacks(session, worker, room, spare):
                while self._places.cold_tokens(worker):
                    self._places.revoke(self._places.coldest(worker), Loss.IDLE)
                return enough
        return None

    def is_overfull(self, worker: WorkerId) -> bool:
        """Return whether more is reserved at a worker than its KV cache holds. Contexts may grow beyond `fill`."""
        capacity = self._view.kv_tokens(worker)
        return capacity is not None and self._places.reserved(worker) > capacity

    def trim(self, worker: WorkerId, calling: Session) -> bool:
        """Take places at an overfull worker, where contexts have grown or which got its sessions while the gate was
        open: of sessions between calls, also of the one that begins its next call now, the cold ones first, then those
        of the client with most service. Returns whether it took any.
        """
        if not self.is_overfull(worker):
            return False
        room, places = self._view.kv_tokens(worker) or 0, self._places
        before = len(places.at(worker))
        while places.reserved(worker) > room and places.cold_tokens(worker):
            self._places.revoke(places.coldest(worker), Loss.IDLE)
        losers = [each for each in places.at(worker) if not each.calls or each is calling]
        losers.sort(key=_by_account)
        for loser in losers:
            if places.reserved(worker) <= room or len(places.at(worker)) == 1:
                break
            self._places.revoke(loser, Loss.OVERFULL)
        return len(places.at(worker)) < before

    def _losers(self, session: Session, worker: WorkerId, *, overfull: bool) -> Iterator[Session]:
        """Yield the sessions at a worker that can lose their places to this one, of the client with most service first.

        `overfull`: whether more is reserved at the worker than its KV cache holds.
        """
        account = session.client.account
        if overfull:
            losers = [
                each
                for each in self._places.at(worker)
                if not each.calls and each.hot and each.client.account > account
            ]
            losers.sort(key=_by_account)
            yield from losers
            return
        richer = [client for client in self._places.spenders if client.account > account]
        richer.sort(key=_account, reverse=True)
        for client in richer:
            yield from [each for each in client.spent if each.worker == worker]
        ahead = [
            each
            for each in self._places.at(worker)
            if not each.calls
            and each.hot
            and each.turn_left > 0.0
            and each.client.served > self._claimed(session, each)
        ]
        ahead.sort(key=_by_account)
        yield from ahead

    def _claimed(self, session: Session, loser: Session | None = None) -> float:
        """Return the account that the client of a waiting session will have after a turn of this one, or of the one
        whose place it takes if that is larger.
        """
        context = session.context if loser is None else max(session.context, loser.context)
        return session.client.account + self._claim * context / session.client.weight

    def _outlook(self, pool: SessionPool) -> Outlook:
        """Return what a waiting session can hope for at the workers of a pool."""
        most, empty, overfull = -inf, False, False
        for worker in pool.workers:
            capacity = self._view.kv_tokens(worker)
            if capacity is None:
                continue
            room, reserved = self._fill * capacity, self._places.reserved(worker)
            cold = self._places.cold_tokens(worker)
            most = max(most, room - reserved + cold)
            empty = empty or reserved == cold
            overfull = overfull or reserved > capacity
        return Outlook(most, empty, overfull)


def _account(client: SessionClient) -> float:
    return client.account


def _by_account(session: Session) -> tuple[float, bool, float]:
    """Sorts sessions in the order in which they lose their places: those of the client with most service first, of
    these the spent ones, and then the youngest.
    """
    return -session.client.account, session.turn_left > 0.0, -session.since
