"""The admin API: calls that change workers and clients and show settings, protected by the operator's key."""

from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from router.config.addresses import WorkerAddress
from router.config.settings import Settings
from router.config.sources import refusal
from router.control.operator_access import has_key
from router.control.usage_export import ExportLookup, add_export
from router.core.model.events import Credited, Event, Forgotten
from router.core.model.request import ClientId, WorkerId
from router.errors import BadRequest, BodyTooLarge, ClientBusy, Unauthorized, UnknownClient, UnknownWorker, WorkerExists
from router.telemetry.history import FairnessHistory, FairnessSample
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.worker_registry import WorkerDrain, WorkerRegistry

T = TypeVar("T")

BODY_LIMIT: Final = 64 * 1024
"""Largest request body in bytes."""
_WORKER: Final = TypeAdapter(WorkerAddress)
_BEARER: Final = HTTPBearer(auto_error=False, description="The operator's key, --admin-key.")


class Credit(BaseModel):
    """Credit for a client: service that it may receive ahead of others."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cost: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
    """Credit in cost units, given in each queue."""


_CREDIT: Final = TypeAdapter(Credit)


class Operations(NamedTuple):
    """The parts of the router that the admin API works on."""

    directory: WorkerDirectory
    registry: WorkerRegistry
    worker_drain: WorkerDrain
    flush: Callable[[WorkerId], Awaitable[None]]
    history: FairnessHistory
    settings: Settings
    handle_event: Callable[[Event], None]
    known_clients: Container[ClientId]
    """The clients that the scheduler remembers."""
    usage: ExportLookup
    """Returns the usage of all clients."""


def needs_key(settings: Settings) -> Callable[..., None]:
    """Return a dependency of routes that raises Unauthorized without the operator's key. Checks nothing if none is set.

    It runs before the body is read.
    """
    if (key := settings.admin_key) is None:
        return lambda: None

    def check(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        if not has_key(dict(request.headers.raw), key):
            raise Unauthorized

    return check


def administration(operations: Operations) -> APIRouter:
    """Build the routes of the admin API. Each checks the key, and answers 401 without it, before it reads the body."""
    assert operations.settings.admin_key is not None
    responses: dict[int | str, dict[str, Any]] = {
        Unauthorized.status: {"description": "The operator's key is missing or wrong."}
    }
    routes = APIRouter(dependencies=[Depends(needs_key(operations.settings))], tags=["operator"], responses=responses)
    _membership(routes, operations)
    _maintenance(routes, operations)
    _clients(routes, operations)
    _state(routes, operations)
    add_export(routes, operations.usage)
    return routes


def _membership(routes: APIRouter, operations: Operations) -> None:
    @routes.post(
        "/workers",
        status_code=201,
        openapi_extra=_body(_WORKER.json_schema()),
        responses={
            BadRequest.status: {"description": "The body is not a worker's URL."},
            WorkerExists.status: {"description": "The worker exists already."},
        },
    )
    async def add(request: Request) -> dict[str, str]:
        """Add a worker. It receives requests once it answers polls."""
        worker = await _read(request, _WORKER)
        operations.registry.add(worker)
        return {"id": worker.id, "url": worker.url}

    @routes.delete("/workers/{worker}", status_code=202, responses=_UNKNOWN)
    async def remove(worker: str) -> dict[str, str]:
        """Drain a worker and remove it when its requests have ended. It stays removed until it is added again."""
        operations.registry.remove(worker)
        return {"id": worker}


def _maintenance(routes: APIRouter, operations: Operations) -> None:
    @routes.post("/workers/{worker}/drain", responses=_UNKNOWN)
    async def drain(worker: str) -> dict[str, Any]:
        """Send a worker no more requests. Those that run there finish; those that wait for it go to other workers."""
        for each in _addressed(operations.directory, worker):
            operations.worker_drain.drain(each)
        return {"id": worker, "drained": True}

    @routes.post("/workers/{worker}/resume", responses=_UNKNOWN)
    async def resume(worker: str) -> dict[str, Any]:
        """Send requests to a drained worker again."""
        for each in _addressed(operations.directory, worker):
            operations.worker_drain.resume(each)
        return {"id": worker, "drained": False}

    @routes.post(
        "/workers/{worker}/flush",
        responses=_UNKNOWN | {502: {"description": "The worker did not flush its cache, or cannot."}},
    )
    async def flush(worker: str) -> dict[str, Any]:
        """Flush a worker's prefix cache, and consider it empty. vLLM supports this only with VLLM_SERVER_DEV_MODE=1."""
        await operations.flush(_find_worker(operations.directory, worker).id)
        return {"id": worker, "flushed": True}


def _clients(routes: APIRouter, operations: Operations) -> None:
    def find(client: str) -> ClientId:
        if ClientId(client) not in operations.known_clients:
            raise UnknownClient(client)
        return ClientId(client)

    not_remembered: dict[int | str, dict[str, Any]] = {
        UnknownClient.status: {"description": "The router does not remember this client."}
    }

    @routes.post("/clients/{client}/credit", openapi_extra=_body(_CREDIT.json_schema()), responses=not_remembered)
    async def credit(client: str, request: Request) -> dict[str, Any]:
        """Let a client receive service of this cost ahead of others. Has no effect under policies without deficits."""
        granted = await _read(request, _CREDIT)
        operations.handle_event(Credited(find(client), granted.cost))
        return {"client": client, "cost": granted.cost}

    @routes.delete(
        "/clients/{client}",
        responses=not_remembered | {ClientBusy.status: {"description": "The client has requests in flight."}},
    )
    async def forget(client: str) -> dict[str, str]:
        """Forget a client that has no requests in flight. Its debt is kept."""
        operations.handle_event(Forgotten(find(client)))
        if ClientId(client) in operations.known_clients:
            raise ClientBusy(client)
        return {"client": client}


def _state(routes: APIRouter, operations: Operations) -> None:
    @routes.get("/fairness/history")
    async def history() -> list[FairnessSample]:
        """Service, queues, gaps and lags, sampled over the last hour, oldest first."""
        return operations.history.samples

    @routes.get("/config")
    async def config() -> Mapping[str, JsonValue]:
        """Every setting in force. Secrets are masked."""
        return operations.settings.model_dump(mode="json")


_UNKNOWN: Final[dict[int | str, dict[str, Any]]] = {UnknownWorker.status: {"description": "There is no such worker."}}


def _find_worker(directory: WorkerDirectory, worker: str) -> WorkerEndpoint:
    """Raises UnknownWorker."""
    for endpoint in directory.endpoints:
        if endpoint.id == worker:
            return endpoint
    raise UnknownWorker(worker)


def _addressed(directory: WorkerDirectory, worker: str) -> list[WorkerId]:
    """Return the workers that an operator means: a rank alone, or a URL with all its ranks. Raises UnknownWorker."""
    endpoint = _find_worker(directory, worker)
    return [each.id for each in directory.behind(endpoint.id)] if endpoint.server is None else [endpoint.id]


def _body(schema: Mapping[str, object]) -> dict[str, Any]:
    """Describe a request body in the OpenAPI document. FastAPI does not read it, so that the key is checked first."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(request: Request, adapter: TypeAdapter[T]) -> T:
    """Read and validate the body.

    Raises BadRequest, whose message leaves out the value because it may be a secret, or BodyTooLarge.
    """
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > BODY_LIMIT:
            raise BodyTooLarge(BODY_LIMIT)
    try:
        return adapter.validate_json(bytes(body))
    except ValidationError as error:
        raise BadRequest(refusal(error), code="invalid_body") from None
