"""What is left of the two calls of a request once it has ended: an answer to be read, calls to be aborted."""

import asyncio
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, Self
from uuid import uuid4

from router.api.handoff.legs import Rendezvous
from router.api.handoff.mooncake import MooncakeTransfer
from router.api.handoff.sglang import ABORT_PATH, MOST_ROOMS, SglangRoom, abort_body
from router.core.model.request import Connector, RequestId, WorkerId
from router.errors import NoWorker, RouterError
from router.upstream.connections import ConnectedWorker, WorkerConnections
from router.upstream.directory import bootstrap_url, host_of
from router.upstream.http_client import IdleTimeouts

ABORT_SECONDS: Final = 2.0
"""How long a worker may take to answer that it has aborted a call."""
ABORT_PAUSES: Final = (0.0, 0.5)
"""When a call is aborted: at once, and again in case it had not been read by then. Otherwise a worker would keep its
place for minutes, waiting for the other one."""


class LooseEnds:
    """Gives each request a place where its two calls meet, and cleans up after it."""

    def __init__(self, connections: WorkerConnections) -> None:
        self._connections = connections
        self._tasks: set[asyncio.Task[object]] = set()
        self._answers: set[asyncio.Task[object]] = set()
        """The prefill answers that are still read."""
        self._closing = asyncio.Event()
        self._rooms: set[int] = set()
        """The rooms in use. A worker does not tell two requests in one room apart."""

    @property
    def open(self) -> int:
        """How many answers are still read, calls being aborted, and rooms in use."""
        return len(self._tasks) + len(self._answers) + len(self._rooms)

    def meet(self, prefill: ConnectedWorker) -> Rendezvous:
        """Return where the two calls of one request meet. Raises NoWorker if the prefill worker does not say where."""
        card = prefill.card
        port = card.bootstrap_port
        if card.connector is Connector.SGLANG and port is not None:
            rank = card.rank if card.has_ranks else None
            return SglangRoom(host_of(card.url), port, self._new_room(), uuid4().hex, rank)
        if card.connector is Connector.MOONCAKE and port is not None and card.transfer_engine is not None:
            return MooncakeTransfer(uuid4().hex, card.transfer_engine, bootstrap_url(card.url, port))
        raise NoWorker("The prefill worker is unknown.", reason="rejected-no-endpoints")

    def _new_room(self) -> int:
        while (room := secrets.randbelow(MOST_ROOMS)) in self._rooms:
            pass
        self._rooms.add(room)
        return room

    def leave(self, rendezvous: Rendezvous) -> None:
        """Free the place where two calls have met: both are over."""
        if isinstance(rendezvous, SglangRoom):
            self._rooms.discard(rendezvous.number)

    def read_on(self, answer: asyncio.Task[Any], rendezvous: Rendezvous) -> None:
        """Let the prefill worker's answer be read to its end in the background, and free the place then."""
        self._answers.add(answer)

        def ended(_: object) -> None:
            self._answers.discard(answer)
            self.leave(rendezvous)

        answer.add_done_callback(ended)

    def abort(self, rendezvous: Rendezvous, *workers: WorkerId) -> None:
        """Abort the calls of a request at these workers, whose connections are closed already, and free the place."""
        if rendezvous.abort_id is None:
            self.leave(rendezvous)
        else:
            self._begin(self._abort(rendezvous, rendezvous.abort_id, workers))

    async def _abort(self, rendezvous: Rendezvous, abort_id: str, workers: tuple[WorkerId, ...]) -> None:
        try:
            for pause in ABORT_PAUSES:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._closing.wait()
                await asyncio.gather(*(self._send_abort(worker, abort_id) for worker in workers))
        finally:
            self.leave(rendezvous)

    async def _send_abort(self, worker: WorkerId, abort_id: str) -> None:
        timeouts = IdleTimeouts(ABORT_SECONDS, ABORT_SECONDS)
        with suppress(RouterError, KeyError):  # KeyError: the worker has left meanwhile
            body = abort_body(abort_id)
            upstream = await self._connections.by_id[worker].forward(ABORT_PATH, body, RequestId(abort_id), timeouts)
            try:
                await upstream.read_beginning(2**16, lambda _: True)
            finally:
                upstream.close()

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the aborts under way, which take a few seconds at most, and stop reading."""
        self._closing.set()
        for answer in self._answers:
            answer.cancel()
        await asyncio.gather(*self._tasks, *self._answers, return_exceptions=True)
