"""The two calls of one request that its prefill and its decode worker need at once."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from router.api.body.call import Call
from router.api.families import Family
from router.api.handoff.legs import Rendezvous, read_prefill
from router.channel.client import SchedulerClient
from router.channel.messages import PrefillBeside, UnreachableWorker
from router.core.model.events import Fault, HandoffLost, Prefilled
from router.core.model.request import Leg, RequestId, Usage, WorkerId
from router.errors import RouterError, WorkerBroke, WorkerHung
from router.front.handoff.releases import HeldPrompt
from router.front.handoff.upkeep import Handoffs
from router.front.outgoing import OutgoingCall
from router.front.verdict import FailedAttempt, failure, refusal
from router.upstream.connections import ConnectedWorker
from router.upstream.dialects import MODELS_PATH
from router.upstream.http_client import IdleTimeouts, WorkerResponse

PREFILL_BYTES: Final = 2**16
"""Bytes of a prefill worker's answer that are looked at. The rest is read and dropped."""
CONFIRM_SECONDS: Final = 0.5
"""How long a prefill worker may take to answer, or to fail, after its decode worker has."""
End = FailedAttempt | HandoffLost | None
"""How the call to a decode worker ends; None if the answer is complete."""


class BothLegs:
    """Calls the prefill worker of one request while the relay calls its decode worker, and sees that both end well.

    The client gets the decode worker's answer. A prefill worker's answer says nothing that the client sees, but it is
    read to its end: closing it sooner aborts the transfer. If one call fails, the other one is aborted, as it would
    wait for minutes. Once the decode worker has sent a token it needs the prefill worker no more.
    """

    def __init__(
        self,
        request: RequestId,
        call: Call,
        family: Family,
        outgoing: OutgoingCall,
        reader: object,
        prefill: PrefillBeside,
        prefill_worker: ConnectedWorker,
        decode: WorkerId,
        scheduler_client: SchedulerClient,
        handoffs: Handoffs,
    ) -> None:
        """`reader`: has read the answer so far. Raises NoWorker if the prefill worker does not say where to meet."""
        self._request = request
        self._call = call
        self._family = family
        self._outgoing = outgoing
        self._beside = prefill
        self._decode_worker = decode
        self._scheduler_client = scheduler_client
        self._releases = handoffs.releases
        self._loose_ends = handoffs.loose_ends
        self._rendezvous: Rendezvous = self._loose_ends.meet(prefill_worker)
        self.decode_body: Callable[[bytes], bytes] = self._rendezvous.decode_body
        """Returns the body for the decode worker."""
        self._prefill = asyncio.ensure_future(self._call_prefill_worker(prefill_worker, reader))
        self._output_tokens: Callable[[], int] | None = None
        self._earlier_tokens = 0
        self._has_tokens = False
        self._ended = False

    def follow(self, output_tokens: Callable[[], int]) -> None:
        """Set what returns the output tokens of the decode worker's stream, which begins, after those of an earlier
        one.
        """
        self._output_tokens, self._earlier_tokens = output_tokens, output_tokens()

    def trust_answer(self) -> None:
        """Note that the decode worker has sent an answer that is not streamed, or the beginning of a long one."""
        self._has_tokens = True

    @property
    def has_tokens(self) -> bool:
        """Whether the decode worker has sent a token that is to be believed."""
        if not self._has_tokens and self._output_tokens is not None:
            self._has_tokens = self._output_tokens() > self._earlier_tokens
        return self._has_tokens

    async def _call_prefill_worker(self, worker: ConnectedWorker, reader: object) -> FailedAttempt | Usage | None:
        """Return the prefill's usage, None if it is not known, or why it failed."""
        if (sent := self._outgoing.path_and_body(worker, reader)) is None:
            return FailedAttempt(Fault.CALL, False, leg=Leg.PREFILL)
        path, body = sent
        timeouts = IdleTimeouts(self._beside.timeouts.first_token, self._beside.timeouts.between_tokens)
        upstream = None
        try:
            encode = partial(self._encode, worker, path, body)
            upstream = await self._outgoing.forward(worker, path, encode, body, timeouts, once=True)
            answer, all_here = await _read_whole(upstream)
            failed = refusal(self._call, self._family, upstream.status, answer, [], all_here=all_here)
            if failed is not None:
                return replace(failed, leg=Leg.PREFILL)
            usage = read_prefill(self._rendezvous, answer) if all_here else None
            self._report(usage)
            return usage
        except RouterError as error:
            return replace(failure(error), leg=Leg.PREFILL)
        finally:
            if upstream is not None:
                upstream.close()

    def _encode(self, worker: ConnectedWorker, path: str, body: bytes) -> bytes:
        return self._rendezvous.prefill_body(self._outgoing.steered(worker, path, body))

    async def outcome(self, decode: "asyncio.Task[End]") -> End:
        """Wait for the end of the request, or for the failure of either call; then call `close`, as also if this is
        cancelled. `decode`: the decode worker's call.

        Returns None if the answer is complete.
        """
        await asyncio.wait([self._prefill, decode], return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            prefilled = self._prefill.result()
            if isinstance(prefilled, FailedAttempt):
                if not self.has_tokens:
                    prefilled = await self._blame_for_silence(prefilled)
                if not self.has_tokens:
                    return prefilled
                self._report(None)  # what it would have said of the prompt, the decode worker will say
        failed = await decode
        if isinstance(failed, FailedAttempt) and not self.has_tokens and failed.fault in (Fault.ERROR, Fault.BROKEN):
            return await self._blame(failed)
        return failed

    async def _blame_for_silence(self, failed: FailedAttempt) -> FailedAttempt:
        """Return the failure of a silent prefill worker as that of the decode worker, if that gives no sign of life: an
        SGLang begins with a prompt only when its decode worker has room for it.
        """
        worker = self._decode_worker
        if not isinstance(failed.error, WorkerHung) or await self._releases.is_alive(worker, MODELS_PATH):
            return failed
        self._scheduler_client.report(UnreachableWorker(worker))
        return replace(failed, leg=Leg.DECODE)

    async def _blame(self, failed: FailedAttempt) -> FailedAttempt:
        """Return the failure of a decode worker as that of the prefill worker, if that has failed as well, or has died
        since it answered: the decode worker could not fetch the prompt then, and may have noticed first.
        """
        worker = self._beside.worker
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_SECONDS):
                prefilled = await asyncio.shield(self._prefill)
            if isinstance(prefilled, FailedAttempt):
                return prefilled
        if await self._releases.is_alive(worker, MODELS_PATH):
            return failed
        self._scheduler_client.report(UnreachableWorker(worker))
        return replace(failed, fault=Fault.BROKEN, leg=Leg.PREFILL)

    def _report(self, usage: Usage | None) -> None:
        """Report that the prompt is computed, unless the request has ended."""
        if not self._ended:
            if self._outgoing.record is not None:
                self._outgoing.record.note_prefilled(usage)
            self._scheduler_client.report_prefilled(Prefilled(self._request, usage, decoding=True))

    async def failed_prefill(self) -> FailedAttempt | None:
        """Return why the decode worker's answer cannot be believed; None if it can.

        A decode worker may send an answer without a token if the prefill has failed. If such an answer is right, the
        prefill worker has answered, too, or is about to.
        """
        if self.has_tokens:
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_SECONDS):
                prefilled = await asyncio.shield(self._prefill)
            return prefilled if isinstance(prefilled, FailedAttempt) else None
        error = WorkerBroke("The decode worker has answered without its prompt.")
        return FailedAttempt(Fault.ERROR, True, error, leg=Leg.DECODE)

    async def close(self, decode: "asyncio.Task[End]", *, complete: bool) -> None:
        """Leave nothing of either call that nobody looks after, even if this is cancelled.

        `complete`: whether the answer is; then the prefill worker's answer is read to its end. Else what is left of
        both calls is aborted.
        """
        decode.cancel()
        try:
            await asyncio.wait([decode])  # it gives back what it holds before the call's own hold is closed
        finally:
            self._ended = True
            if complete:
                self._loose_ends.read_on(self._prefill, self._rendezvous)
            else:
                await self._abort()

    @property
    def _is_prefilled(self) -> bool:
        """Whether the prefill worker has answered that the prompt is computed."""
        prefill = self._prefill
        if not prefill.done() or prefill.cancelled() or prefill.exception() is not None:
            return False
        return not isinstance(prefill.result(), FailedAttempt)

    async def _abort(self) -> None:
        prefilled = self._is_prefilled
        self._prefill.cancel()
        try:
            await asyncio.wait([self._prefill])
        finally:
            workers = [self._decode_worker] if prefilled else [self._decode_worker, self._beside.worker]
            self._loose_ends.abort(self._rendezvous, *workers)
            if prefilled and not self.has_tokens and (params := self._rendezvous.kept_params) is not None:
                now = self._scheduler_client.clock()
                self._releases.release(
                    HeldPrompt(self._beside.worker, params, now), self._call.model, now, self._decode_worker
                )


async def _read_whole(upstream: WorkerResponse) -> tuple[bytes, bool]:
    """Read an answer to its end. Returns its beginning, and whether that is all."""
    beginning, all_here = await upstream.read_beginning(PREFILL_BYTES, lambda _: True)
    while not all_here and await upstream.read():
        pass
    return beginning, all_here
