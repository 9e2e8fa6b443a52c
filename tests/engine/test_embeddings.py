"""Tests embeddings of a vLLM and an SGLang with the same model: they read as from the engine, and are charged."""

from collections.abc import Iterator

import openai
import pytest

from . import prompts
from .conftest import StartRouter
from .fleet import Engine, Router
from .test_other_paths import charged
from .wire import CHAT, WORKER_KEY, call, mapped

pytestmark = [pytest.mark.engine, pytest.mark.fleets("embedding")]

INPUTS = {
    "a text": prompts.text("embedded", 30),
    "texts": [prompts.text(f"embedded {number}", 10 + 5 * number) for number in range(3)],
    "tokens": prompts.tokens("embedded", 40),
    "lists of tokens": [prompts.tokens(f"embedded {number}", 30) for number in range(2)],
}


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="embedder", max_retries=0, timeout=30) as client:
        yield client


@pytest.mark.parametrize("name", INPUTS)
def test_embeddings_are_the_engines_and_charged(
    router: Router, engines: tuple[Engine, ...], client: openai.OpenAI, name: str
) -> None:
    """Vectors and usage are those of a direct call to the engine that answered, and its token count is charged."""
    before = charged(router)
    raw = client.embeddings.with_raw_response.create(model="tiny", input=INPUTS[name])  # type: ignore[arg-type]
    ours = raw.parse()
    (engine,) = (engine for engine in engines if router.worker(engine)["id"] == raw.headers["x-d2lpm-worker"])
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key=WORKER_KEY, max_retries=0, timeout=30) as direct:
        theirs = direct.embeddings.create(model="tiny", input=INPUTS[name])  # type: ignore[arg-type]
    assert [(one.index, one.object) for one in ours.data] == [(one.index, one.object) for one in theirs.data]
    for one, other in zip(ours.data, theirs.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert ours.usage == theirs.usage
    assert charged(router, before) == (ours.usage.prompt_tokens, 0)


def test_both_engines_embed(router: Router, engines: tuple[Engine, ...], client: openai.OpenAI) -> None:
    """Calls with different inputs go to both engines."""
    ids = {router.worker(engine)["id"] for engine in engines}
    seen = set()
    for number in range(8):
        texts = prompts.text(f"spread {number}", 20)
        seen.add(client.embeddings.with_raw_response.create(model="tiny", input=texts).headers["x-d2lpm-worker"])
    assert seen == ids


def test_a_chat_to_a_vllm_that_embeds_gets_path_not_served(
    start_router: StartRouter, engines: tuple[Engine, ...]
) -> None:
    """Each such chat gets the same error, and the worker continues to serve embeddings."""
    (vllm,) = (engine for engine in engines if engine.dialect == "vllm")
    router = start_router("router of a chat to embeddings", (vllm,))
    for _ in range(8):
        answer = call(router.url, CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]})
        assert (answer.status, mapped(answer.json["error"])["code"]) == (404, "path_not_served")
    assert call(router.url, "/v1/embeddings", {"model": "tiny", "input": "Hello"}).status == 200
    router.stop()
