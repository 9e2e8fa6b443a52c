"""One call's journey, from its place in the queue to its last byte, by way of as many workers as it takes."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from router.api.answer.outline import Outline
from router.api.answer.stream_reader import Answer, StreamReader
from router.api.body.call import Call
from router.api.body.edits import AddedFields, fields_named_in
from router.api.continuation import Continuation, Rewriter, continuation, last_events
from router.api.endpoints.plain import tail_usage
from router.api.endpoints.responses import ResponseReader, is_running
from router.api.family import Family, Reader
from router.channel.host import SchedulerHost
from router.core.model.commands import Dispatch, Refusal
from router.core.model.events import Cancelled, Failed, Fault, Finished, Returned, WorkerLeft
from router.core.model.request import Request, Usage, WorkerId
from router.errors import BadRequest, NoWorker, RouterError, UnservedPath, WorkerBroke, WorkerHung, WorkerUnreachable
from router.front.byte_budget import Hold
from router.front.exchange import JSON_TYPE, Exchange
from router.front.parse_slots import INLINE_BYTES, ParseSlots
from router.front.stored.keeper import ResponseKeeper
from router.front.verdict import fault_of, lacks_path, worker_refused
from router.upstream.accepted_fields import BAD_REQUEST
from router.upstream.directory import WorkerDirectory
from router.upstream.http_client import CRUMBS, IdleTimeouts, WorkerResponse

HEARTBEAT = b": waiting for a worker\n\n"
EVENT_TYPE = b"text/event-stream"
EVENT_STREAM = (b"content-type", EVENT_TYPE + b"; charset=utf-8")
PASSED_ON = (b"content-type", b"retry-after")
"""An engine's response headers that are meant for the client."""
HELD_BYTES = 2**20
"""Of an answer in one piece are held before its head is sent: up to there an error in it, or its worker's death, can
still be told by a status, or be made good by another worker."""

HeaderList = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """What every journey is told."""

    policy: str
    """The policy's name, for the headers."""
    heartbeat: float = 15.0
    """Seconds between the comments sent to a streaming client that waits; 0 for none."""
    response_headers: bool = True
    """Tell the client where its request went and how it was placed."""
    continuation: Literal["ids", "text", "off"] = "ids"
    """How another worker goes on with a stream whose worker failed."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A try that did not come to its end, and what its client is told unless another worker does better."""

    fault: Fault
    accepted: bool
    """Whether the engine may have begun to compute."""
    error: RouterError | None = None
    """This, or else the engine's own words:"""
    status: int = 200
    headers: HeaderList | None = None
    body: bytes = b""
    """Of an answer with this status; of one with 200, the end of its stream."""
    elsewhere: bool = False
    """Nobody is to blame, and another worker may do it."""


class PendingEvent:
    """What has come of a stream since the last end of an event; it is held until the next."""

    __slots__ = ("_before", "_blocks", "_hold")

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._before = hold.amount
        self._blocks = 0

    def add(self, size: int, ready: bytes) -> bool:
        """One more block of so many bytes, by which `ready` is complete; whether these are crumbs.

        Raises Refused or NoRoom.
        """
        if not ready:
            self._hold.add(size)
            self._blocks += 1
        elif self._blocks:
            self._hold.set(self._before)
            self._blocks = 0
        return self._blocks > CRUMBS


class Relay:
    """An accepted call. The scheduler is told of its beginning, of each worker that lost it, and once of its end."""

    def __init__(
        self,
        request: Request,
        call: Call,
        family: Family,
        exchange: Exchange,
        hold: Hold,
        slots: ParseSlots,
        scheduler_host: SchedulerHost,
        fleet: WorkerDirectory,
        overhead: float,
        keeper: ResponseKeeper | None = None,
    ) -> None:
        """`hold`: of the bytes that are held for it; `slots`: in which its answer is read if that is long.

        `overhead`: seconds that the router has worked on it before its first turn; `keeper`: of the response that it
        makes, where that is kept.
        """
        self._request = request
        self._call = call
        self._family = family
        self._exchange = exchange
        self._hold = hold
        self._slots = slots
        self._scheduler_host = scheduler_host
        self._fleet = fleet
        self._overhead = overhead
        self._keeper = keeper
        self._reader: Reader | None = None
        self._rest: Continuation | None = None
        """What is left to ask for, where the client has a part of the answer."""
        self._upstream: WorkerResponse | None = None
        """The answer of the worker that has the call."""
        self._sent = False
        self._ending: Finished | Failed | None = None
        """How it ended; None while that is open, and to the end if the client leaves first."""
        self._settled = False

    @property
    def tokens(self) -> int | None:
        """Input and output that it used, by the engine's word; None where that is not known."""
        if not self._sent:
            return 0
        usage = self._usage() if self._ending is None or self._ending.usage is None else self._ending.usage
        return None if usage is None else usage.input_tokens + usage.output_tokens

    async def run(self, settings: RelaySettings) -> None:
        """Wait for the turn, forward, relay. Raises RouterError where the client is still owed an answer."""
        submitted = self._scheduler_host.clock()
        turn = self._scheduler_host.submit(self._request)
        lost: FailedAttempt | None = None
        try:
            while (dispatch := await self._turn(turn, settings.heartbeat, lost)) is not None:
                self._sent = True
                headers: HeaderList = []
                if settings.response_headers:
                    headers = self._account_of(dispatch, settings.policy, self._scheduler_host.clock() - submitted)
                before, lost = lost, self._unfit(dispatch.worker) or await self._attempt(dispatch, headers)
                if lost is None:
                    return
                if not await self._may_go_on(lost, settings):
                    self._ending = self._ending or Failed(self._request.id, lost.accepted, self._usage(), lost.fault)
                    # That this worker cannot go on with it says less than why another had to.
                    lost = before if before is not None and self._rest is not None else lost
                    break
                begun = self._rest is not None
                turn = self._scheduler_host.resubmit(
                    Returned(self._request.id, lost.accepted, lost.fault, self._usage(), begun)
                )
            if lost is not None and not isinstance(self._ending, Finished):
                await self._tell(lost)
        except asyncio.CancelledError:
            if self._keeper is None or not self._keeper.cut or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            await self._exchange.end()
        finally:
            if self._keeper is not None and self._keeper.take_over(self._request.id):
                self._settled = True  # by whoever follows the response
                self._hang_up()
            self._settle(self._ending or Cancelled(self._request.id, self._usage()))

    def _settle(self, ending: Finished | Failed | Cancelled) -> None:
        """Tell the scheduler of the end: once, as soon as the worker is done, even if the client still reads."""
        if not isinstance(ending, Cancelled):
            self._ending = ending
        if not self._settled:
            self._settled = True
            self._hang_up()
            self._scheduler_host.settle(ending)

    async def _turn(
        self, turn: "asyncio.Future[Dispatch]", heartbeat: float, lost: FailedAttempt | None
    ) -> Dispatch | None:
        """Wait in the queue; a streaming client hears from us meanwhile, so that no proxy cuts an idle stream.

        None if it is refused another try. Then its client is told of the one before, but if that took no connection:
        that there is no worker says more.
        """
        while self._call.streamed and heartbeat and not turn.done():
            await asyncio.wait([turn], timeout=heartbeat)
            if not turn.done():
                if not self._exchange.begun:
                    await self._exchange.begin(200, [EVENT_STREAM])
                await self._exchange.write(HEARTBEAT)
        try:
            return await turn
        except RouterError as refused:
            unsent = lost is not None and isinstance(lost.error, WorkerUnreachable) and not lost.accepted
            if lost is None or (unsent and refused.reason == Refusal.NO_WORKER):
                raise
            return None

    def _account_of(self, dispatch: Dispatch, policy: str, waited: float) -> HeaderList:
        return [
            (b"x-d2lpm-worker", dispatch.worker.encode()),
            (b"x-d2lpm-client", self._request.client.encode()),
            (b"x-d2lpm-policy", policy.encode()),
            (b"x-d2lpm-queue-ms", b"%.3f" % (waited * 1000)),
            (b"x-d2lpm-overhead-ms", b"%.3f" % (self._overhead * 1000)),
            (b"x-d2lpm-predicted-cached-tokens", b"%d" % dispatch.cached_tokens),
        ]

    async def _may_go_on(self, lost: FailedAttempt, settings: RelaySettings) -> bool:
        """Whether another worker may do what this one did not, or the rest of it, if the client has a part."""
        reader = self._reader
        if (lost.fault is Fault.CALL and not lost.elsewhere) or self._exchange.whole:
            return False
        if reader is None or not reader.has_delivered:
            return True
        if settings.continuation == "off" or not isinstance(reader, StreamReader):
            return False
        rest = continuation(self._call, reader)
        if rest is None:
            return False
        self._rest = rest
        reader.resume()
        if rest.remaining is None or rest.remaining > 0:
            return True
        self._settle(Finished(self._request.id, reader.usage, reader.answer_keys()))
        await self._exchange.end(last_events(self._call, reader, "length"))
        return False

    def _unfit(self, worker: WorkerId) -> FailedAttempt | None:
        """What keeps a call from a worker that would die of it; None if nothing does."""
        if not (self._family.generates and self._fleet[worker].embeds):
            return None
        error = BadRequest(f"The model `{self._call.model[:200]}` makes embeddings alone.", param="model")
        return FailedAttempt(Fault.CALL, False, error, elsewhere=True)

    async def _attempt(self, dispatch: Dispatch, headers: HeaderList) -> FailedAttempt | None:
        """Try a worker; where its engine would compute on without the client, so do we."""
        if self._keeper is None or not self._keeper.outlives_client:
            return await self._try(dispatch, headers)
        self._exchange.ignore_disconnect()
        try:
            return await self._try(dispatch, headers)
        finally:
            self._exchange.heed_disconnect()

    async def _try(self, dispatch: Dispatch, headers: HeaderList) -> FailedAttempt | None:
        """Send the call to a worker and pass its answer on; None if that was the request's end."""
        path, body = self._call.path, self._call.body
        if self._rest is None:
            self._reader = None
        elif (part := self._body_of_rest(dispatch.worker)) is not None:
            path, body = self._rest.path, part
        else:
            return FailedAttempt(Fault.CALL, False)
        patience = self._fleet.patience(dispatch.worker)
        limit = self._request.output_limit
        first = patience.first_token if self._call.streamed else patience.whole(limit)
        silence = IdleTimeouts(first, patience.between_tokens)
        added = self._call.additions.wanted & self._fleet.accepted(dispatch.worker, path)
        try:
            upstream = await self._send(dispatch.worker, path, body, added, silence)
            for name in PASSED_ON:
                if (value := upstream.headers.get(name)) is not None:
                    headers.append((name, value))
            if upstream.status == 200 and self._is_stream(upstream):
                return await self._relay(upstream, dispatch, headers)
            return await self._pass_on(upstream, dispatch.worker, headers)
        except WorkerUnreachable as error:
            if not error.accepted:
                # What waits for it must not run into the same wall, one by one.
                self._fleet.lost(dispatch.worker)
                self._scheduler_host.feed(WorkerLeft(dispatch.worker))
            return FailedAttempt(Fault.BROKEN, error.accepted, error)
        except (WorkerBroke, WorkerHung) as error:
            return FailedAttempt(Fault.BROKEN, True, error)
        except NoWorker as error:
            return FailedAttempt(Fault.CALL, False, error)
        finally:
            self._hang_up()

    async def _send(
        self, worker: WorkerId, path: str, body: bytes, added: AddedFields, silence: IdleTimeouts
    ) -> WorkerResponse:
        """Send the call with the fields that the router adds; once more without those by which it is refused.

        What the second sending proves is remembered, so that no client can make a worker seem to refuse a field by
        naming it in a bad call.
        """
        put = partial(self._call.additions.put, body, added)
        sent = put() if len(body) <= INLINE_BYTES else await asyncio.to_thread(put)
        upstream = self._upstream = await self._fleet.forward(
            *(worker, path, sent, self._request.id, silence),
            method=self._call.method,
            content_type=self._call.content_type,
        )
        if not added or upstream.status not in BAD_REQUEST:
            return upstream
        refused = fields_named_in((await upstream.begin(HELD_BYTES, self._hold.try_add))[0], added)
        if not refused:
            return upstream
        self._hang_up()
        again = await self._send(worker, path, body, added - refused, silence)
        if again.status not in BAD_REQUEST:
            self._fleet.refused(worker, path, refused)
        return again

    def _hang_up(self) -> None:
        """End the call to a worker, if there is one."""
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    def _is_stream(self, upstream: WorkerResponse) -> bool:
        """Whether the answer comes in events: as was asked for or, where that tells nothing, as it says itself."""
        if self._call.streamed is not None:
            return self._call.streamed
        return upstream.headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == EVENT_TYPE

    def _body_of_rest(self, worker: WorkerId) -> bytes | None:
        """What to ask a worker for; None if what has to be known for that is not."""
        assert self._rest is not None
        assert isinstance(self._reader, StreamReader)
        body = self._rest.body(self._fleet.context_tokens(worker))
        if body is None and (by_text := continuation(self._call, self._reader, ids=False)) is not None:
            self._rest = by_text
            body = by_text.body(None)
        return body

    async def _relay(self, upstream: WorkerResponse, dispatch: Dispatch, headers: HeaderList) -> FailedAttempt | None:
        """Stream the answer; each block is on its way to the client before it is counted.

        But for the last: where the answer's end came with it, the two leave together.
        """
        sent = started = self._scheduler_host.clock()
        patience = self._fleet.patience(dispatch.worker)
        reader = self._reader = self._reader or self._new_reader(dispatch.worker)
        rewriter = Rewriter(self._rest) if self._rest is not None else None
        source = rewriter or reader
        counted = False
        ready = b""
        pending = PendingEvent(self._hold)
        try:
            while block := await upstream.read():
                ready = reader.feed(block if rewriter is None else rewriter.feed(block))
                if pending.add(len(block), ready):
                    await upstream.gather()
                if ready and not upstream.read_up:
                    await self._write(ready, headers)
                    ready = b""
                if not counted and source.started:
                    counted = True
                    started = self._scheduler_host.clock()
                    patience.started(started - sent)
                    upstream.started()
                    self._scheduler_host.start_stream(self._request.id, lambda: reader.output_tokens)
                if reader.broken:
                    break
            ready += reader.feed(rewriter.close()) if rewriter is not None else b""
            ready += reader.close()
        except (WorkerBroke, WorkerHung):
            if not reader.complete:
                raise
            ready += self._missing(reader)
        if reader.broken and reader.complete:
            ready += self._missing(reader)
        lost = self._verdict(reader, headers)
        if lost is not None:
            if ready:
                await self._write(ready, headers)
            return lost
        patience.streamed(self._scheduler_host.clock() - started, reader.output_tokens)
        self._settle(Finished(self._request.id, reader.usage, reader.answer_keys()))
        await self._end(ready, headers)
        return None

    def _new_reader(self, worker: WorkerId) -> Reader:
        """One for an answer of this worker."""
        reader = self._family.reader(self._call)
        if isinstance(reader, ResponseReader) and (keeper := self._keeper) is not None:
            reader.on_response_id = lambda response: keeper.set_response(response, worker)
        return reader

    async def _end(self, last: bytes, headers: HeaderList) -> None:
        """Send the last part of a stream."""
        if not self._exchange.begun:
            await self._exchange.begin(200, headers)
        await self._exchange.end(last)

    def _missing(self, reader: Reader) -> bytes:
        """What a complete answer's stream lacks of its end."""
        return last_events(self._call, reader, None) if isinstance(reader, StreamReader) else b""

    async def _write(self, block: bytes, headers: HeaderList) -> None:
        if not self._exchange.begun:
            await self._exchange.begin(200, headers)
        await self._exchange.write(block)

    def _verdict(self, reader: Reader, headers: HeaderList) -> FailedAttempt | None:
        """What is wrong with a whole stream; None if it is complete."""
        if reader.broken and not reader.complete:
            return FailedAttempt(
                Fault.BROKEN, True, WorkerBroke("The worker's stream became something else than an answer.")
            )
        if reader.error is not None:
            fault = fault_of(reader.error.code)
            accepted = reader.started or fault is not Fault.FULL
            return FailedAttempt(Fault.BROKEN if reader.started else fault, accepted, headers=headers, body=reader.held)
        if reader.aborted:
            return FailedAttempt(Fault.ERROR, True, headers=headers, body=reader.held)
        if not reader.finished:
            return FailedAttempt(
                Fault.BROKEN, True, WorkerBroke("The worker ended the stream before the answer was complete.")
            )
        return None

    async def _pass_on(self, upstream: WorkerResponse, worker: WorkerId, headers: HeaderList) -> FailedAttempt | None:
        """Hand over an answer in one piece; an engine's own refusal is lost, and told as it is if it must be."""
        before = self._hold.amount
        body, all_here = await upstream.begin(HELD_BYTES, self._hold.try_add)
        if (refused := worker_refused(upstream.status, everywhere=self._family.served_by_all_engines)) is not None:
            lacks = all_here and lacks_path(upstream.status, body)
            error = UnservedPath(self._call.path, self._call.model) if lacks else refused
            return FailedAttempt(Fault.ERROR, False, error)
        if not 200 <= upstream.status < 300:
            fault = fault_of(upstream.status)
            told = body if all_here else b""  # a part of it is no JSON
            return FailedAttempt(fault, fault is Fault.ERROR, status=upstream.status, headers=headers, body=told)
        if not all_here:
            return await self._pass_through(upstream, worker, headers, body, before)
        answer = self._family.read_whole(self._call, body)
        if answer.error is not None or answer.aborted:
            fault = Fault.ERROR if answer.error is None else fault_of(answer.error.code)
            return FailedAttempt(fault, True, headers=headers, body=body)
        if not self._keep(answer, worker):
            self._settle(Finished(self._request.id, answer.usage, answer.answer_keys))
        await self._exchange.respond(upstream.status, headers, body)
        return None

    def _keep(self, answer: Answer, worker: WorkerId) -> bool:
        """Tell the keeper of the response in a whole answer; whether its engine computes on."""
        if self._keeper is None or answer.response is None:
            return False
        self._keeper.set_response(answer.response, worker)
        if not (self._keeper.outlives_client and is_running(answer.status)):
            return False
        self._keeper.mark_running()
        return True

    async def _pass_through(
        self, upstream: WorkerResponse, worker: WorkerId, headers: HeaderList, first: bytes, before: int
    ) -> FailedAttempt | None:
        """Hand over an answer that is too long to be held, as it comes; no other worker can make good its errors.

        `before`: bytes that were held without its beginning.
        """
        outline = Outline()
        if (length := upstream.headers.get(b"content-length")) is not None:
            headers.append((b"content-length", length))
        self._exchange.whole = True
        await self._exchange.begin(upstream.status, headers)
        block = first
        while block:
            await self._slots.read(self._hold.owner, block, outline.feed)
            await self._exchange.write(block)
            self._hold.set(before)  # from here on it is what the client has not read, see `Unread`
            block = await upstream.read()
        answer = self._read_outline(outline)
        self._keep(answer, worker)
        if answer.error is None and not answer.aborted:
            self._settle(Finished(self._request.id, answer.usage, answer.answer_keys))
        else:
            self._settle(Failed(self._request.id, True, answer.usage, Fault.ERROR))
        await self._exchange.end()
        return None

    def _read_outline(self, outline: Outline) -> Answer:
        """What an answer tells that has passed; of one that is too long to be read, its usage alone."""
        rest = outline.close()
        if rest is not None:
            with suppress(WorkerBroke):
                return self._family.read_whole(self._call, rest)
        return Answer(tail_usage(outline.tail), (), None, False)

    async def _tell(self, lost: FailedAttempt) -> None:
        """Let the client know how its request was lost. Raises the RouterError that says it, if it is one of ours."""
        if lost.error is not None:
            raise lost.error
        if self._call.streamed and lost.status == 200:
            if not self._exchange.begun:
                await self._exchange.begin(200, lost.headers or [])
            await self._exchange.end(lost.body)
        elif self._exchange.begun:
            await self._exchange.end(self._family.errors.refusal_event(lost.status, lost.body))
        elif lost.status != 200 and (told := self._family.errors.refusal(lost.status, lost.body)) is not None:
            others = [header for header in lost.headers or [] if header[0] != JSON_TYPE[0]]
            await self._exchange.respond(lost.status, [*others, JSON_TYPE], told)
        else:
            await self._exchange.respond(lost.status, lost.headers or [], lost.body)

    def _usage(self) -> Usage | None:
        return self._reader.usage if self._reader is not None else None
