"""Relays one call: queues it, sends it to a worker, passes the answer on, and retries at other workers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeVar

from router.api.answer.stream_reader import StreamReader
from router.api.body.call import Call
from router.api.body.edits import NO_FIELDS
from router.api.continuation import Rewriter, last_events
from router.api.endpoints.responses import ResponseReader
from router.api.families import Family, Reader
from router.api.handoff.nixl import decode_body
from router.channel.client import SchedulerClient
from router.channel.messages import Assignment, PrefillBeside, UnreachableWorker
from router.core.model.commands import Refusal
from router.core.model.events import Cancelled, Failed, Fault, Finished, HandoffLost, Prefilled, Returned
from router.core.model.request import Leg, Request, RequestId, Usage
from router.errors import (
    BadRequest,
    NoWorker,
    RouterError,
    UnservedPath,
    WorkerBroke,
    WorkerError,
    WorkerHung,
    WorkerUnreachable,
)
from router.front.answer_stream import AnswerStream
from router.front.byte_budget import Hold
from router.front.exchange import JSON_TYPE, Exchange, HeaderList, to_the_client
from router.front.handoff.both_legs import BothLegs
from router.front.handoff.fetch import FetchTooLate
from router.front.handoff.prefill import Prefill
from router.front.handoff.upkeep import Handoffs
from router.front.outgoing import OutgoingCall
from router.front.parsing import ParseSlots
from router.front.stored.response_keeper import ResponseKeeper
from router.front.verdict import FailedAttempt, failure, stream_failure
from router.front.whole_answer import WholeAnswer
from router.upstream.connections import ConnectedWorker, WorkerConnections
from router.upstream.http_client import IdleTimeouts, WorkerResponse

HEARTBEAT: Final = b"\n\n"
"""Blank lines, which every reader of events skips. SGLang's benchmark, among others, takes a comment for an event."""
EVENT_TYPE: Final = b"text/event-stream"
EVENT_STREAM: Final = (b"content-type", EVENT_TYPE + b"; charset=utf-8")

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Settings for all calls."""

    policy: str
    """The policy's name, for the headers."""
    heartbeat: float = 15.0
    """Seconds between blank lines sent to a streaming client in the queue; 0 for none."""
    response_headers: bool = True
    """Whether headers tell the client which worker serves its request, and why."""
    continuation: Literal["ids", "text", "off"] = "ids"
    """How another worker continues a stream whose worker failed."""
    strict: bool = False
    """Whether calls are refused that choose for themselves what the router chooses."""


class Relay:
    """Relays an admitted call. Reports to the scheduler the request, each failed attempt, and exactly one end."""

    def __init__(
        self,
        request: Request,
        call: Call,
        family: Family,
        exchange: Exchange,
        hold: Hold,
        slots: ParseSlots,
        scheduler_client: SchedulerClient,
        connections: WorkerConnections,
        outgoing: OutgoingCall,
        overhead: float,
        handoffs: Handoffs,
        keeper: ResponseKeeper | None = None,
    ) -> None:
        """`hold`: counts the bytes held for this call; `slots`: used to read a long answer; `outgoing`: sends the call.

        `overhead`: seconds that the router has spent on the call before it is queued; `handoffs`: looks after what is
        between prefill and decode workers; `keeper`: takes care of the response if the engine stores
        it or computes it in the background.
        """
        self._request = request
        self._call = call
        self._family = family
        self._exchange = exchange
        self._hold = hold
        self._slots = slots
        self._scheduler_client = scheduler_client
        self._connections = connections
        self._overhead = overhead
        self._keeper = keeper
        self._record = exchange.record
        self._outgoing = outgoing
        self._prefill: Prefill | None = None
        """The prefill of the call at a worker of its own, once there was one."""
        self._handoffs = handoffs
        self._legs: BothLegs | None = None
        """The present calls, if two workers have the request at once."""
        self._reader: Reader | None = None
        self._upstream: WorkerResponse | None = None
        """The answer of the current worker."""
        self._sent = False
        self._ending: Finished | Failed | None = None
        """How the request ended; None before, and forever if the client disconnects first."""
        self._settled = False

    @property
    def tokens(self) -> int | None:
        """Input and output tokens by the engine's usage; 0 if the call was not sent, None if its usage is unknown."""
        if not self._sent:
            return 0
        usage = self._usage() if self._ending is None or self._ending.usage is None else self._ending.usage
        return None if usage is None else usage.input_tokens + usage.output_tokens

    async def run(self, settings: RelaySettings) -> None:
        """Queue, forward and relay the call. Raises RouterError if the client still needs an answer."""
        submitted = self._scheduler_client.clock()
        if self._record is not None:
            self._record.note_queued()
        pending = self._scheduler_client.submit(self._request)
        try:
            failed = await self._try_workers(pending, submitted, settings)
            if failed is not None and not isinstance(self._ending, Finished):
                await self._report_failure(failed)
        except asyncio.CancelledError:
            if self._keeper is None or not self._keeper.cut or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            await self._exchange.end()
        finally:
            self._release_prompt()
            if self._keeper is not None and self._keeper.take_over(self._request.id):
                self._settled = True  # BackgroundResponses settles it
                self._close_upstream()
            self._settle(self._ending or Cancelled(self._request.id, self._usage()))

    async def _try_workers(
        self, pending: "asyncio.Future[Assignment]", submitted: float, settings: RelaySettings
    ) -> FailedAttempt | None:
        """Send the call to one worker after another, as the scheduler assigns them, until one of them ends the request.

        Returns the failure with which the client is to be answered; None if it has its answer.
        """
        failed: FailedAttempt | None = None
        while (assignment := await self._next_assignment(pending, settings.heartbeat, failed)) is not None:
            self._begin_attempt(assignment)
            headers: HeaderList = []
            if settings.response_headers:
                waited = self._scheduler_client.clock() - submitted
                headers = self._assignment_headers(assignment, settings.policy, waited)
            worker = self._connections.by_id[assignment.worker]
            outcome = self._mismatch(worker) or await self._take_leg(assignment, worker, headers, settings)
            if outcome is None:
                return None
            if not isinstance(outcome, FailedAttempt):
                pending = self._resubmit(outcome)
                continue
            if not await self._may_retry(outcome, settings):
                self._ending = self._ending or Failed(
                    self._request.id, outcome.accepted, self._usage(), outcome.fault, outcome.leg
                )
                # The failure of the first worker says more than the inability of this one to continue its stream.
                return failed if failed is not None and self._outgoing.continuation is not None else outcome
            failed = outcome
            begun = self._outgoing.continuation is not None
            pending = self._resubmit(
                Returned(self._request.id, failed.accepted, failed.fault, self._usage(), begun, failed.leg)
            )
        return failed

    def _resubmit(self, event: Returned | Prefilled | HandoffLost) -> "asyncio.Future[Assignment]":
        """Queue the call again after an attempt. Returns a future as `SchedulerClient.submit` does."""
        if self._record is not None:
            self._record.note_waiting(event)
        return self._scheduler_client.resubmit(event)

    def _settle(self, ending: Finished | Failed | Cancelled) -> None:
        """Report the end to the scheduler, once: as soon as the worker is done, even if the client still reads."""
        if not isinstance(ending, Cancelled):
            self._ending = ending
        if not self._settled:
            self._settled = True
            if self._record is not None:
                self._record.note_end(ending)
            self._close_upstream()
            self._scheduler_client.settle(ending)

    def _settle_complete(self, reader: Reader) -> None:
        """Report the end of a streamed answer that is complete."""
        self._settle(Finished(self._request.id, *reader.ending()))

    async def _next_assignment(
        self, pending: "asyncio.Future[Assignment]", heartbeat: float, failed: FailedAttempt | None
    ) -> Assignment | None:
        """Wait for the assignment. A streaming client gets heartbeats meanwhile, so that no proxy cuts an idle stream.

        Returns None if a retry is refused: then the failed attempt is reported. Raises the refusal if there was no
        attempt, or if that worker could not be connected to and no other is left, as the refusal says more.
        """
        if not pending.done():
            await self._beat(pending, heartbeat)
        try:
            return await pending
        except RouterError as refused:
            unsent = failed is not None and isinstance(failed.error, WorkerUnreachable) and not failed.accepted
            if failed is None or (unsent and refused.reason == Refusal.NO_WORKER):
                raise
            return None

    async def _beat(
        self, pending: "asyncio.Future[A]", heartbeat: float, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Send heartbeats to a streaming client until a future is done, or this is true."""
        while self._call.streamed and heartbeat and not (pending.done() or until()):
            await asyncio.wait([pending], timeout=heartbeat)
            if not (pending.done() or until()):
                await self._exchange.stream([EVENT_STREAM], HEARTBEAT)

    def _begin_attempt(self, assignment: Assignment) -> None:
        self._sent = True
        if self._record is not None:
            self._record.note_sent(assignment)
        if assignment.known_as is not None:
            self._adopt_id(assignment.known_as)

    def _adopt_id(self, known_as: RequestId) -> None:
        """Use the id that the scheduler gave the request, because another front has one with the client's id."""
        self._outgoing.known_as = known_as
        if not self._exchange.begun:
            self._exchange.request_id = known_as

    def _assignment_headers(self, assignment: Assignment, policy: str, waited: float) -> HeaderList:
        prefill = self._prefill if assignment.prefill is None else assignment.prefill
        prefilled_by = None if prefill is None else prefill.worker
        return [
            (b"x-d2lpm-worker", assignment.worker.encode()),
            (b"x-d2lpm-client", self._request.client.encode()),
            (b"x-d2lpm-policy", policy.encode()),
            (b"x-d2lpm-queue-ms", b"%.3f" % (waited * 1000)),
            (b"x-d2lpm-overhead-ms", b"%.3f" % (self._overhead * 1000)),
            (b"x-d2lpm-predicted-cached-tokens", b"%d" % assignment.cached_tokens),
            *([(b"x-d2lpm-prefill-worker", prefilled_by.encode())] if prefilled_by else []),
        ]

    async def _may_retry(self, failed: FailedAttempt, settings: RelaySettings) -> bool:
        """Return whether to retry the call elsewhere, or only its rest if the client has part of the answer."""
        reader = self._reader
        if (failed.fault is Fault.CALL and not failed.retry_elsewhere) or self._exchange.whole:
            return False
        if reader is None or not reader.has_delivered:
            return True
        if settings.continuation == "off" or not isinstance(reader, StreamReader):
            return False
        rest = self._outgoing.rest_of(reader)
        if rest is None:
            return False
        reader.resume()
        if rest.remaining is None or rest.remaining > 0:
            return True
        self._settle_complete(reader)
        await self._exchange.end(last_events(self._call, reader, "length"))
        return False

    def _mismatch(self, worker: ConnectedWorker) -> FailedAttempt | None:
        """Return a failure if the call would crash the worker, as generating does at an embedding worker; else None."""
        if self._family.engines and not self._family.is_of(worker.card.engine):
            return FailedAttempt(
                Fault.CALL, False, UnservedPath(self._call.path, self._call.model), retry_elsewhere=True
            )
        if not (self._family.generates and worker.card.embeds):
            return None
        error = BadRequest(f"The model `{self._call.model[:200]}` only makes embeddings.", param="model")
        return FailedAttempt(Fault.CALL, False, error, retry_elsewhere=True)

    async def _take_leg(
        self, assignment: Assignment, worker: ConnectedWorker, headers: HeaderList, settings: RelaySettings
    ) -> FailedAttempt | Prefilled | HandoffLost | None:
        """Send what is asked of the call to a worker. Returns None if that ended the request, otherwise what to report
        to the scheduler.
        """
        if assignment.prefill is not None:
            return await self._call_both(assignment, assignment.prefill, worker, headers, settings.heartbeat)
        if assignment.leg is Leg.DECODE:
            if self._prefill is None or not self._prefill.is_fresh():
                self._release_prompt()
                return HandoffLost(self._request.id)
        else:
            self._release_prompt()
            if assignment.leg is Leg.PREFILL and not self._call.whole:
                return await self._prefill_with_heartbeat(assignment, worker, settings.heartbeat)
        outlives_client = self._keeper is not None and self._keeper.outlives_client
        if outlives_client:  # the engine goes on without the client (background)
            self._exchange.ignore_disconnect()
        try:
            return await self._send_and_relay(assignment, worker, headers)
        finally:
            if outlives_client:
                self._exchange.heed_disconnect()

    async def _prefill_with_heartbeat(
        self, assignment: Assignment, worker: ConnectedWorker, heartbeat: float
    ) -> FailedAttempt | Prefilled:
        if self._prefill is None:
            self._prefill = Prefill(
                self._request.id,
                self._call,
                self._family,
                self._outgoing,
                self._hold,
                self._scheduler_client,
                self._handoffs.releases,
            )
        computed = asyncio.ensure_future(self._prefill.compute(assignment, worker, self._reader))
        try:
            await self._beat(computed, heartbeat)
            return await computed
        finally:
            computed.cancel()
            await asyncio.wait([computed])  # it gives back what it holds before the call's own hold is closed

    def _release_prompt(self) -> None:
        """Release what a prefill worker keeps of the call, if anything, because nobody will fetch it."""
        if self._prefill is not None:
            self._prefill.release()

    async def _call_both(
        self,
        assignment: Assignment,
        prefill: PrefillBeside,
        worker: ConnectedWorker,
        headers: HeaderList,
        heartbeat: float,
    ) -> FailedAttempt | HandoffLost | None:
        """Call a prefill worker, and the decode worker that waits for it, at once. A streaming client gets heartbeats
        until the first token.
        """
        try:
            legs = self._legs = BothLegs(
                self._request.id,
                self._call,
                self._family,
                self._outgoing,
                self._reader,
                prefill,
                self._connections.by_id[prefill.worker],
                assignment.worker,
                self._scheduler_client,
                self._handoffs,
            )
        except (NoWorker, KeyError):  # KeyError: it has left
            error = NoWorker("The prefill worker has left.", reason=Refusal.NO_WORKER)
            return FailedAttempt(Fault.BROKEN, False, error, leg=Leg.PREFILL)
        decode = asyncio.ensure_future(self._send_and_relay(assignment, worker, headers))
        outcome = asyncio.ensure_future(legs.outcome(decode))
        complete = False
        try:
            await self._beat(outcome, heartbeat, lambda: legs.has_tokens)
            failed = await outcome
            complete = failed is None
            if failed is not None and not legs.has_tokens and self._outgoing.continuation is None:
                self._reader = None  # the client has nothing of this answer
            return failed
        finally:
            outcome.cancel()
            try:
                await legs.close(decode, complete=complete)  # here, as a task may be cancelled before it begins
            finally:
                self._legs = None

    async def _send_and_relay(
        self, assignment: Assignment, worker: ConnectedWorker, headers: HeaderList
    ) -> FailedAttempt | HandoffLost | None:
        """Send the call to a worker and relay the answer. Returns None if that ended the request."""
        if self._outgoing.continuation is None:
            self._reader = None
        timeouts = assignment.timeouts
        first = timeouts.first_token if self._call.streamed else timeouts.whole
        idle_timeouts = IdleTimeouts(first, timeouts.between_tokens)
        try:
            upstream = self._upstream = await self._send(worker, idle_timeouts)
            if upstream is None:
                return FailedAttempt(Fault.CALL, False)
            headers += to_the_client(upstream.headers)
            if upstream.status == 200 and self._is_stream(upstream):
                return await self._relay_stream(upstream, worker, assignment, headers)
            answer = WholeAnswer(
                self._request.id,
                self._call,
                self._family,
                self._exchange,
                self._hold,
                self._slots,
                self._keeper,
                self._legs,
                self._settle,
            )
            return await answer.relay(upstream, assignment, headers)
        except FetchTooLate:
            self._scheduler_client.report(UnreachableWorker(assignment.worker))
            return HandoffLost(self._request.id)
        except (WorkerError, NoWorker) as error:
            return failure(error)
        finally:
            self._close_upstream()

    async def _send(self, worker: ConnectedWorker, idle_timeouts: IdleTimeouts) -> WorkerResponse | None:
        """Send the call, with what a prefill worker keeps for it, or how the two meet, if anything.

        Returns None if the rest of an answer cannot be asked for. Raises FetchTooLate if what is kept may be gone
        before this worker reads the call.
        """
        if (sent := self._outgoing.path_and_body(worker, self._reader)) is None:
            return None
        path, body = sent
        added = self._call.additions.wanted & worker.accepted.get(path, NO_FIELDS)
        if self._legs is not None:
            finish = self._legs.decode_body
            return await self._outgoing.send(worker, path, body, added, finish, idle_timeouts, once=False)
        prefill = self._prefill
        if prefill is None or (held := prefill.take()) is None:
            return await self._outgoing.send(worker, path, body, added, None, idle_timeouts, once=False)
        try:
            async with prefill.fetching(held, worker.card.id):
                fetch = partial(decode_body, params=held.params)
                return await self._outgoing.send(worker, path, body, added, fetch, idle_timeouts, once=True)
        except (WorkerUnreachable, NoWorker) as error:
            if not (isinstance(error, WorkerUnreachable) and error.accepted):
                prefill.keep(held)  # no worker has seen it
            raise

    def _close_upstream(self) -> None:
        """End the call to the current worker, if there is one."""
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    def _is_stream(self, upstream: WorkerResponse) -> bool:
        """Return whether the answer is a stream: as the call asked or, if that is unknown, by its content type."""
        if self._call.streamed is not None:
            return self._call.streamed
        return upstream.headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == EVENT_TYPE

    async def _relay_stream(
        self, upstream: WorkerResponse, worker: ConnectedWorker, assignment: Assignment, headers: HeaderList
    ) -> FailedAttempt | None:
        """Relay a streamed answer. Each block is sent to the client before the scheduler is notified.

        The last block is sent together with the end of the answer if both have arrived.
        """
        reader = self._reader = self._reader or self._new_reader(assignment)
        if isinstance(reader, StreamReader):
            reader.last_chunks.fingerprint = worker.fingerprint
        rewriter = None if (rest := self._outgoing.continuation) is None else Rewriter(rest)
        stream = AnswerStream(upstream, reader, rewriter, self._hold)
        legs = self._legs
        if legs is not None:
            legs.follow(reader.output_tokens)
        until_known = None if self._keeper is None else self._keeper.until_known
        on_first_token = partial(self._scheduler_client.start_stream, self._request.id, reader.output_tokens)
        try:
            held_back = None if legs is None else self._holds_back
            await stream.relay(self._exchange, headers, on_first_token, held_back, until_known)
        except (WorkerBroke, WorkerHung):
            if not reader.complete:
                raise
            stream.unsent += self._missing_end(reader)
        if reader.broken and reader.complete:
            stream.unsent += self._missing_end(reader)
        if until_known is not None:
            await until_known()
        failed = stream_failure(reader, headers)
        if failed is None and legs is not None:
            failed = await legs.failed_prefill()
        if failed is not None:
            if stream.unsent and not self._holds_back():
                await self._exchange.stream(headers, stream.unsent)
            return failed
        if isinstance(reader, StreamReader):
            worker.fingerprint = reader.last_chunks.fingerprint
        self._settle_complete(reader)
        await self._exchange.stream(headers, stream.unsent, last=True)
        return None

    def _holds_back(self) -> bool:
        """Return whether the answer must wait for its first token: without one, it may be that of a failed prefill."""
        return self._legs is not None and not self._legs.has_tokens

    def _new_reader(self, assignment: Assignment) -> Reader:
        """Return a reader for the answer at this assignment."""
        reader = self._family.reader(self._call)
        if isinstance(reader, ResponseReader) and (keeper := self._keeper) is not None:
            reader.on_response_id = lambda response: keeper.set_response(response, assignment)
        return reader

    def _missing_end(self, reader: Reader) -> bytes:
        """Return the closing events that the stream of a complete answer lacks."""
        return last_events(self._call, reader, None) if isinstance(reader, StreamReader) else b""

    async def _report_failure(self, failed: FailedAttempt) -> None:
        """Answer with the failure. Raises it instead if it is a RouterError, which the caller answers."""
        if self._record is not None:
            self._record.note_failure()
        if failed.error is not None:
            raise failed.error
        if self._call.streamed and failed.status == 200:
            await self._exchange.stream(failed.headers, failed.body, last=True)
        elif self._exchange.begun:
            await self._exchange.end(self._family.errors.refusal_event(failed.status, failed.body))
        elif (
            failed.status != 200 and (error_body := self._family.errors.refusal(failed.status, failed.body)) is not None
        ):
            others = [header for header in failed.headers if header[0] != JSON_TYPE[0]]
            await self._exchange.respond(failed.status, [*others, JSON_TYPE], error_body)
        else:
            await self._exchange.respond(failed.status, failed.headers, failed.body)

    def _usage(self) -> Usage | None:
        return self._reader.usage if self._reader is not None else None
