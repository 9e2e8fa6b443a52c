"""A worker's answer that is not a stream, on its way to the client."""

from collections.abc import Callable
from contextlib import suppress

from router.api.answer.outline import Outline
from router.api.answer.stream_reader import Answer
from router.api.body.call import Call
from router.api.endpoints.plain import tail_usage
from router.api.endpoints.responses import is_running
from router.api.families import Family
from router.channel.messages import Assignment
from router.core.model.events import Failed, Fault, Finished
from router.core.model.request import RequestId
from router.errors import WorkerBroke
from router.front.byte_budget import Hold
from router.front.exchange import Exchange, HeaderList
from router.front.handoff.both_legs import BothLegs
from router.front.outgoing import HELD_BYTES
from router.front.parsing import ParseSlots
from router.front.stored.response_keeper import ResponseKeeper
from router.front.verdict import FailedAttempt, fault_of, refusal
from router.upstream.http_client import WorkerResponse


class WholeAnswer:
    """Holds the answer of one worker until it is known to be good, or passes on one that is too long to be held."""

    def __init__(
        self,
        request: RequestId,
        call: Call,
        family: Family,
        exchange: Exchange,
        hold: Hold,
        slots: ParseSlots,
        keeper: ResponseKeeper | None,
        legs: BothLegs | None,
        settle: Callable[[Finished | Failed], None],
    ) -> None:
        """`hold`, `slots`, `keeper`: as of `Relay`; `legs`: the present calls, if two workers have the request at once;
        `settle`: reports the end of the request.
        """
        self._request = request
        self._call = call
        self._family = family
        self._exchange = exchange
        self._hold = hold
        self._slots = slots
        self._keeper = keeper
        self._legs = legs
        self._settle = settle

    async def relay(
        self, upstream: WorkerResponse, assignment: Assignment, headers: HeaderList
    ) -> FailedAttempt | None:
        """Relay the answer. A refusal by the engine counts as a failed attempt."""
        before = self._hold.amount
        body, all_here = await upstream.read_beginning(HELD_BYTES, self._hold.try_add)
        failed = refusal(self._call, self._family, upstream.status, body, headers, all_here=all_here)
        if failed is not None:
            return failed
        if not all_here:
            self._trust_answer()
            return await self._relay_long(upstream, assignment, headers, body, before)
        answer = self._family.read_whole(self._call, body)
        if answer.error is not None or answer.aborted:
            fault = Fault.ERROR if answer.error is None else fault_of(answer.error.code)
            return FailedAttempt(fault, True, headers=headers, body=body)
        has_tokens = answer.usage is not None and answer.usage.output_tokens > 0
        if self._legs is not None and not has_tokens and (failed := await self._legs.failed_prefill()) is not None:
            return failed
        self._trust_answer()
        if not self._notify_keeper(answer, assignment):
            self._settle(Finished(self._request, answer.usage, answer.answer_keys, answer.ended_turn))
        await self._until_known()
        await self._exchange.respond(upstream.status, headers, body)
        return None

    def _trust_answer(self) -> None:
        """Send this answer to the client from now on, whatever becomes of a prefill worker."""
        if self._legs is not None:
            self._legs.trust_answer()

    def _notify_keeper(self, answer: Answer, assignment: Assignment) -> bool:
        """Report the response in a whole answer to the keeper. Returns whether the engine is still computing it."""
        if self._keeper is None or answer.response is None:
            return False
        self._keeper.set_response(answer.response, assignment)
        if not (self._keeper.outlives_client and is_running(answer.status)):
            return False
        self._keeper.mark_running()
        return True

    async def _until_known(self) -> None:
        """Wait until every front finds the response, if there is one."""
        if self._keeper is not None:
            await self._keeper.until_known()

    async def _relay_long(
        self,
        upstream: WorkerResponse,
        assignment: Assignment,
        headers: HeaderList,
        first: bytes,
        before: int,
    ) -> FailedAttempt | None:
        """Relay an answer that is too long to be held, block by block. No retry is possible after its head is sent.

        `before`: bytes that were held before the beginning of the answer.
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
            self._hold.set(before)  # `UnreadBytes` counts what is written and not read
            block = await upstream.read()
        answer = self._read_outline(outline)
        self._notify_keeper(answer, assignment)
        if answer.error is None and not answer.aborted:
            self._settle(Finished(self._request, answer.usage, answer.answer_keys, answer.ended_turn))
        else:
            self._settle(Failed(self._request, True, answer.usage, Fault.ERROR))
        await self._until_known()
        await self._exchange.end()
        return None

    def _read_outline(self, outline: Outline) -> Answer:
        """Return what a relayed answer said; of one too long to parse, only its usage."""
        rest = outline.close()
        if rest is not None:
            with suppress(WorkerBroke):
                return self._family.read_whole(self._call, rest)
        return Answer(tail_usage(outline.tail), (), None, False)
