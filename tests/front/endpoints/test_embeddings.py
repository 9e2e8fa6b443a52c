"""Embeddings, scores and tokenizing end to end: answered as by the engine itself, and charged."""

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
VLLM_ONLY: list[tuple[str, dict[str, Any]]] = [
    ("/rerank", {"query": "where is it", "documents": ["here"], "model": "m"}),
    ("/score", {"text_1": ["one", "two"], "text_2": ["one", "two"], "model": "m"}),
]
"""Calls to paths that SGLang does not have."""


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Run two emulated workers of each kind."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield urls


async def call(router: RunningRouter, path: str, body: object) -> Any:
    """Make a call that must succeed, and return its JSON."""
    async with router.post(json.dumps(body).encode(), path) as post:
        response = await post.response()
        assert response.status == 200, await response.read()
        return await response.json()


async def test_the_official_client_reads_embeddings(engines: list[str]) -> None:
    """The client reads the same floats from the router and from an engine, also as base64, which it requests by
    default.
    """
    async with running_router(*engines) as router:
        answers = []
        for url in (router.url, engines[0]):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
                for encoding in ("float", openai.omit):
                    answer = await client.embeddings.create(model="m", input=["a b", "c"], encoding_format=encoding)
                    answers.append(([each.embedding for each in answer.data], answer.usage))
        assert answers[0] == answers[2]
        assert answers[1] == answers[3]
        assert await total_service(router) == (2 * answers[0][1].prompt_tokens, 0)


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
async def test_embeddings_and_scores_are_charged_by_their_usage(
    engines: list[str], path: str, body: dict[str, Any]
) -> None:
    """Calls can come with or without a model; output is not charged."""
    async with running_router(*engines) as router:
        answer = await call(router, path, body)
        assert answer["model"] in ("m", "default")
        assert await total_service(router) == (answer["usage"]["prompt_tokens"], 0)


@pytest.mark.parametrize(("path", "body"), VLLM_ONLY, ids=[path for path, _ in VLLM_ONLY])
async def test_paths_of_vllm_alone_are_charged_by_their_usage(path: str, body: dict[str, Any]) -> None:
    """The paths are vLLM's own."""
    with emulated_workers(1, "--dialect", "vllm") as urls:
        async with running_router(*urls) as router:
            answer = await call(router, path, body)
            assert await total_service(router) == (answer["usage"]["prompt_tokens"], 0)


async def test_tokenizing_costs_the_number_of_tokens(engines: list[str]) -> None:
    """Detokenizing returns the text again; both directions cost one token per token."""
    async with running_router(*engines) as router:
        ids = (await call(router, "/tokenize", {"model": "m", "prompt": "Hello, my world."}))["tokens"]
        assert await total_service(router) == (len(ids), 0)
        answer = await call(router, "/detokenize", {"tokens": ids})
        assert "Hello, my world." in answer.values()
        assert await total_service(router) == (2 * len(ids), 0)
        count = (await call(router, "/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}))["count"]
        assert await total_service(router) == (2 * len(ids) + count, 0)


async def test_the_same_texts_go_to_the_same_worker() -> None:
    """Each input is keyed as a whole, and the same list is predicted to be cached."""
    texts = ["sea " * 500, "sky " * 500]
    async with scripted_engine() as one, scripted_engine() as two, running_router(one.url, two.url) as router:
        at, predicted = [], []
        for inputs in (texts, texts, ["land " * 1000]):
            async with router.post(json.dumps({"model": "m", "input": inputs}).encode(), EMBEDDINGS) as post:
                headers = await _answer_call(post, one, two)
            at.append(headers["x-d2lpm-worker"])
            predicted.append(int(headers["x-d2lpm-predicted-cached-tokens"]))
        assert at[0] == at[1]
        assert predicted[0] == predicted[2] == 0
        assert predicted[1] > 800


async def _answer_call(post: Any, *engines: Any) -> Any:
    await until(lambda: any(not engine.calls.empty() for engine in engines))
    (engine,) = [engine for engine in engines if not engine.calls.empty()]
    usage = {"prompt_tokens": 1000, "total_tokens": 1000}
    await (await engine.call()).respond(200, json.dumps({"data": [], "usage": usage}).encode())
    return (await post.response()).headers


async def test_the_usage_of_a_long_answer_is_found_at_its_end() -> None:
    """Megabytes of numbers are not parsed to find it."""
    numbers = b",".join([b"0.123456789"] * 100_000)
    usage = b'"usage": {"prompt_tokens": 9, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}'
    answer = b'{"data": [{"embedding": [' + numbers + b'], "index": 0}], "model": "m", ' + usage + b', "id": "x"}\n'
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(b'{"model":"m","input":"x","user":"ann"}', EMBEDDINGS) as post:
            await (await engine.call()).respond(200, answer)
            assert await post.read() == answer
        assert await service(router, "user-ann") == (5, 4, 0)


async def test_an_answer_that_is_an_array_passes() -> None:
    """SGLang's rerank answers with a list without usage, so the estimate of the input stays charged."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(b'{"query":"a","documents":["b","c"],"user":"ann"}', "/v1/rerank") as post:
            await (await engine.call()).respond(200, b'[{"score": 1.0}]')
            assert await post.read() == b'[{"score": 1.0}]'
        extend, cached, output = await service(router, "user-ann")
        assert extend > 0
        assert (cached, output) == (0, 0)
