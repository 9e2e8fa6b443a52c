"""What the scheduler of a cluster keeps of a front whose connection breaks, until it is back or counts as dead.

Its running requests go on, as the front streams them without the scheduler. Those that wait are taken from the
scheduler meanwhile, for they would only hold a place at a worker. After `ROOM_SECONDS` the running ones hold no room
either: nobody reports their ends, and if the fronts of another part of the network were away, their calls would fill
the workers for the scheduler's own part. When the front is back, both ends send again what the other has missed
(`Unconfirmed`).
"""

import asyncio
import logging
from typing import Final, Protocol

from router.channel.codec import encode
from router.channel.host import SchedulerHost
from router.channel.messages import Continued, FrontMessage, SchedulerMessage, Superseded
from router.channel.unconfirmed import Unconfirmed

log = logging.getLogger(__name__)

ENDED_SECONDS: Final = 10.0
"""Seconds in which a front may come back that has closed the connection, as the end of its process does."""
ROOM_SECONDS: Final = 2.0
"""Seconds for which the running requests of a front that is away hold room at their workers."""
LOST_SECONDS: Final = 60.0
"""Seconds in which a front may come back whose connection broke otherwise: for so long it tries."""


class FrontConnection(Protocol):
    """The scheduler's end of a connection to a front."""

    def write(self, payload: bytes) -> None:
        """Send a frame."""

    def abort(self) -> None:
        """Cut the connection."""


class FrontName(Protocol):
    """What the first frame of a front says; see `Hello`."""

    @property
    def front(self) -> int:
        """The number of the front in its replica."""

    @property
    def session(self) -> str:
        """The same at each connection of this front, and at those of no other."""

    @property
    def run(self) -> str:
        """The run of the scheduler that it was connected to last."""

    @property
    def received(self) -> int:
        """How many messages of that run it has handled."""

    @property
    def replica(self) -> str:
        """Its replica."""


class KnownFront:
    """A front, with or without a connection."""

    def __init__(self, host: SchedulerHost, name: FrontName, connection: FrontConnection, *, returns: bool) -> None:
        """`returns`: whether it may come back when its connection is lost."""
        self._returns = returns
        self.is_closed = False
        """Whether what it had is settled."""
        self._connection: FrontConnection | None = connection
        self._unconfirmed = Unconfirmed()
        self._timers: list[asyncio.TimerHandle] = []
        self._host = host
        self.link: Final = host.connect(self._deliver, name.front, name.session, name.replica)

    @property
    def is_away(self) -> bool:
        """Whether it has no connection."""
        return self._connection is None

    @property
    def handled(self) -> int:
        """How many of its messages have been handled; 0 while it reports what runs before had."""
        return self.link.messages or 0

    def confirm(self, received: int) -> None:
        """Note how many messages the front has handled."""
        self._unconfirmed.confirm(received)

    def receive(self, message: FrontMessage) -> None:
        """Handle a message of the front."""
        if isinstance(message, Superseded):
            self._returns = False
        self.link.receive(message)

    def returned(self, connection: FrontConnection, received: int) -> bool:
        """Go on with another connection. Returns False if that is not possible, as something is missing.

        `received`: how many messages the front has handled.
        """
        missed = self._unconfirmed.after(received)
        if self.link.messages is None or missed is None:
            return False
        left, self._connection = self._connection, connection
        if left is not None:
            left.abort()
        self._cancel_timers()
        connection.write(encode(Continued(self.link.messages)))
        for payload in missed:
            connection.write(payload)
        self._host.queue_again(self.link)
        log.warning("%s is connected again", self.link.name)
        return True

    def lost(self, connection: FrontConnection, *, ended: bool) -> None:
        """Note that a connection is lost. `ended`: whether the front's side has closed it."""
        if connection is not self._connection:
            return  # it has another one already
        self._connection = None
        if not self._returns:
            self.close()
            return
        log.warning("the connection of %s is lost; its running calls go on", self.link.name)
        self.link.seems_dead = ended
        self._host.withdraw_waiting(self.link)
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(ROOM_SECONDS, self._host.set_aside, self.link),
            loop.call_later(ENDED_SECONDS if ended else LOST_SECONDS, self._give_up),
        ]

    def close(self) -> None:
        """Settle what the front has left, and cut its connection."""
        self._cancel_timers()
        self.is_closed = True
        left, self._connection = self._connection, None
        if left is not None:
            left.abort()
        self.link.close()

    def _give_up(self) -> None:
        log.error("%s has not come back; its calls count as cancelled", self.link.name)
        self.close()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _deliver(self, message: SchedulerMessage) -> None:
        payload = encode(message)
        if self._returns:
            self._unconfirmed.add(payload)
        if self._connection is not None:
            self._connection.write(payload)


class KnownFronts:
    """All fronts of one run of the scheduler."""

    def __init__(self, host: SchedulerHost, run: str, *, may_return: bool) -> None:
        """`run`: of the scheduler, as in `Hello.session`; `may_return`: whether fronts whose connections break may."""
        self._host = host
        self._run = run
        self._may_return = may_return
        self._fronts: list[KnownFront] = []

    @property
    def away(self) -> int:
        """How many fronts have no connection and may come back."""
        return sum(not front.is_closed and front.is_away for front in self._fronts)

    def connect(self, name: FrontName, connection: FrontConnection) -> KnownFront | None:
        """Return the front that has this connection. Returns None if what it had has been settled."""
        self._fronts = [front for front in self._fronts if not front.is_closed]
        known = next((front for front in self._fronts if name.session and front.link.session == name.session), None)
        if known is not None and known.returned(connection, name.received):
            return known
        if known is not None:
            known.close()  # without effect on a front that has reported nothing yet
        if name.run == self._run and (known is None or known.handled):
            return None
        for front in self._fronts:
            if front.is_away and (front.link.replica, front.link.number) == (name.replica, name.front):
                front.close()  # its process has been started again
        front = KnownFront(self._host, name, connection, returns=self._may_return)
        self._fronts.append(front)
        return front

    def close(self) -> None:
        """Settle what all fronts have left."""
        for front in self._fronts:
            if not front.is_closed:
                front.close()
