"""Calls about stored responses: to look at one, to delete it, to cancel it, and whatever else is below its path.

They go straight to the worker that keeps the response, if it keeps it for this client, and compute nothing: so they
wait for no turn and are charged nothing. All others are answered that there is no such response, as engines do.
"""

from typing import Final

from router.api.body.call import Call
from router.api.endpoints.other import request_target
from router.auth.admission import AdmissionTicket
from router.channel.host import SchedulerHost
from router.core.model.request import ClientId, RequestId, WorkerId
from router.errors import BadRequest, UnknownResponse
from router.front.byte_budget import Hold
from router.front.exchange import Exchange
from router.front.stored.background import BackgroundResponses
from router.front.stored.keeper import ResponseKeeper
from router.front.stored.owners import StoredResponses
from router.front.verdict import worker_refused
from router.upstream.directory import WorkerDirectory
from router.upstream.http_client import IdleTimeouts

HELD_BYTES: Final = 2**20
"""Of an answer that are held before its head is sent."""
PASSED_ON: Final = (b"content-type", b"retry-after", b"allow")
SILENCE: Final = IdleTimeouts(30.0, None)
"""An engine has nothing to compute for such a call; what it streams may wait for what it computes."""


class ResponseCalls:
    """Knows who may ask for which response, and asks the worker that keeps it."""

    def __init__(
        self,
        scheduler_host: SchedulerHost,
        fleet: WorkerDirectory,
        stored: StoredResponses,
        background: BackgroundResponses,
        *,
        allow_background: bool,
    ) -> None:
        """`allow_background`: whether engines may be asked to compute in the background."""
        self._scheduler_host = scheduler_host
        self._fleet = fleet
        self._stored = stored
        self._background = background
        self._allow_background = allow_background

    def keeper(self, call: Call, owner: ClientId, permit: AdmissionTicket) -> ResponseKeeper | None:
        """Who takes care of the response of a call; None where nothing is kept of it.

        Raises BadRequest for what is not served.
        """
        storage = call.storage
        if storage.background and not self._allow_background:
            # Its answer comes at once, and the engine computes on: nobody would hold its place, or its bill.
            raise BadRequest("Background responses are not served here.", param="background", code="invalid_value")
        if storage.requested_id is not None and (
            storage.background or self._stored.is_of_another(storage.requested_id, owner)
        ):
            raise BadRequest("This response cannot have a name of its own.", param="request_id", code="invalid_value")
        if not (storage.stored or storage.background):
            return None
        return ResponseKeeper(owner, call, permit, self._stored, self._background, self._fleet)

    def worker_of_previous(self, call: Call, owner: ClientId) -> WorkerId | None:
        """The worker that keeps what a call goes on from; None where it does not. Raises UnknownResponse."""
        previous = call.storage.previous_id
        return None if previous is None else self._worker_of(previous, owner)

    def _worker_of(self, response: str, owner: ClientId) -> WorkerId:
        worker, cluster = self._stored.worker_of(response, owner), self._scheduler_host.scheduler.cluster
        if worker is None or worker not in cluster or cluster[worker].left:
            raise UnknownResponse(response)
        return worker

    async def serve(self, exchange: Exchange, body: bytes, hold: Hold, response: str, owner: ClientId) -> None:
        """Answer a call about a response. Raises UnknownResponse and WorkerError."""
        worker = self._worker_of(response, owner)
        head = exchange.head
        upstream = await self._fleet.forward(
            *(worker, request_target(head), body, RequestId(exchange.request_id), SILENCE),
            method=head.method,
            content_type=head.content_type or "application/json",
        )
        try:
            first, all_here = await upstream.read_beginning(HELD_BYTES, hold.try_add)
            if (refused := worker_refused(upstream.status, everywhere=False)) is not None:
                raise refused
            if 200 <= upstream.status < 300 and head.method != "GET":
                self._changed(response, head.method)
            headers = [(name, value) for name in PASSED_ON if (value := upstream.headers.get(name)) is not None]
            if all_here:
                await exchange.respond(upstream.status, headers, first)
                return
            exchange.whole = True
            await exchange.begin(upstream.status, headers)
            block = first
            while block:
                await exchange.write(block)
                block = await upstream.read()
            await exchange.end()
        finally:
            upstream.close()

    def _changed(self, response: str, method: str) -> None:
        """An engine did something to a response."""
        deleted = method == "DELETE"
        if deleted:
            self._stored.forget(response)
        self._background.check_now(response, deleted=deleted)
