"""Bodies must be JSON that the router can parse, on every path, with the JSON content type (JSONTestSuite)."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from router.auth.keys_file import hash_of
from tests.support.running import CHAT, COMPLETIONS, RunningRouter, running_router
from tests.support.scripted_engine import ScriptedEngine, scripted_engine

CASES = sorted((Path(__file__).parents[2] / "json_test_suite" / "test_parsing").glob("*.json"))
PATHS = {
    CHAT: b'"messages":[{"role":"user","content":"Hi"}]',
    COMPLETIONS: b'"prompt":"Hi"',
    "/v1/responses": b'"input":"Hi"',
    "/v1/messages": b'"messages":[{"role":"user","content":"Hi"}],"max_tokens":4',
    "/v1/messages/count_tokens": b'"messages":[{"role":"user","content":"Hi"}]',
    "/v1/embeddings": b'"input":"Hi"',
    "/v1/rerank": b'"query":"Hi","documents":["a"]',
    "/tokenize": b'"prompt":"Hi"',
    f"{CHAT}/batch": b'"messages":[[{"role":"user","content":"Hi"}]]',
    "/v1/nobody/knows": b'"y":1',
}
"""One path per family, and unknown paths, each with the members that a call needs."""
ANSWER = (
    b'{"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"text":"a","finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
KEY = "sk-of-a-client-with-one-model"


@asynccontextmanager
async def recording(engine: ScriptedEngine) -> AsyncIterator[list[bytes]]:
    """Answer all calls to an engine, and collect their bodies."""
    bodies: list[bytes] = []

    async def answer() -> None:
        while True:
            call = await engine.calls.get()
            bodies.append(call.body)
            await call.respond(200, ANSWER)

    task = asyncio.create_task(answer())
    try:
        yield bodies
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def router_with_allowed_models(tmp_path: Path) -> AsyncIterator[tuple[RunningRouter, list[bytes]]]:
    """A router whose only client can call only `m` and an adapter; its engine also serves `secret` and another."""
    clients = tmp_path / "clients.yaml"
    clients.write_text(json.dumps({"clients": {"ann": {"key": hash_of(KEY), "models": ["m", "tuned"]}}}))
    async with (
        scripted_engine("m", "secret", "tuned", "other") as engine,
        recording(engine) as bodies,
        running_router(engine.url, clients=clients) as router,
    ):
        yield router, bodies


async def status_of(router: RunningRouter, path: str, body: bytes, kind: str = "application/json") -> int:
    headers = {"content_type": kind, "authorization": f"Bearer {KEY}"}
    async with router.post(body, path, **headers) as post:
        status = (await post.response()).status
        await post.read()
    return status


def is_json(body: bytes) -> bool:
    """Return whether Python's parser accepts it, which accepts more than the standard: NaN, lone surrogates, UTF-16."""
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body)
        return True
    return False


@pytest.mark.parametrize("path", PATHS)
async def test_what_python_rejects_is_refused_on_every_path(path: str, tmp_path: Path) -> None:
    """Each of 318 cases, alone and as a member: nothing that cannot be read reaches an engine, and what is passed on is
    what every reader reads alike.
    """
    async with router_with_allowed_models(tmp_path) as (router, bodies):
        for case in CASES:
            data = case.read_bytes()
            for body in (data, b'{"model":"m",%b,"x":%b}' % (PATHS[path], data)):
                before = len(bodies)
                status = await status_of(router, path, body)
                if body and not is_json(body):
                    assert status == 400, case.name
                assert (status == 200) == (len(bodies) == before + 1), case.name
                if case.name.startswith("y_") and body is not data:
                    assert status == 200, case.name
        for body in bodies:
            assert not body or orjson.loads(body) == json.loads(body, parse_int=_whole)


def _whole(digits: str) -> float:
    """Parse integers beyond 64 bits as floats, as most parsers do; a model name is never one."""
    return int(digits) if -(2**63) <= int(digits) < 2**64 else float(digits)


@pytest.mark.parametrize("path", PATHS)
async def test_allowed_models_are_enforced_whatever_else_is_in_the_body(path: str, tmp_path: Path) -> None:
    """A call to a model that is not allowed reaches no engine, whatever hides the model."""
    async with router_with_allowed_models(tmp_path) as (router, bodies):
        for case in CASES:
            for body in _hiding(PATHS[path], case.read_bytes()):
                assert await status_of(router, path, body) in (400, 403), case.name
        assert not bodies


def _hiding(needed: bytes, data: bytes) -> Iterator[bytes]:
    yield b'{"x":%b,"model":"secret",%b}' % (data, needed)
    yield b'{"model":"m",%b,"model":"secret","x":%b}' % (needed, data)


@pytest.mark.parametrize("path", [path for path in PATHS if path != CHAT])
@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_json_in_other_encodings_is_refused(path: str, coding: str, tmp_path: Path) -> None:
    """Python's parser guesses such encodings."""
    async with router_with_allowed_models(tmp_path) as (router, bodies):
        text = (b'{"model":"m",%b}' % PATHS[path]).decode()
        assert await status_of(router, path, text.encode(coding)) == 400
        assert not bodies


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "application/octet-stream", ""],
)
async def test_json_under_another_content_type_is_refused(path: str, kind: str, tmp_path: Path) -> None:
    """Engines refuse it too, because a page of another site can send such a body without a preflight request."""
    async with router_with_allowed_models(tmp_path) as (router, bodies):
        body = b'{"model":"m",%b}' % PATHS[path]
        assert await status_of(router, path, body, kind) == 400
        assert not bodies
        assert await status_of(router, path, body, "Application/JSON ; charset=utf-8") == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings", "/v1/nobody/knows"])
async def test_an_adapter_is_checked_like_a_model(path: str, tmp_path: Path) -> None:
    """SGLang's `lora_path` selects an adapter besides the model, as a string or one per prompt."""
    async with router_with_allowed_models(tmp_path) as (router, bodies):
        for lora, status in (
            *((b'"other"', 403), (b'["tuned","other"]', 403), (b'["tuned",null]', 200), (b'"tuned"', 200)),
            *((b"null", 200), (b'{"a":1}', 400), (b"[[1]]", 400), (b"7", 400)),
        ):
            body = b'{"model":"m",%b,"lora_path":%b}' % (PATHS[path], lora)
            assert await status_of(router, path, body) == status, lora
        assert len(bodies) == 3


async def test_a_model_that_is_not_a_string_is_refused_everywhere(tmp_path: Path) -> None:
    """An engine could convert it to a name that is not allowed."""
    async with router_with_allowed_models(tmp_path) as (router, bodies):
        for path, needed in PATHS.items():
            assert await status_of(router, path, b'{"model":["secret"],%b}' % needed) == 400
        assert not bodies
