"""The control plane: models, health, metrics, fairness and explanations, built on FastAPI."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any, Final, Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse

from router.api.body.edits import AddedFields
from router.api.body.error_bodies import error_body
from router.api.openapi import with_calls
from router.control.admin import Operations, administration, needs_key
from router.control.page.routes import Page
from router.control.replicas import ClusterOperations, cluster_routes
from router.core.model.request import WorkerId
from router.errors import (
    BadRequest,
    InvalidKey,
    MethodNotAllowed,
    NoWorker,
    RouterError,
    ShuttingDown,
    Unauthorized,
    UnknownModel,
    UnknownPath,
    UnknownRequest,
)
from router.front.drain import Drain
from router.telemetry.explain import Explanation
from router.telemetry.report import FairnessReport, UsageReport, WorkerReport, report_json
from router.telemetry.session_report import GateReport
from router.upstream.directory import WorkerDirectory, WorkerEndpoint

CONTEXT: Final = "max_model_len"
"""The member of a model's card with the most tokens of prompt and answer together."""
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
NEEDS_KEY: Final[dict[int | str, dict[str, Any]]] = {
    Unauthorized.status: {"description": "The router listens on an address that others can reach: its key is needed."}
}
NOT_READY: Final = "No worker is alive, or the router is shutting down."


class Reports(Protocol):
    """What the control plane shows of the running router."""

    async def metrics(self) -> bytes:
        """Return all metrics in the Prometheus text format."""

    async def fairness(self) -> FairnessReport:
        """Return the report of /fairness."""

    async def workers(self) -> Mapping[WorkerId, WorkerReport]:
        """Return the report of each worker."""

    def usage(self, headers: Mapping[bytes, bytes], address: str | None) -> UsageReport:
        """Return the usage of the client that calls with these headers from this address. Raises InvalidKey."""

    def explain(self, request: str) -> Explanation:
        """Return what is remembered of a request. Raises UnknownRequest."""

    def sessions(self) -> GateReport:
        """Return the report of /sessions."""


def control_plane(
    directory: WorkerDirectory,
    reports: Reports,
    drain: Drain,
    drained: Collection[WorkerId],
    operations: Operations | None,
    page: Page,
    lifespan: Lifespan,
    cluster: ClusterOperations | None = None,
) -> FastAPI:
    """Build the application that serves every path off the data path.

    `drained`: the workers that an operator drained. `operations`: what the admin API works on; None switches it off.
    `lifespan` starts and stops the router. `cluster`: None for a router that is alone.
    """
    # FastAPI's own pages for the document load their scripts from elsewhere.
    no_pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}
    app = Application(title="d2lpm-router", version=version("d2lpm-router"), lifespan=lifespan, **no_pages)
    _answer_errors(app)
    app.include_router(_models(directory))
    app.include_router(_usage(reports))
    store = None if cluster is None else lambda: cluster.report().store
    app.include_router(_health(directory, reports, drain, drained, store))
    app.include_router(_workers(directory, reports, drained))
    if cluster is not None:
        check_key = None if operations is None else needs_key(operations.settings)
        app.include_router(cluster_routes(cluster, check_key, NEEDS_KEY))
    if operations is not None:
        app.include_router(administration(operations))
    app.include_router(_insight(reports))
    page.add_to(app)
    return app


class Application(FastAPI):
    """A FastAPI application whose OpenAPI document also describes the data path, which it does not serve."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, built at the first request."""
        if self.openapi_schema is None:
            self.openapi_schema = with_calls(super().openapi())
        return self.openapi_schema


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == MethodNotAllowed.status:
            return _error(MethodNotAllowed(request.method, (error.headers or {}).get("Allow", "GET")))
        return _error(UnknownPath(request.url.path))

    @app.exception_handler(RequestValidationError)
    async def wrong_parameter(request: Request, error: RequestValidationError) -> Response:  # noqa: ARG001
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return _error(BadRequest(f"`{name}`: {first['msg']}.", param=name, code="invalid_value"))

    @app.exception_handler(RouterError)
    async def router_error(request: Request, error: RouterError) -> Response:  # noqa: ARG001 - FastAPI's signature
        return _error(error)


def _models(directory: WorkerDirectory) -> APIRouter:
    routes = APIRouter()

    def served() -> dict[str, dict[str, Any]]:
        alive = [endpoint for endpoint in directory.endpoints if endpoint.healthy]
        names = {name for endpoint in alive for name in endpoint.models}
        cards = {name: _card(name, [endpoint.cards.get(name, {}) for endpoint in alive]) for name in names}
        aliases = {
            name: {**cards[model], "id": name, "root": model, "parent": None}
            for name, model in directory.aliases.items()
            if model in cards
        }
        return dict(sorted({**cards, **aliases}.items()))

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """All that the workers serve: models, adapters with their base model as `parent`, and aliases."""
        return {"object": "list", "data": list(served().values())}

    @routes.get("/v1/models/{name:path}", responses={UnknownModel.status: {"description": "No worker serves it."}})
    async def model(name: str) -> Any:
        """One model, adapter or alias."""
        if not name:
            return RedirectResponse("/v1/models")
        if (card := served().get(name)) is None:
            raise UnknownModel(name)
        return card

    return routes


def _usage(reports: Reports) -> APIRouter:
    routes = APIRouter()

    @routes.get(
        "/v1/usage", responses={InvalidKey.status: {"description": "The key is missing, unknown, revoked or expired."}}
    )
    async def own(request: Request) -> UsageReport:
        """The caller's service so far, its share and its requests, by the key of the call."""
        return reports.usage(dict(request.headers.raw), request.client.host if request.client is not None else None)

    return routes


def _health(
    directory: WorkerDirectory,
    reports: Reports,
    drain: Drain,
    drained: Collection[WorkerId],
    store: Callable[[], str] | None,
) -> APIRouter:
    """`store`: returns the state of the store of a cluster."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Liveness: the router runs. Says nothing about its workers."""
        return {"status": "ok"}

    @routes.get("/ping", response_class=Response, responses={NoWorker.status: {"description": NOT_READY}})
    async def ping() -> Response:
        """Readiness under SageMaker's name."""
        await ready()
        return Response()

    @routes.post("/ping", response_class=Response, responses={NoWorker.status: {"description": NOT_READY}})
    async def post_ping() -> Response:
        """Readiness under SageMaker's name; a body does not count."""
        return await ping()

    @routes.get("/load")
    async def load() -> dict[str, int]:
        """Calls that wait in the router or run at its workers, under vLLM's name."""
        clients = (await reports.fairness()).clients.values()
        return {"server_load": sum(client.queued + client.running for client in clients)}

    @routes.get("/ready", responses={NoWorker.status: {"description": NOT_READY}})
    async def ready() -> dict[str, int | str]:
        """Readiness: 503 while no worker is alive, and once the router shuts down.

        In a cluster, `degraded` says what is wrong with the store while calls are served without it.
        """
        if drain.begun:
            raise ShuttingDown
        workers = [endpoint for endpoint in directory.endpoints if not endpoint.ranks and endpoint.id not in drained]
        alive = sum(map(directory.is_up, workers))
        if not alive:
            raise NoWorker("No worker is alive.")
        state = "ok" if store is None else store()
        return {"workers": alive} if state == "ok" else {"workers": alive, "degraded": f"store {state}"}

    return routes


def _workers(directory: WorkerDirectory, reports: Reports, drained: Collection[WorkerId]) -> APIRouter:
    routes = APIRouter()

    @routes.get("/workers", responses=NEEDS_KEY)
    async def workers() -> dict[str, Any]:
        """Every worker: whether it is alive, the state of its circuit breaker, and its predicted cache."""
        by_worker = await reports.workers()
        return {
            "workers": [
                _worker_entry(endpoint, by_worker[endpoint.id], drained=endpoint.id in drained)
                for endpoint in directory.endpoints
                if endpoint.id in by_worker
            ]
        }

    return routes


def _insight(reports: Reports) -> APIRouter:
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse, responses=NEEDS_KEY)
    async def metrics() -> Response:
        """Metrics in the Prometheus text format."""
        return Response(await reports.metrics(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/fairness", response_model=FairnessReport, responses=NEEDS_KEY)
    async def fairness() -> Response:
        """Service, deficits, lag and waits of each client; rounds; load, service gap and its bound of each worker."""
        return Response(await report_json(await reports.fairness()), media_type="application/json")

    @routes.get("/sessions", responses=NEEDS_KEY)
    async def agent_sessions() -> GateReport:
        """Agent sessions: which have a place in a KV cache, which wait for one, and behind whom."""
        return reports.sessions()

    @routes.get(
        "/explain/{request_id:path}",
        responses=NEEDS_KEY | {UnknownRequest.status: {"description": "The router does not remember this request."}},
    )
    async def explanation(request_id: str) -> Explanation:
        """Why one of the last 10,000 requests was sent to its worker, and when, by its `x-request-id`."""
        return reports.explain(request_id)

    return routes


def _card(name: str, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what workers say of a model: the first one's members, and the least context of all."""
    usual = {"id": name, "object": "model", "created": 0, "owned_by": "d2lpm", "root": name, "parent": None}
    merged = usual | dict(next((card for card in cards if card), {}))
    lengths = [length for card in cards if type(length := card.get(CONTEXT)) is int]
    return {**merged, CONTEXT: min(lengths)} if lengths else merged


def _worker_entry(endpoint: WorkerEndpoint, report: WorkerReport, *, drained: bool) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "url": endpoint.url,
        "healthy": report.healthy,
        "drained": drained,
        "models": sorted(endpoint.models),
        "engine": endpoint.fields.engine,
        "version": endpoint.fields.version,
        "not_added_fields": _names(endpoint.fields.missing),
        "refused_fields": _names(endpoint.fields.refused),
        "breaker": report.breaker,
        "cache": report.cache,
    } | _rank_entry(endpoint)


def _rank_entry(endpoint: WorkerEndpoint) -> dict[str, Any]:
    """Return what is shown only of ranks, and of the URL of several ranks as a whole."""
    if endpoint.ranks:
        return {"takes": "calls that can name no rank", "ranks": [rank.id for rank in endpoint.ranks]}
    return (
        {} if endpoint.rank is None and endpoint.barrier is None else {"rank": endpoint.rank, "group": endpoint.barrier}
    )


def _names(fields: Mapping[str, AddedFields]) -> dict[str, list[str]]:
    return {path: sorted(field.value for field in added) for path, added in fields.items()}


def _error(error: RouterError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error_body(error), error.status, headers, "application/json")
