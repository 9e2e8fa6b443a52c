"""A front's channel to whichever run of the scheduler there is.

If the scheduler dies, its next run listens at the same path. The front connects again and reports what that run does
not know (`UnsavedHistory`). Until then its streams go on, its calls wait, and what it has to say is only noted.
"""

import asyncio
import logging
from secrets import token_hex
from typing import Final, Self

from router.channel.client import SchedulerClient
from router.channel.messages import AllReported, FrontMessage, Saved, SchedulerMessage
from router.channel.socket import CONNECT_SECONDS, ChannelClosed, FrontEnd, OtherVersion, connect_front
from router.channel.unsaved_history import UnsavedHistory

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.05
"""Seconds between two attempts to connect."""
GIVE_UP_SECONDS: Final = 60.0
"""Seconds without a scheduler after which a front gives up."""
BEHIND_SECONDS: Final = 2.0
"""Seconds without a scheduler after which a front refuses new calls."""


class FrontChannel:
    """Keeps a front connected while the context is entered."""

    def __init__(self, path: str, number: int) -> None:
        """`path`: of the scheduler's socket; `number`: of this front."""
        self._path = path
        self._number = number
        self._session = token_hex(8)
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
        self._covered: asyncio.Future[int] | None = None
        """How many of this front's messages the state covers with which the run began that is being connected to."""
        self._lost_at: float | None = None
        """When the last connection ended, on the event loop's clock; None while there is one."""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> bytes:
        """Connect for the first time. Returns the key of the prompt hashes.

        Waits for a scheduler that is being started. Raises ChannelClosed if none comes.
        """
        end, self._secret, self._run = await self._connect_within(CONNECT_SECONDS)
        self._report(end)
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
            return asyncio.get_running_loop().time() - self._lost_at >= BEHIND_SECONDS
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
        """Send what is unsent, and close the channel for good. Returns False if there is no scheduler."""
        await self._stop_reconnecting()
        if self._end is None or self._end.is_closed or not self._ready:
            return False
        await self._end.close()
        return True

    async def _keep_connected(self) -> None:
        while True:
            assert self._end is not None
            await self._end.lost()
            self._ready = False
            self._lost_at = asyncio.get_running_loop().time()
            log.error("the scheduler's process is gone; streams go on, and calls wait for it")
            self._report(await self._reconnect())
            log.warning("the scheduler's process is back, and has the report of %d requests", self._history.requests)

    async def _reconnect(self) -> FrontEnd:
        end, secret, run = await self._connect_within(GIVE_UP_SECONDS)
        if run == self._run:
            end.abort()
            raise ChannelClosed("the scheduler, which lives, has settled what this front had")
        self._run = run
        if secret != self._secret:
            end.abort()
            raise ChannelClosed("the scheduler has lost its state, and with it the key of the prompt hashes")
        return end

    async def _connect_within(self, seconds: float) -> tuple[FrontEnd, bytes, str]:
        """Connect, and try again while no scheduler listens. Returns what `_connect` does. Raises ChannelClosed."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                return await self._connect()
            except OtherVersion:
                raise
            except ChannelClosed:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self) -> tuple[FrontEnd, bytes, str]:
        """Connect, and learn what the run's state covers. Returns the connection, the key of the prompt hashes, and the
        run's name.
        """
        self._covered = asyncio.get_running_loop().create_future()
        end, hello = await connect_front(self._path, self._number, self._session, self._receive)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._history.saved(await end.unless_lost(self._covered))
        except TimeoutError:
            end.abort()
            raise ChannelClosed("the scheduler does not say what its state covers") from None
        return end, hello.secret, hello.session

    def _report(self, end: FrontEnd) -> None:
        """Report what the run does not know, and send it from now on what happens."""
        for message in self._history.report():
            end.send(message)
        self._history.messages += 1
        end.send(AllReported(self._history.messages))
        self._end, self._ready, self._lost_at = end, True, None

    def _send(self, message: FrontMessage) -> None:
        if self._ready and self._end is not None:
            self._end.send(message)  # first, as it raises for what cannot be encoded
        self._history.sent(message)

    def _receive(self, message: SchedulerMessage) -> None:
        if isinstance(message, Saved):
            if self._ready:
                self._history.saved(message.messages)
            elif self._covered is not None and not self._covered.done():
                self._covered.set_result(message.messages)
            return
        self._history.received(message)
        if self._client is None:
            self._early.append(message)
        else:
            self._client.receive(message)
