"""A front's channel to the scheduler: to its present run, and once that has died, to the next one.

If the scheduler dies, its next run is reached by the same route. The front connects again and reports what that run
does not know (`UnsavedHistory`). Until then its streams go on, its calls wait, and what it has to say is only noted.

If only the connection breaks, and the same run is reached again, both sides go on with what they have, and send again
what the other has missed.

In a cluster there may be two schedulers for a moment. The front obeys the one with the higher epoch, and none whose
epoch is lower than one that it has obeyed.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from secrets import token_hex
from typing import Final, NamedTuple, Self

from router.channel.client import SchedulerClient
from router.channel.codec import channel_version, encode
from router.channel.messages import (
    AllReported,
    Assignment,
    Continued,
    FrontMessage,
    PlacementRecord,
    Saved,
    SchedulerMessage,
    Settled,
    Superseded,
)
from router.channel.socket import (
    CONNECT_SECONDS,
    ChannelClosed,
    FrontEnd,
    Hello,
    OtherVersion,
    Route,
    connect_front,
)
from router.channel.unconfirmed import Unconfirmed
from router.channel.unsaved_history import UnsavedHistory

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.05
"""Seconds between two attempts to connect."""
GIVE_UP_SECONDS: Final = 60.0
"""Seconds without a scheduler after which a front gives up."""


@dataclass(slots=True)
class Arrivals:
    """What has arrived from one run of the scheduler, over all connections to it."""

    messages: int = 0
    """How many messages have been handled."""


@dataclass(slots=True)
class Arriving:
    """What arrives over one connection."""

    welcome: "asyncio.Future[Saved | Continued | Settled]"
    """The first message, which says what the run knows of the front."""
    arrivals: Arrivals


class Contact(NamedTuple):
    """A connection to a run of the scheduler, before the front obeys that."""

    end: FrontEnd
    hello: Hello
    """The first frame of the run."""
    welcome: Saved | Continued | Settled
    arrivals: Arrivals


class FrontChannel:
    """Keeps a front connected while the context is entered."""

    def __init__(self, route: Route, number: int, replica: str = "") -> None:
        """`route`: to the scheduler; `number`: of this front; `replica`: as in `Hello`."""
        self._route = route
        self._number = number
        self._replica = replica
        self._session = token_hex(8)
        self._epoch = 0
        """The highest epoch that it has obeyed."""
        self._history = UnsavedHistory()
        self._end: FrontEnd | None = None
        """The present connection; None while there is none."""
        self._ready = False
        """Whether the present run knows everything, so that messages go to it directly."""
        self._client: SchedulerClient | None = None
        self._early: list[SchedulerMessage] = []
        """Messages that arrived before there was a client."""
        self._secret = b""
        self._run = ""
        """The run of the scheduler that it was connected to last."""
        self._arrivals = Arrivals()
        """What has arrived from that."""
        self._unconfirmed = Unconfirmed()
        """What was sent to that, by the numbers that `UnsavedHistory` counts."""
        self._lost_at: float | None = None
        """When the last connection ended, on the event loop's clock; None while there is one."""
        self._task: asyncio.Task[None] | None = None

    async def open(self, seconds: float = CONNECT_SECONDS) -> bytes:
        """Connect for the first time. Returns the key of the prompt hashes.

        Waits for a scheduler that is being started, and without an end while another version leads the cluster. Raises
        ChannelClosed if none comes within `seconds`.
        """
        while True:
            try:
                contact = await self._connect_within(seconds)
                break
            except OtherVersion:
                if not self._replica:
                    raise
        self._secret = contact.hello.secret
        self._obey(contact)
        return self._secret

    def attach(self, client: SchedulerClient) -> None:
        """Connect the client, which first gets what has arrived already."""
        self._client = client
        client.connect(self._send, lambda: self.behind)
        for message in self._early:
            client.receive(message)
        self._early.clear()

    @property
    def behind(self) -> bool:
        """Whether the scheduler lags so much, or is away for so long, that no new calls should be sent to it."""
        if self._lost_at is not None:
            return asyncio.get_running_loop().time() - self._lost_at >= self._route.patience
        return self._end is not None and self._end.behind

    @property
    def delay(self) -> float:
        """Seconds in which the scheduler answered the last probe."""
        return 0.0 if self._end is None else self._end.delay

    @property
    def unsaved(self) -> int:
        """How many requests are kept because no saved state of the scheduler covers them."""
        return self._history.requests

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_connected())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_reconnecting()

    async def _stop_reconnecting(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def lost(self) -> None:
        """Wait until the front has given up. Raises ChannelClosed."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def close(self) -> bool:
        """Send what is unsent, and close the channel permanently. Returns False if there is no scheduler."""
        await self._stop_reconnecting()
        if self._end is None or self._end.is_closed or not self._ready:
            return False
        await self._end.close()
        return True

    async def _keep_connected(self) -> None:
        while True:
            assert self._end is not None
            if await self._is_superseded(self._end):
                await self._move(self._end)
                continue
            self._ready = False
            self._lost_at = asyncio.get_running_loop().time()
            log.error("the scheduler's process is gone or cut off; streams go on, and calls wait for it")
            self._obey(await self._connect_within(GIVE_UP_SECONDS))
            log.warning("the scheduler's process is back, and knows of %d requests", self._history.requests)

    async def _is_superseded(self, end: FrontEnd) -> bool:
        """Wait until the scheduler is lost, or another leads. Returns whether it is the latter."""
        lost = asyncio.ensure_future(end.lost())
        superseded = asyncio.ensure_future(self._route.superseded(self._epoch))
        try:
            await asyncio.wait((lost, superseded), return_when=asyncio.FIRST_COMPLETED)
            return not lost.done()
        finally:
            lost.cancel()
            superseded.cancel()

    async def _move(self, left: FrontEnd) -> None:
        """Leave a scheduler for the one that leads, as soon as that can be reached; until then it is obeyed."""
        try:
            contact = await self._connect()
        except ChannelClosed:
            await asyncio.sleep(RETRY_SECONDS)
            return
        log.warning("the scheduler with epoch %d leads in place of epoch %d", contact.hello.epoch, self._epoch)
        left.send(Superseded(contact.hello.epoch))
        left.leave()
        self._obey(contact)

    async def _connect_within(self, seconds: float) -> Contact:
        """Connect, and try again while no scheduler listens. Raises ChannelClosed."""
        deadline = asyncio.get_running_loop().time() + seconds
        told = False
        while True:
            try:
                return await self._connect()
            except ChannelClosed as error:
                other = isinstance(error, OtherVersion)
                ended = asyncio.get_running_loop().time() >= deadline
                if ended or (other and not self._replica):  # in a cluster, another may lead soon
                    raise
                if other and not told:
                    log.error("this replica waits for a leader of its own version: %s", error)
                    told = True
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self) -> Contact:
        """Connect, and learn what the run knows of this front. Raises ChannelClosed."""
        arriving = Arriving(asyncio.get_running_loop().create_future(), Arrivals())
        end, hello = await connect_front(self._route, self._hello(), partial(self._receive, arriving))
        if hello.epoch < self._epoch:
            end.abort()
            raise ChannelClosed(f"the scheduler has epoch {hello.epoch}, and epoch {self._epoch} has led since")
        try:
            async with asyncio.timeout(self._route.answers_within):
                welcome = await end.unless_lost(arriving.welcome)
        except TimeoutError:
            end.abort()
            raise ChannelClosed("the scheduler does not say what its state covers") from None
        if isinstance(welcome, Saved):
            self._history.saved(welcome.messages)
        return Contact(end, hello, welcome, arriving.arrivals)

    def _hello(self) -> Hello:
        return Hello(
            channel_version(),
            self._number,
            self._session,
            epoch=self._epoch,
            replica=self._replica,
            run=self._run,
            received=self._arrivals.messages,
        )

    def _obey(self, contact: Contact) -> None:
        """Report what the run does not know, and send it from now on what happens. Raises ChannelClosed if this run can
        do nothing with that.
        """
        end, hello, welcome, _ = contact
        try:
            if hello.secret != self._secret:
                raise ChannelClosed("the scheduler has lost its state, and with it the key of the prompt hashes")
            match welcome:
                case Settled():
                    raise ChannelClosed("the scheduler, which lives, has settled what this front had")
                case Continued(messages):
                    self._send_missed(end, messages)
                case Saved():
                    self._report(end)
        except ChannelClosed:
            end.abort()
            raise
        self._run, self._epoch, self._arrivals = hello.session, hello.epoch, contact.arrivals
        end.handled = lambda: contact.arrivals.messages
        end.on_confirmed = self._confirm
        self._end, self._ready, self._lost_at = end, True, None

    def _send_missed(self, end: FrontEnd, handled: int) -> None:
        """Send again all messages after the first `handled`, which the run has. Raises ChannelClosed."""
        missed = self._unconfirmed.after(handled)
        if missed is None:
            raise ChannelClosed("the scheduler has missed more than this front keeps")
        for payload in missed:
            end.write(payload)

    def _report(self, end: FrontEnd) -> None:
        """Report what a run does not know."""
        for message in self._history.report():
            end.send(message)
        self._history.messages += 1
        self._unconfirmed.begin(self._history.messages)
        end.send(AllReported(self._history.messages))

    def _confirm(self, handled: int) -> None:
        """Note how many messages the scheduler has handled."""
        self._unconfirmed.confirm(handled)

    def _send(self, message: FrontMessage) -> None:
        payload = encode(message)  # first, as it raises for what cannot be encoded
        if self._replica:
            self._unconfirmed.add(payload)
        if self._ready and self._end is not None:
            self._end.write(payload)
        self._history.sent(message)

    def _receive(self, arriving: Arriving, message: SchedulerMessage) -> None:
        """Take a message that arrives over one of the connections."""
        if not arriving.welcome.done():
            if not isinstance(message, Saved | Continued | Settled):
                raise ValueError(f"{type(message).__name__} comes before all else")
            if isinstance(message, Continued):
                arriving.arrivals = self._arrivals
            else:
                arriving.arrivals.messages += 1
            arriving.welcome.set_result(message)
            return
        arriving.arrivals.messages += 1
        if isinstance(message, Saved):
            self._history.saved(message.messages)
            return
        if self._replica and isinstance(message, Assignment):
            message = _decided_at(message, time.monotonic())
        self._history.received(message)
        if self._client is None:
            self._early.append(message)
        else:
            self._client.receive(message)


def _decided_at(assignment: Assignment, now: float) -> Assignment:
    """Return an assignment with its decisions as of now: the monotonic clock of another machine says nothing here."""

    def moved(placement: PlacementRecord | None) -> PlacementRecord | None:
        return None if placement is None else replace(placement, decided=now)

    beside = assignment.prefill
    beside = None if beside is None else replace(beside, placement=moved(beside.placement))
    return replace(assignment, placement=moved(assignment.placement), prefill=beside)
