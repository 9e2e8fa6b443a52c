"""One call's journey, from its place in the queue to its last byte."""

import asyncio
from dataclasses import dataclass

from router.api.answer import StreamReader, read_json
from router.api.call import Call
from router.api.error_json import refusal_event
from router.conductor import Conductor
from router.core.model import Cancelled, Dispatch, Failed, Finished, Request, Usage, WorkerLeft
from router.errors import NoWorker, WorkerBroke, WorkerUnreachable
from router.exchange import Exchange
from router.fleet import Fleet
from router.upstream import Upstream

HEARTBEAT = b": waiting for a worker\n\n"
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
PASSED_ON = (b"content-type", b"retry-after")
"""An engine's response headers that are meant for the client."""
UNAVAILABLE = frozenset({429, 503})
"""By these an engine turns a call away because it is full."""
TRIES = 3
"""Workers that a call is offered to at most, while none takes the connection."""

HeaderList = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class JourneySettings:
    """What every journey is told."""

    policy: str
    """The policy's name, for the headers."""
    heartbeat: float = 15.0
    """Seconds between the comments sent to a streaming client that waits; 0 for none."""
    response_headers: bool = True
    """Tell the client where its request went and how it was placed."""


class Journey:
    """An accepted call. Of each attempt the scheduler is told the beginning and, exactly once, the end."""

    def __init__(
        self, request: Request, call: Call, exchange: Exchange, conductor: Conductor, fleet: Fleet, overhead: float
    ) -> None:
        """`overhead`: seconds that the router has worked on it before its first turn."""
        self._request = request
        self._call = call
        self._exchange = exchange
        self._conductor = conductor
        self._fleet = fleet
        self._overhead = overhead
        self._reader: StreamReader | None = None
        self._ending: Finished | Failed | None = None
        """How it ended; None while that is open, and to the end if the client leaves first."""

    async def run(self, settings: JourneySettings) -> None:
        """Wait for the turn, forward, relay. Raises RouterError where the client is still owed an answer."""
        tries = 1
        while not await self._attempt(settings, last=tries == TRIES):
            # Nothing of the call reached that worker, and the worker is out: so another is tried, at no risk.
            self._ending = None
            tries += 1

    async def _attempt(self, settings: JourneySettings, *, last: bool) -> bool:
        """One submission and its end; whether that was the request's end too."""
        submitted = self._conductor.clock()
        turn = self._conductor.submit(self._request)
        try:
            dispatch = await self._turn(turn, settings.heartbeat)
            headers: HeaderList = []
            if settings.response_headers:
                waited = self._conductor.clock() - submitted
                headers = self._account_of(dispatch, settings.policy, waited)
            return await self._forward(dispatch, headers, last=last)
        finally:
            self._conductor.settle(self._ending or Cancelled(self._request.id, self._usage()))

    async def _turn(self, turn: "asyncio.Future[Dispatch]", heartbeat: float) -> Dispatch:
        """Wait in the queue; a streaming client hears from us meanwhile, so that no proxy cuts an idle stream."""
        while self._call.streamed and heartbeat and not turn.done():
            await asyncio.wait([turn], timeout=heartbeat)
            if not turn.done():
                if not self._exchange.begun:
                    await self._exchange.begin(200, [EVENT_STREAM])
                await self._exchange.write(HEARTBEAT)
        return await turn

    def _account_of(self, dispatch: Dispatch, policy: str, waited: float) -> HeaderList:
        return [
            (b"x-d2lpm-worker", dispatch.worker.encode()),
            (b"x-d2lpm-client", self._request.client.encode()),
            (b"x-d2lpm-policy", policy.encode()),
            (b"x-d2lpm-queue-ms", b"%.3f" % (waited * 1000)),
            (b"x-d2lpm-overhead-ms", b"%.3f" % (self._overhead * 1000)),
            (b"x-d2lpm-predicted-cached-tokens", b"%d" % dispatch.cached_tokens),
        ]

    async def _forward(self, dispatch: Dispatch, headers: HeaderList, *, last: bool) -> bool:
        """Send the call and pass its answer on; False if the worker took no connection and another may be tried."""
        try:
            upstream = await self._fleet.forward(dispatch.worker, self._call.path, self._call.body, self._request.id)
            try:
                headers += [(name, value) for name in PASSED_ON if (value := upstream.headers.get(name)) is not None]
                if upstream.status == 200 and self._call.streamed:
                    await self._relay(upstream, headers)
                else:
                    await self._pass_on(upstream, headers)
            finally:
                upstream.close()
        except WorkerUnreachable as error:
            self._ending = Failed(self._request.id, accepted=error.accepted)
            if not error.accepted:
                # What waits for it must not run into the same wall, one by one.
                self._fleet.lost(dispatch.worker)
                self._conductor.feed(WorkerLeft(dispatch.worker))
            if error.accepted or last:
                raise
            return False
        except NoWorker:
            self._ending = Failed(self._request.id, accepted=False)
            raise
        except WorkerBroke:
            self._ending = Failed(self._request.id, accepted=True, usage=self._usage())
            raise
        return True

    async def _relay(self, upstream: Upstream, headers: HeaderList) -> None:
        """Stream the answer; each block is on its way to the client before it is counted.

        But for the last: where the answer's end came with it, the two leave together.
        """
        reader = self._reader = StreamReader(self._call)
        started = False
        ready = b""
        if not self._exchange.begun:
            await self._exchange.begin(200, headers)
        while block := await upstream.read():
            ready = reader.feed(block)
            if ready and not upstream.read_up:
                await self._exchange.write(ready)
                ready = b""
            if reader.started and not started:
                started = True
                self._conductor.started(self._request.id, lambda: reader.output_tokens)
        last = reader.close()
        try:
            self._ending = self._verdict(reader)
        except WorkerBroke:
            if ready:
                await self._exchange.write(ready)
            raise
        await self._exchange.end(ready + last)

    def _verdict(self, reader: StreamReader) -> Finished | Failed:
        """What the whole stream came to. Raises WorkerBroke for one that stopped before its end."""
        if reader.error is not None:
            accepted = reader.started or reader.error.code not in UNAVAILABLE
            return Failed(self._request.id, accepted, reader.usage)
        if reader.aborted:
            return Failed(self._request.id, accepted=True, usage=reader.usage)
        if not reader.finished:
            raise WorkerBroke("The worker ended the stream before the answer was complete.")
        return Finished(self._request.id, reader.usage, reader.answers())

    async def _pass_on(self, upstream: Upstream, headers: HeaderList) -> None:
        """Hand over an answer in one piece, or an engine's own refusal as it is."""
        body = await upstream.read_all()
        if upstream.status == 200:
            answer = read_json(self._call, body)
            if answer.error is not None or answer.aborted:
                self._ending = Failed(self._request.id, accepted=True, usage=answer.usage)
            else:
                self._ending = Finished(self._request.id, answer.usage, answer.answers)
        else:
            refused = upstream.status < 500 or upstream.status in UNAVAILABLE
            self._ending = Failed(self._request.id, accepted=not refused)
        if self._exchange.begun:
            await self._exchange.end(refusal_event(upstream.status, body))
        else:
            await self._exchange.respond(upstream.status, headers, body)

    def _usage(self) -> Usage | None:
        return self._reader.usage if self._reader is not None else None
