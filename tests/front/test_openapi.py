"""The OpenAPI document describes all routes, and every call that it describes is answered as described."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

import schemathesis
from fastapi.routing import iter_route_contexts
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema

from router.api.families import FAMILIES
from router.config.settings import Settings
from router.process.single import build
from tests.support.running import TIMEOUT_S, RunningRouter, chat, emulated_workers, running_router

KEY: Final = "k" * 16
HEADERS: Final = {"authorization": f"Bearer {KEY}"}
SPARE: Final = "spare"
"""Id of the worker that is drained, flushed and removed."""
EVENTS: Final = "/ui/events"
"""A stream without an end; tests/control/page/test_routes.py reads it."""
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
FEW: Final = settings(
    max_examples=3,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
Operation: TypeAlias = APIOperation[Any, Any, Any, Any]
AnyCase: TypeAlias = Case[Any]
EMULATED: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"),
)


@asynccontextmanager
async def router_with_a_spare() -> AsyncIterator[RunningRouter]:
    with (
        emulated_workers(1, "--max-model-len", "256") as (kept,),
        emulated_workers(1, "--max-model-len", "256", "--dialect", "sglang") as (spare,),
    ):
        workers = [{"url": kept, "id": "kept"}, {"url": spare, "id": SPARE}]
        async with running_router(worker=workers, admin_key=KEY) as router:
            yield router


def operations(url: str) -> list[Operation]:
    """Return the operations in a router's document that end by themselves, with those that delete last.

    The class of the document is imported above, not in the thread that calls this: CPython 3.11 may fail to parse code
    in two threads at once.
    """
    document: OpenApiSchema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = []
    for operation in document.get_all_operations():
        assert isinstance(operation, Ok), operation
        if operation.ok().path != EVENTS:
            found.append(operation.ok())
    return sorted(found, key=lambda operation: operation.method == "delete")


def set_realistic_values(case: AnyCase, existing: Mapping[str, str]) -> None:
    """Fill a call with existing names and the document's example, because random values rarely pass validation."""
    if case.path == "/workers" and isinstance(case.body, dict):
        case.body = {"url": "http://127.0.0.1:9", "id": str(case.body.get("id", ""))}
    elif isinstance(case.body, dict):
        case.body = {**case.body, **example_of(case.operation.definition.raw)}
    case.path_parameters.update({name: existing[name] for name in case.path_parameters if name in existing})


def example_of(operation: Any) -> dict[str, Any]:
    """Return the example of the operation's body; an empty one for operator calls, which have none."""
    (example,) = operation["requestBody"]["content"]["application/json"]["schema"].get("examples", [{}])
    assert isinstance(example, dict)
    return example


def try_out(operation: Operation, existing: Mapping[str, str]) -> list[int]:
    """Make a few calls of an operation and return their statuses. Raises if an answer is not as described.

    `existing`: values for the parameters of its path.
    """
    statuses = []

    def call(case: AnyCase) -> None:
        statuses.append(case.call_and_validate(headers=HEADERS, checks=CHECKS, timeout=TIMEOUT_S).status_code)

    def realistic(case: AnyCase) -> None:
        set_realistic_values(case, existing)
        call(case)

    for make in (call, realistic):
        FEW(given(operation.as_strategy())(make))()
    if operation.body:
        FEW(given(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))(call))()
    return statuses


async def test_every_answer_is_as_described() -> None:
    """No answer is 5xx; status, type and shape are those of the document; bodies that it forbids are refused."""
    async with router_with_a_spare() as router:
        async with router.post(chat(), **HEADERS) as post:
            assert (await post.response()).status == 200
        (client,) = (await router.fairness())["clients"]
        existing = {"worker": SPARE, "name": "m", "client": client}

        def try_all() -> dict[str, list[int]]:
            return {operation.label: try_out(operation, existing) for operation in operations(router.url)}

        statuses = await asyncio.to_thread(try_all)
        assert all(statuses.values())


async def test_the_example_of_each_body_is_served() -> None:
    """The example of each call is served as it is."""
    with emulated_workers(1) as urls:
        async with running_router(*urls) as router:
            document = await router.get_json("/openapi.json")
            for path in EMULATED:
                async with router.http.post(path, json=example_of(document["paths"][path]["post"])) as response:
                    assert response.status == 200, (path, await response.text())


def test_every_route_is_described() -> None:
    """All paths and methods of the data path and control plane are described, and no error that is never sent."""
    app = build(Settings.model_validate({"worker": ["http://127.0.0.1:9"], "admin_key": KEY}))
    assert app.front
    control: Any = app._control
    paths = control.openapi()["paths"]
    described = {(path, method.upper()) for path, operations in paths.items() for method in operations}
    routes = {
        ((context.path or "").replace(":path}", "}"), method)
        for context in iter_route_contexts(control.routes)
        if getattr(context, "include_in_schema", False)  # not the folder with the files of the page
        for method in context.methods or ()
    }
    assert routes
    assert described == routes | {(path, "POST") for path in FAMILIES}
    statuses = {status for operations in paths.values() for each in operations.values() for status in each["responses"]}
    assert "422" not in statuses
