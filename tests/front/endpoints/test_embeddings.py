"""Embeddings, scores and tokens from end to end: answered as by the engine itself, and charged."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.running import RunningRouter, emulated_workers, running_router, until
from tests.support.scripted_engine import scripted_engine
from tests.support.served import service, total_service

EMBEDDINGS = "/v1/embeddings"
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/rerank", {"query": "where is it", "documents": ["here", {"text": "there"}]}),
    ("/v1/score", {"text_1": "one", "text_2": ["one", "two"]}),
    (EMBEDDINGS, {"input": [[1, 2, 3], [4]]}),
    (EMBEDDINGS, {"input": "what engines pass over", "stream": True}),
]
OF_VLLM: list[tuple[str, dict[str, Any]]] = [
    ("/rerank", {"query": "where is it", "documents": ["here"], "model": "m"}),
    ("/score", {"text_1": ["one", "two"], "text_2": ["one", "two"], "model": "m"}),
]
"""Paths that SGLang does not have."""


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Two emulated workers of each kind."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield urls


async def call(router: RunningRouter, path: str, body: object) -> Any:
    """The JSON of a good answer."""
    async with router.post(json.dumps(body).encode(), path) as post:
        response = await post.response()
        assert response.status == 200, await response.read()
        return await response.json()


async def test_the_official_client_reads_embeddings(engines: list[str]) -> None:
    """As floats and as the base64 that it asks for by itself, alike from the router and from an engine."""
    async with running_router(*engines) as router:
        told = []
        for url in (router.url, engines[0]):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
                for encoding in ("float", openai.omit):
                    answer = await client.embeddings.create(model="m", input=["a b", "c"], encoding_format=encoding)
                    told.append(([each.embedding for each in answer.data], answer.usage))
        assert told[0] == told[2]
        assert told[1] == told[3]
        assert await total_service(router) == (2 * told[0][1].prompt_tokens, 0)


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
async def test_whatever_scores_is_charged_by_its_usage(engines: list[str], path: str, body: dict[str, Any]) -> None:
    """With a model or without one; nothing is charged for output."""
    async with running_router(*engines) as router:
        answer = await call(router, path, body)
        assert answer["model"] in ("m", "default")
        assert await total_service(router) == (answer["usage"]["prompt_tokens"], 0)


@pytest.mark.parametrize(("path", "body"), OF_VLLM, ids=[path for path, _ in OF_VLLM])
async def test_so_is_what_vllm_alone_serves(path: str, body: dict[str, Any]) -> None:
    """On its own paths."""
    with emulated_workers(1, "--dialect", "vllm") as urls:
        async with running_router(*urls) as router:
            answer = await call(router, path, body)
            assert await total_service(router) == (answer["usage"]["prompt_tokens"], 0)


async def test_tokens_are_charged_as_they_are_counted(engines: list[str]) -> None:
    """What comes back of them is the text again; both ways cost as many tokens as there are."""
    async with running_router(*engines) as router:
        ids = (await call(router, "/tokenize", {"model": "m", "prompt": "Hello, my world."}))["tokens"]
        assert await total_service(router) == (len(ids), 0)
        answer = await call(router, "/detokenize", {"tokens": ids})
        assert "Hello, my world." in answer.values()
        assert await total_service(router) == (2 * len(ids), 0)
        count = (await call(router, "/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}))["count"]
        assert await total_service(router) == (2 * len(ids) + count, 0)


async def test_the_same_texts_go_where_they_were() -> None:
    """Inputs are keyed one by one, whole: a list that begins alike is predicted to be cached."""
    texts = ["sea " * 500, "sky " * 500]
    async with scripted_engine() as one, scripted_engine() as two, running_router(one.url, two.url) as router:
        at, predicted = [], []
        for inputs in (texts, texts, ["land " * 1000]):
            async with router.post(json.dumps({"model": "m", "input": inputs}).encode(), EMBEDDINGS) as post:
                headers = await _answered(post, one, two)
            at.append(headers["x-d2lpm-worker"])
            predicted.append(int(headers["x-d2lpm-predicted-cached-tokens"]))
        assert at[0] == at[1]
        assert predicted[0] == predicted[2] == 0
        assert predicted[1] > 800


async def _answered(post: Any, *engines: Any) -> Any:
    await until(lambda: any(not engine.calls.empty() for engine in engines))
    (engine,) = [engine for engine in engines if not engine.calls.empty()]
    usage = {"prompt_tokens": 1000, "total_tokens": 1000}
    await (await engine.call()).respond(200, json.dumps({"data": [], "usage": usage}).encode())
    return (await post.response()).headers


async def test_the_usage_of_a_long_answer_is_found_at_its_end() -> None:
    """Megabytes of numbers are not parsed for it."""
    numbers = b",".join([b"0.123456789"] * 100_000)
    usage = b'"usage": {"prompt_tokens": 9, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}'
    answer = b'{"data": [{"embedding": [' + numbers + b'], "index": 0}], "model": "m", ' + usage + b', "id": "x"}\n'
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(b'{"model":"m","input":"x","user":"ann"}', EMBEDDINGS) as post:
            await (await engine.call()).respond(200, answer)
            assert await post.read() == answer
        assert await service(router, "user-ann") == (5, 4, 0)


async def test_an_array_for_an_answer_goes_through() -> None:
    """SGLang's rerank answers with a list, which tells no usage: the estimate of the input stays charged."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(b'{"query":"a","documents":["b","c"],"user":"ann"}', "/v1/rerank") as post:
            await (await engine.call()).respond(200, b'[{"score": 1.0}]')
            assert await post.read() == b'[{"score": 1.0}]'
        extend, cached, output = await service(router, "user-ann")
        assert extend > 0
        assert (cached, output) == (0, 0)
