"""The call to a prefill worker, and what that worker keeps until a decode worker fetches it."""

import asyncio
from contextlib import AbstractAsyncContextManager
from functools import partial

from router.api.body.call import Call
from router.api.families import Family
from router.api.handoff.nixl import prefill_body, read_kept_prompt
from router.channel.client import SchedulerClient
from router.channel.messages import Assignment
from router.core.model.events import Fault, Prefilled
from router.core.model.request import RequestId, WorkerId
from router.errors import RouterError
from router.front.byte_budget import Hold
from router.front.handoff.fetch import fetching
from router.front.handoff.releases import HeldPrompt, PromptReleases
from router.front.outgoing import HELD_BYTES, OutgoingCall
from router.front.verdict import FailedAttempt, failure, refusal
from router.upstream.connections import ConnectedWorker
from router.upstream.http_client import IdleTimeouts


class Prefill:
    """Lets prefill workers compute the prompt of one call, one after the other, and holds what the last one keeps.

    A kept prompt is fetched once, or released: because it is no longer needed, or once it is too old.
    """

    def __init__(
        self,
        request: RequestId,
        call: Call,
        family: Family,
        outgoing: OutgoingCall,
        hold: Hold,
        scheduler_client: SchedulerClient,
        releases: PromptReleases,
    ) -> None:
        self._request = request
        self._call = call
        self._family = family
        self._outgoing = outgoing
        self._hold = hold
        self._scheduler_client = scheduler_client
        self._releases = releases
        self._held: HeldPrompt | None = None
        self._release_timer: asyncio.TimerHandle | None = None
        self.worker: WorkerId | None = None
        """The last worker that has computed the prompt."""

    async def compute(
        self, assignment: Assignment, worker: ConnectedWorker, reader: object
    ) -> FailedAttempt | Prefilled:
        """Let a prefill worker compute the prompt of the call, and of the answer so far, and keep it.

        `reader`: has read the answer so far.
        """
        if (sent := self._outgoing.path_and_body(worker, reader)) is None:
            return FailedAttempt(Fault.CALL, False)
        path, body = sent
        timeouts = IdleTimeouts(assignment.timeouts.first_token, assignment.timeouts.between_tokens)
        before, upstream = self._hold.amount, None
        try:
            encode = partial(self._encode, worker, path, body)
            upstream = await self._outgoing.forward(worker, path, encode, body, timeouts)
            answer, all_here = await upstream.read_beginning(HELD_BYTES, self._hold_part)
            failed = refusal(self._call, self._family, upstream.status, answer, [], all_here=all_here)
            if failed is not None:
                return failed
            kept = read_kept_prompt(answer)
        except RouterError as error:
            return failure(error)
        finally:
            if upstream is not None:
                upstream.close()
            self._hold.set(before)
        self.keep(HeldPrompt(worker.card.id, kept.params, self._scheduler_client.clock()))
        self.worker = worker.card.id
        return Prefilled(self._request, kept.usage)

    def _hold_part(self, size: int) -> bool:
        """Hold so many more bytes of an answer, whether or not there is room.

        It is short, and if a part of it were missing, the worker would seem to have failed.
        """
        self._hold.set(self._hold.amount + size)
        return True

    def _encode(self, worker: ConnectedWorker, path: str, body: bytes) -> bytes:
        """Return the body that a prefill worker gets."""
        return prefill_body(self._outgoing.steered(worker, path, body))

    def is_fresh(self) -> bool:
        """Return whether a worker keeps the prompt and it is young enough to be fetched."""
        return self._held is not None and self._releases.is_fresh(self._held, self._scheduler_client.clock())

    def keep(self, held: HeldPrompt) -> None:
        """Hold a kept prompt until it is taken, or release it once it is too old."""
        self._held = held
        left = held.since + self._releases.seconds - self._scheduler_client.clock()
        self._release_timer = asyncio.get_running_loop().call_later(max(0.0, left), self.release)

    def take(self) -> HeldPrompt | None:
        """Return the kept prompt, if there is one; from now on it is neither sent nor released again."""
        if self._release_timer is not None:
            self._release_timer.cancel()
        held, self._held = self._held, None
        return held

    def fetching(self, held: HeldPrompt, worker: WorkerId) -> AbstractAsyncContextManager[None]:
        """Return a context in which to wait for the answer of a worker that is to fetch a taken prompt. Raises
        FetchTooLate there if the worker may have been too late.
        """
        return fetching(held, worker, self._releases, self._scheduler_client.clock())

    def release(self) -> None:
        """Release the kept prompt, if there is one, because nobody will fetch it."""
        if (held := self.take()) is not None:
            self._releases.release(held, self._call.model, self._scheduler_client.clock())
