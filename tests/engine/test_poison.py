"""Calls that would crash an SGLang server get 400 from the router, whatever the engine."""

import pytest

from .fleet import Engine, Router
from .wire import CHAT, COMPLETIONS, Json, call

pytestmark = pytest.mark.engine

TEXT: Json = {"model": "tiny", "prompt": "so it goes", "max_tokens": 2}
CHATTED: Json = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
POISON: dict[str, tuple[str, Json]] = {
    "a prompt": (COMPLETIONS, {**TEXT, "prompt": [999_999_999]}),
    "one of two prompts": (COMPLETIONS, {**TEXT, "prompt": [[7], [5000]]}),
    "a negative one": (COMPLETIONS, {**TEXT, "prompt": [-1]}),
    "a bias": (COMPLETIONS, {**TEXT, "logit_bias": {"999999999": 1}}),
    "a bias of a chat": (CHAT, {**CHATTED, "logit_bias": {"999999999": 1}}),
    "a negative bias": (CHAT, {**CHATTED, "logit_bias": {"-1": 1}}),
}


@pytest.mark.parametrize("name", POISON)
def test_a_token_id_outside_the_vocabulary(router: Router, engines: tuple[Engine, ...], name: str) -> None:
    """The call gets 400, and every engine still serves."""
    path, body = POISON[name]
    assert call(router.url, path, body).status == 400
    for _ in engines:
        assert call(router.url, COMPLETIONS, TEXT).status == 200
    assert all(engine.alive for engine in engines)


@pytest.mark.fleets("embedding")
def test_a_chat_for_an_embedding_model(router: Router, engines: tuple[Engine, ...]) -> None:
    """The client gets an error, and every engine survives: a vLLM has no such path (404)."""
    for path, body in ((CHAT, CHATTED), (COMPLETIONS, TEXT)):
        assert call(router.url, path, body).status in (400, 404, 502)
    assert all(engine.alive for engine in engines)
    embedded = call(router.url, "/v1/embeddings", {"model": "tiny", "input": "x"})
    assert embedded.status == 200
