"""The operator's calls: workers, clients and settings, for whoever has the operator's key."""

import logging
from collections.abc import Awaitable, Callable, Container, Mapping
from hmac import compare_digest
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field, JsonValue, TypeAdapter, ValidationError

from router.config.settings import Settings, WorkerAddress, is_loopback
from router.config.sources import refusal
from router.core.model.events import Credited, Event, Forgotten
from router.core.model.request import ClientId, WorkerId
from router.errors import BadRequest, BodyTooLarge, ClientBusy, Unauthorized, UnknownClient, UnknownWorker, WorkerExists
from router.telemetry.history import FairnessHistory, FairnessSample
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.registry import WorkerDrain, WorkerRegistry

log = logging.getLogger(__name__)

T = TypeVar("T")

BODY_LIMIT: Final = 64 * 1024
"""Bytes of what an operator sends."""
_WORKER: Final = TypeAdapter(WorkerAddress)
_BEARER: Final = HTTPBearer(auto_error=False, description="The operator's key, --admin-key.")


class Credit(BaseModel):
    """How much a client may be served before others."""

    cost: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
    """In cost units, in each queue."""


_CREDIT: Final = TypeAdapter(Credit)


class Operations(NamedTuple):
    """What the calls work on."""

    directory: WorkerDirectory
    registry: WorkerRegistry
    worker_drain: WorkerDrain
    flush: Callable[[WorkerId], Awaitable[None]]
    history: FairnessHistory
    settings: Settings
    handle_event: Callable[[Event], None]
    known_clients: Container[ClientId]
    """The clients that the scheduler knows."""


def is_open(settings: Settings) -> bool:
    """Whether there are operator's calls: with a key, and on a public address only where that is asked for."""
    if settings.admin_key is None or settings.admin_on_public or is_loopback(settings.host):
        return settings.admin_key is not None
    log.warning("the operator's calls are not served on %s without --admin-on-public", settings.host)
    return False


def administration(operations: Operations) -> APIRouter:
    """The routes of all calls; without the key each answers 401 before anything is read of it."""
    assert operations.settings.admin_key is not None
    expected = f"Bearer {operations.settings.admin_key.get_secret_value()}".encode()

    def check(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        if not compare_digest(request.headers.get("authorization", "").encode(), expected):
            raise Unauthorized

    responses: dict[int | str, dict[str, Any]] = {Unauthorized.status: {"description": "Not the operator's key."}}
    routes = APIRouter(dependencies=[Depends(check)], tags=["operator"], responses=responses)
    _membership(routes, operations)
    _turns(routes, operations)
    _clients(routes, operations)
    _state(routes, operations)
    return routes


def _membership(routes: APIRouter, operations: Operations) -> None:
    @routes.post(
        "/workers",
        status_code=201,
        openapi_extra=_body(_WORKER.json_schema()),
        responses={
            BadRequest.status: {"description": "Not a worker's URL."},
            WorkerExists.status: {"description": "It is there already."},
        },
    )
    async def add(request: Request) -> dict[str, str]:
        """Add a worker; it is sent requests once it answers polls."""
        worker = await _read(request, _WORKER)
        operations.registry.add(worker)
        return {"id": worker.id, "url": worker.url}

    @routes.delete("/workers/{worker}", status_code=202, responses=_UNKNOWN)
    async def remove(worker: str) -> dict[str, str]:
        """Drain a worker, and forget it once what runs there has ended; it stays away until it is added again."""
        operations.registry.remove(worker)
        return {"id": worker}


def _turns(routes: APIRouter, operations: Operations) -> None:
    @routes.post("/workers/{worker}/drain", responses=_UNKNOWN)
    async def drain(worker: str) -> dict[str, Any]:
        """Send a worker nothing more; what runs there ends, what waits for it goes elsewhere."""
        operations.worker_drain.drain(_found(operations.directory, worker).id)
        return {"id": worker, "drained": True}

    @routes.post("/workers/{worker}/resume", responses=_UNKNOWN)
    async def resume(worker: str) -> dict[str, Any]:
        """Put it back."""
        operations.worker_drain.resume(_found(operations.directory, worker).id)
        return {"id": worker, "drained": False}

    @routes.post("/workers/{worker}/flush", responses=_UNKNOWN | {502: {"description": "It did not, or cannot."}})
    async def flush(worker: str) -> dict[str, Any]:
        """Have a worker empty its prefix cache, and believe it empty. vLLM does so only with VLLM_SERVER_DEV_MODE=1."""
        await operations.flush(_found(operations.directory, worker).id)
        return {"id": worker, "flushed": True}


def _clients(routes: APIRouter, operations: Operations) -> None:
    def known(client: str) -> ClientId:
        if ClientId(client) not in operations.known_clients:
            raise UnknownClient(client)
        return ClientId(client)

    absent: dict[int | str, dict[str, Any]] = {UnknownClient.status: {"description": "It is not remembered."}}

    @routes.post("/clients/{client}/credit", openapi_extra=_body(_CREDIT.json_schema()), responses=absent)
    async def credit(client: str, request: Request) -> dict[str, Any]:
        """Let a client be served so much before others, where the policy keeps counters of service."""
        given = await _read(request, _CREDIT)
        operations.handle_event(Credited(known(client), given.cost))
        return {"client": client, "cost": given.cost}

    @routes.delete(
        "/clients/{client}", responses=absent | {ClientBusy.status: {"description": "It has requests under way."}}
    )
    async def forget(client: str) -> dict[str, str]:
        """Forget a client that has nothing under way, but for what it owes."""
        operations.handle_event(Forgotten(known(client)))
        if ClientId(client) in operations.known_clients:
            raise ClientBusy(client)
        return {"client": client}


def _state(routes: APIRouter, operations: Operations) -> None:
    @routes.get("/fairness/history")
    async def history() -> list[FairnessSample]:
        """Service, queues, gaps and lags at regular times of the last hour, oldest first."""
        return operations.history.samples

    @routes.get("/config")
    async def config() -> Mapping[str, JsonValue]:
        """Every setting as it is in force; of a secret, only that there is one."""
        return operations.settings.model_dump(mode="json")


_UNKNOWN: Final[dict[int | str, dict[str, Any]]] = {UnknownWorker.status: {"description": "There is no such worker."}}


def _found(fleet: WorkerDirectory, worker: str) -> WorkerEndpoint:
    for backend in fleet.backends:
        if backend.id == worker:
            return backend
    raise UnknownWorker(worker)


def _body(schema: Mapping[str, object]) -> dict[str, Any]:
    """What the API's description says of a body; it is read by hand, so that nothing is read without the key."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(request: Request, adapter: TypeAdapter[T]) -> T:
    """The body, as the adapter reads it. Raises BadRequest, without the value, which may be a secret."""
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > BODY_LIMIT:
            raise BodyTooLarge(BODY_LIMIT)
    try:
        return adapter.validate_json(bytes(body))
    except ValidationError as error:
        raise BadRequest(refusal(error), code="invalid_body") from None
