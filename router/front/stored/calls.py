"""Serves calls about stored responses: get, delete, cancel, and whatever else is below the path of a response.

They are sent straight to the worker that keeps the response, if this client owns it. They compute nothing, so they are
not queued and cost nothing. For any other id the answer is that there is no such response, as engines answer.
"""

from typing import Final

from router.api.body.call import Call
from router.api.endpoints.other import request_target
from router.auth.admission import AdmissionTicket
from router.channel.client import SchedulerClient
from router.channel.messages import FindResponse, IsOfAnother, ResponseChanged
from router.core.model.request import ClientId, RequestId, WorkerId
from router.errors import BadRequest, UnknownResponse
from router.front.byte_budget import Hold
from router.front.exchange import UNBUFFERED, Exchange
from router.front.stored.background import BackgroundResponses
from router.front.stored.response_keeper import ResponseKeeper
from router.front.verdict import worker_refused
from router.upstream.connections import WorkerConnections
from router.upstream.http_client import IdleTimeouts

HELD_BYTES: Final = 2**20
"""Bytes of an answer that are held before its head is sent."""
PASSED_ON: Final = (b"content-type", b"retry-after", b"allow")
SILENCE: Final = IdleTimeouts(30.0, None)
"""The first byte needs no computing and must arrive soon; a stream can then pause while its response is computed."""


class ResponseCalls:
    """Checks who owns a response, and forwards calls about it to the worker that keeps it."""

    def __init__(
        self,
        scheduler_client: SchedulerClient,
        connections: WorkerConnections,
        background: BackgroundResponses,
        *,
        allow_background: bool,
    ) -> None:
        """`allow_background`: whether clients can have responses computed in the background."""
        self._scheduler_client = scheduler_client
        self._connections = connections
        self._background = background
        self._allow_background = allow_background

    async def keeper(self, call: Call, owner: ClientId, ticket: AdmissionTicket) -> ResponseKeeper | None:
        """Return the keeper of the response that a call creates; None if the response is not stored.

        Raises BadRequest if the call asks for a background response that is not allowed, or for an id that it cannot
        have.
        """
        storage = call.storage
        if storage.background and not self._allow_background:
            # The engine answers at once and goes on computing; nothing would hold its place in the window or its bill.
            raise BadRequest("Background responses are not served here.", param="background", code="invalid_value")
        if storage.requested_id is not None and (
            storage.background or await self._scheduler_client.ask(IsOfAnother(storage.requested_id, owner))
        ):
            raise BadRequest("The response cannot have an id of your choice.", param="request_id", code="invalid_value")
        if not (storage.stored or storage.background):
            return None
        return ResponseKeeper(owner, call, ticket, self._scheduler_client, self._background)

    async def worker_of_previous(self, call: Call, owner: ClientId) -> WorkerId | None:
        """Return the worker that keeps the call's previous response; None if there is none. Raises UnknownResponse."""
        previous = call.storage.previous_id
        return None if previous is None else await self._worker_of(previous, owner)

    async def _worker_of(self, response: str, owner: ClientId) -> WorkerId:
        worker = await self._scheduler_client.ask(FindResponse(response, owner))
        if worker is None or worker not in self._connections.by_id:
            raise UnknownResponse(response)
        return worker

    async def serve(self, exchange: Exchange, body: bytes, hold: Hold, response: str, owner: ClientId) -> None:
        """Answer a call about a response. Raises UnknownResponse or WorkerError."""
        worker = await self._worker_of(response, owner)
        head = exchange.head
        upstream = await self._connections.by_id[worker].forward(
            request_target(head),
            body,
            RequestId(exchange.request_id),
            SILENCE,
            method=head.method,
            content_type=head.content_type or "application/json",
            passed=exchange.headers_for(worker),
        )
        try:
            first, all_here = await upstream.read_beginning(HELD_BYTES, hold.try_add)
            if (refused := worker_refused(upstream.status, everywhere=False)) is not None:
                raise refused
            if 200 <= upstream.status < 300 and head.method != "GET":
                self._scheduler_client.report(ResponseChanged(response, deleted=head.method == "DELETE"))
            headers = [(name, value) for name in PASSED_ON if (value := upstream.headers.get(name)) is not None]
            if all_here:
                await exchange.respond(upstream.status, headers, first)
                return
            exchange.whole = True
            await exchange.begin(upstream.status, [*headers, UNBUFFERED])
            block = first
            while block:
                await exchange.write(block)
                block = await upstream.read()
            await exchange.end()
        finally:
            upstream.close()
