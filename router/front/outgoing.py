"""One call as workers get it: its path and body, or those for the rest of its answer, and the client's headers."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from router.api.answer.stream_reader import StreamReader
from router.api.body.call import Call
from router.api.body.edits import AddedFields, fields_named_in
from router.api.body.steering import without_steering
from router.api.continuation import Continuation, continuation
from router.channel.client import SchedulerClient
from router.channel.messages import FieldsRefused, UnreachableWorker
from router.core.model.request import RequestId, Role
from router.errors import WorkerUnreachable
from router.front.byte_budget import Hold
from router.front.call_record import CallRecord
from router.front.exchange import Exchange
from router.front.parsing import INLINE_BYTES
from router.upstream.accepted_fields import BAD_REQUEST
from router.upstream.connections import ConnectedWorker
from router.upstream.http_client import IdleTimeouts, WorkerResponse
from router.upstream.ranks.pinning import with_rank

HELD_BYTES: Final = 2**20
"""Bytes of a whole answer that are held before its head is sent. Until then, an error in the answer or the death of its
worker can still be reported by a status, or another worker can be tried."""


class OutgoingCall:
    """Sends one call to workers, as often as it takes."""

    def __init__(
        self,
        call: Call,
        known_as: RequestId,
        exchange: Exchange,
        hold: Hold,
        scheduler_client: SchedulerClient,
    ) -> None:
        """`known_as`: the id under which workers know the request; `hold`: counts the bytes held for this call."""
        self.known_as = known_as
        self.continuation: Continuation | None = None
        """The rest to ask another worker for, once the client has part of the answer."""
        self._call = call
        self._exchange = exchange
        self._hold = hold
        self._scheduler_client = scheduler_client

    @property
    def record(self) -> CallRecord | None:
        """What the front notes of the call; None if nobody wants to know."""
        return self._exchange.record

    def rest_of(self, reader: StreamReader) -> Continuation | None:
        """Ask for the rest of this answer from now on, and return what that is; None if nobody can continue it."""
        if (rest := continuation(self._call, reader)) is not None:
            self.continuation = rest
        return rest

    def path_and_body(self, worker: ConnectedWorker, reader: object) -> tuple[str, bytes] | None:
        """Return the path and the body of the call, or of that for the rest of its answer; None if that needs a value
        that is unknown. `reader`: has read the answer so far.
        """
        if self.continuation is None:
            return self._call.path, self._call.body
        assert isinstance(reader, StreamReader)
        body = self.continuation.body(worker.card.context_tokens)
        if body is None and (by_text := continuation(self._call, reader, ids=False)) is not None:
            self.continuation = by_text
            body = by_text.body(None)
        return None if body is None else (self.continuation.path, body)

    async def forward(
        self,
        worker: ConnectedWorker,
        path: str,
        encode: Callable[[], bytes],
        body: bytes,
        timeouts: IdleTimeouts,
        *,
        once: bool = False,
    ) -> WorkerResponse:
        """Send the call and return when the answer begins. `encode` makes of `body` what the worker gets.

        `once`: as it names what another worker keeps, which is gone once it is fetched.

        Raises NoWorker, WorkerUnreachable or WorkerHung if there is no answer.
        """
        light = self._call.light and len(body) <= INLINE_BYTES
        sent = encode() if light else await asyncio.to_thread(encode)
        try:
            return await worker.forward(
                path,
                sent,
                self.known_as,
                timeouts,
                method=self._call.method,
                content_type=self._call.content_type,
                passed=self._exchange.headers_for(worker.card.id),
                once=once,
            )
        except WorkerUnreachable as error:
            if not error.accepted:
                # Move the requests that wait for this worker, before each fails to connect too.
                self._scheduler_client.report(UnreachableWorker(worker.card.id))
            raise

    async def send(
        self,
        worker: ConnectedWorker,
        path: str,
        body: bytes,
        added: AddedFields,
        finish: Callable[[bytes], bytes] | None,
        timeouts: IdleTimeouts,
        *,
        once: bool,
    ) -> WorkerResponse:
        """Send the call with the fields that the router adds; if the worker refuses some of them, again without these.

        Fields count as refused only if the second call succeeds. So a client cannot make a worker seem to refuse a
        field by naming it in a bad call.

        `finish`: adds to the body how the worker gets its prompt from a prefill worker; `once`: only to that of the
        first call, as a refusal makes the prefill worker let go of the prompt. Then the second one has the worker
        compute it.
        """
        encode = partial(self._encode, worker, path, body, added, finish)
        upstream = await self.forward(worker, path, encode, body, timeouts, once=finish is not None)
        if not added or upstream.status not in BAD_REQUEST:
            return upstream
        try:
            refused = fields_named_in((await upstream.read_beginning(HELD_BYTES, self._hold.try_add))[0], added)
        except BaseException:
            upstream.close()
            raise
        if not refused:
            return upstream
        upstream.close()
        again = await self.send(worker, path, body, added - refused, None if once else finish, timeouts, once=once)
        if again.status not in BAD_REQUEST:
            names = frozenset([field.value for field in refused])
            self._scheduler_client.report(FieldsRefused(worker.card.id, path, names))
        return again

    def _encode(
        self,
        worker: ConnectedWorker,
        path: str,
        body: bytes,
        added: AddedFields,
        finish: Callable[[bytes], bytes] | None,
    ) -> bytes:
        """Return the body as this worker gets it."""
        body = self._call.additions.put(self.steered(worker, path, body), added)
        return body if finish is None else finish(body)

    def steered(self, worker: ConnectedWorker, path: str, body: bytes) -> bytes:
        """Return a body in which the client chooses nothing that the router chooses. It names the worker's rank if the
        engine reads that there.
        """
        card = worker.card
        if not (card.has_ranks or card.role is not Role.BOTH):
            return body
        body = without_steering(body)
        return with_rank(body, card.engine, path, card.rank) if card.has_ranks else body
