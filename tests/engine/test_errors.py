"""Calls that cannot be served: an engine's error is passed on unchanged, the router's own reads like OpenAI's."""

import pytest

from .fleet import CONTEXT, Engine, Router
from .wire import CHAT, COMPLETIONS, Json, call, get, mapped

pytestmark = pytest.mark.engine

TEXT: Json = {"model": "tiny", "prompt": "so it goes", "max_tokens": 2}
CHATTED: Json = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
REFUSED: dict[str, tuple[str, Json]] = {
    "prompt too long": (COMPLETIONS, {**TEXT, "prompt": [300] * (CONTEXT + 1)}),
    "streamed prompt too long": (COMPLETIONS, {**TEXT, "prompt": [300] * (CONTEXT + 1), "stream": True}),
    "too many tokens wanted": (COMPLETIONS, {**TEXT, "max_tokens": CONTEXT + 1}),
    "token id out of vocabulary": (COMPLETIONS, {**TEXT, "prompt": [5000]}),
    "negative temperature": (COMPLETIONS, {**TEXT, "temperature": -1}),
    "two greedy choices": (COMPLETIONS, {**TEXT, "temperature": 0, "n": 2}),
    "unknown role's field": (CHAT, {"model": "tiny", "messages": [{"content": "nobody says so"}]}),
    "tools without a parser": (
        CHAT,
        {**CHATTED, "tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "auto"},
    ),
    "ids of a streamed chat": (CHAT, {**CHATTED, "stream": True, "return_token_ids": True}),
    "share of the probability beyond one": (COMPLETIONS, {**TEXT, "top_p": 2}),
}
BY_ONE = {
    "token id out of vocabulary": "vllm",  # SGLang does not look, and its scheduler dies of it: the router refuses it
    "two greedy choices": "vllm",
    "tools without a parser": "vllm",
    "ids of a streamed chat": "sglang",
}
"""What the other engine answers."""
INVALID = {
    "not JSON": b'{"model": ',
    "not an object": b"[1, 2]",
    "model is a number": b'{"model": 7, "prompt": "x"}',
}


def by_whom(name: str) -> object:
    """Return the case with the engines that reject it."""
    marks = [pytest.mark.fleets(BY_ONE[name])] if name in BY_ONE else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [by_whom(name) for name in REFUSED])
def test_engines_refusal(router: Router, engines: tuple[Engine, ...], name: str) -> None:
    """Status and body are the engine's, no client is charged, and the engine counts as healthy."""
    path, body = REFUSED[name]
    routed = call(router.url, path, body, f"refused: {name}")
    direct = call(engines[0].url, path, body)
    assert routed.status == direct.status == 400
    assert routed.json == direct.json
    charged = router.service(routed.headers["x-d2lpm-client"])
    assert (charged["extend"], charged["cached"], charged["output"], charged["cost"]) == (0, 0, 0, 0)
    assert all(router.worker(engine)["healthy"] for engine in engines)


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_invalid_body(router: Router, path: str, name: str) -> None:
    """The router refuses a body that is no JSON object, or whose model is no text, in OpenAI's form."""
    answer = call(router.url, path, INVALID[name])
    assert answer.status == 400
    assert mapped(answer.json["error"])["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_call_without_a_model_is_for_the_engine_to_judge(
    router: Router, engines: tuple[Engine, ...], path: str
) -> None:
    """An engine serves its only model then, and refuses a chat without messages."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    routed, direct = call(router.url, path, body), call(engines[0].url, path, body)
    assert routed.status == direct.status == (400 if path == CHAT else 200)


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(router: Router, stream: bool) -> None:
    """A model that no worker has gives 404 before anything is streamed."""
    answer = call(router.url, COMPLETIONS, {**TEXT, "model": "nope", "stream": stream})
    assert answer.status == 404
    error = mapped(answer.json["error"])
    assert (error["type"], error["param"], error["code"]) == ("not_found_error", "model", "model_not_found")


def test_unknown_path(router: Router) -> None:
    """An unknown path gives 404 in OpenAI's form, from the router or, below /v1, from a worker."""
    for path, code in (("/nope", "unknown_path"), ("/v1/nope", "404")):
        answer = get(f"{router.url}{path}")
        assert answer.status == 404
        assert mapped(answer.json["error"])["code"] == code


def test_key_is_the_routers_own(router: Router, engines: tuple[Engine, ...]) -> None:
    """Engines that require a key get the router's key, and a client's key is never forwarded."""
    assert call(engines[0].url, COMPLETIONS, TEXT, "a client's key").status == 401
    assert call(router.url, COMPLETIONS, TEXT, "a client's key").status == 200
