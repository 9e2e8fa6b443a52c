"""The control plane: models, health, metrics, fairness and explanations, on FastAPI."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from router.api.body.edits import AddedFields
from router.api.body.error_bodies import error_body
from router.api.openapi import with_calls
from router.control.admin import Operations, administration
from router.core.model.request import WorkerId
from router.errors import (
    InvalidKey,
    MethodNotAllowed,
    NoWorker,
    RouterError,
    ShuttingDown,
    UnknownModel,
    UnknownPath,
    UnknownRequest,
)
from router.front.drain import Drain
from router.telemetry.explain import Explanation
from router.telemetry.report import FairnessReport, UsageReport, WorkerReport, report_json
from router.upstream.directory import WorkerDirectory, WorkerEndpoint

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
UsageLookup = Callable[[Mapping[bytes, bytes], str | None], UsageReport]


def control_plane(
    fleet: WorkerDirectory,
    scrape: Callable[[], Awaitable[bytes]],
    report: Callable[[], Awaitable[FairnessReport]],
    cards: Callable[[], Awaitable[Mapping[WorkerId, WorkerReport]]],
    usage: UsageLookup,
    explain: Callable[[str], Explanation],
    drain: Drain,
    drained: Collection[WorkerId],
    operations: Operations | None,
    lifespan: Lifespan,
) -> FastAPI:
    """The application behind every path that is not on the data path; `lifespan` opens and closes all of it.

    `scrape` gives the metrics as text, `cards` what is told of each worker; `usage` takes a call's headers and address,
    and raises InvalidKey; `explain` takes a request's id, and raises UnknownRequest. `drained`: the workers taken out.
    `operations`: what the operator's calls work on; without it, there are none of these.
    """
    app = Application(title="d2lpm-router", version=version("d2lpm-router"), lifespan=lifespan)
    _answer_errors(app)
    app.include_router(_models(fleet))
    app.include_router(_usage(usage))
    app.include_router(_health(fleet, cards, drain, drained))
    if operations is not None:
        app.include_router(administration(operations))
    app.include_router(_insight(scrape, report, explain))
    return app


class Application(FastAPI):
    """Describes the data path too, which it does not serve."""

    def openapi(self) -> dict[str, Any]:
        """The document, made when it is first asked for."""
        if self.openapi_schema is None:
            self.openapi_schema = with_calls(super().openapi())
        return self.openapi_schema


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == MethodNotAllowed.status:
            return _error(MethodNotAllowed(request.method, (error.headers or {}).get("Allow", "GET")))
        return _error(UnknownPath(request.url.path))

    @app.exception_handler(RouterError)
    async def router_error(request: Request, error: RouterError) -> Response:  # noqa: ARG001 - FastAPI's signature
        return _error(error)


def _models(fleet: WorkerDirectory) -> APIRouter:
    routes = APIRouter()

    def served() -> dict[str, dict[str, Any]]:
        alive = [backend for backend in fleet.backends if backend.healthy]
        parents = {name: parent for backend in alive for name, parent in backend.parents.items()}
        cards = {name: _model(name, name, parents.get(name)) for backend in alive for name in backend.models}
        aliases = {name: _model(name, model, None) for name, model in fleet.aliases.items() if model in cards}
        return dict(sorted({**cards, **aliases}.items()))

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The union of what the workers serve: models, adapters with the model that they are on, and aliases."""
        return {"object": "list", "data": list(served().values())}

    @routes.get("/v1/models/{name:path}", responses={UnknownModel.status: {"description": "Nobody serves it."}})
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        if (card := served().get(name)) is None:
            raise UnknownModel(name)
        return card

    return routes


def _usage(usage: UsageLookup) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/usage", responses={InvalidKey.status: {"description": "Not a good key."}})
    async def own(request: Request) -> UsageReport:
        """What whoever asks with its key was served, has of the fleet, and waits for."""
        return usage(dict(request.headers.raw), request.client.host if request.client is not None else None)

    return routes


def _health(
    fleet: WorkerDirectory,
    cards: Callable[[], Awaitable[Mapping[WorkerId, WorkerReport]]],
    drain: Drain,
    drained: Collection[WorkerId],
) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """The router runs; says nothing about its workers."""
        return {"status": "ok"}

    @routes.get("/ready", responses={NoWorker.status: {"description": "It could not."}})
    async def ready() -> dict[str, int]:
        """Whether a call could be served: 503 while no worker is alive, and once the router shuts down."""
        if drain.begun:
            raise ShuttingDown
        alive = sum(backend.healthy and backend.id not in drained for backend in fleet.backends)
        if not alive:
            raise NoWorker("No worker is alive.")
        return {"workers": alive}

    @routes.get("/workers")
    async def workers() -> dict[str, Any]:
        """Every worker, whether it is alive and trusted, and what is believed of its cache."""
        told = await cards()
        return {
            "workers": [
                _card(backend, told[backend.id], drained=backend.id in drained)
                for backend in fleet.backends
                if backend.id in told
            ]
        }

    return routes


def _insight(
    scrape: Callable[[], Awaitable[bytes]],
    report: Callable[[], Awaitable[FairnessReport]],
    explain: Callable[[str], Explanation],
) -> APIRouter:
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(await scrape(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/fairness", response_model=FairnessReport)
    async def fairness() -> Response:
        """Service, deficits, lags and waiting times by client; rounds and waits; load, gap and bound by worker."""
        return Response(await report_json(await report()), media_type="application/json")

    @routes.get("/explain/{request_id:path}", responses={UnknownRequest.status: {"description": "Not remembered."}})
    async def explanation(request_id: str) -> Explanation:
        """Why one of the last 10,000 requests went where and when it did, by its `x-request-id`."""
        return explain(request_id)

    return routes


def _model(name: str, root: str, parent: str | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "d2lpm", "root": root, "parent": parent}


def _card(backend: WorkerEndpoint, told: WorkerReport, *, drained: bool) -> dict[str, Any]:
    return {
        "id": backend.id,
        "url": backend.url,
        "healthy": backend.healthy,
        "drained": drained,
        "models": sorted(backend.models),
        "engine": backend.fields.engine,
        "version": backend.fields.version,
        "not_added_fields": _names(backend.fields.missing),
        "refused_fields": _names(backend.fields.refused),
        "breaker": told.breaker,
        "cache": told.cache,
    }


def _names(fields: Mapping[str, AddedFields]) -> dict[str, list[str]]:
    return {path: sorted(each.value for each in some) for path, some in fields.items()}


def _error(error: RouterError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error_body(error), error.status, headers, "application/json")
