"""Whatever an engine answers to a call that it takes, its emulation answers in the same shape."""

import pytest

from ..processes import Server
from ..wire import CHAT, COMPLETIONS, WORKER_KEY, Json, call, get
from .shapes import look
from .sides import Sides

pytestmark = pytest.mark.engine

TURN: Json = {"role": "user", "content": "so it goes, and so on it goes, and on and on again"}
BEGUN: Json = {"role": "assistant", "content": "and so"}
# Enough tokens that they never all come in one event.
FIXED: Json = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SAMPLED: Json = {**FIXED, "temperature": 0.7}
# Shorter than a page: whether there is a cached part of it, usage would tell.
MESSAGE: Json = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "so"}],
    **{"max_tokens": 24, "ignore_eos": True},
}
RESPONSE: Json = {"model": "tiny", "input": "so it goes", "max_output_tokens": 24, "temperature": 0, "ignore_eos": True}
FINAL: Json = {"stream_options": {"include_usage": True}}
CONTINUOUS: Json = {"stream_options": {"continuous_usage_stats": True}}
BOTH: Json = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ANSWERS: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, {**FIXED, "messages": [TURN]}),
    "chat of one token": (CHAT, {**FIXED, "messages": [TURN], "max_tokens": 1}),
    "two answers to a chat": (CHAT, {**SAMPLED, "messages": [TURN], "n": 2}),
    "chat that is gone on with": (
        CHAT,
        {**FIXED, "messages": [TURN, BEGUN], "continue_final_message": True, "add_generation_prompt": False},
    ),
    "chat of parts": (CHAT, {**FIXED, "messages": [{"role": "user", "content": [{"type": "text", "text": "so"}]}]}),
    "chat with a salt": (CHAT, {**FIXED, "messages": [TURN], "cache_salt": "salt"}),
    "chat with an unknown field": (CHAT, {**FIXED, "messages": [TURN], "nonsense": 1}),
    "completion": (COMPLETIONS, {**FIXED, "prompt": "so it goes"}),
    "completion of ids": (COMPLETIONS, {**FIXED, "prompt": [300, 301, 302]}),
    "completion with its ids": (COMPLETIONS, {**FIXED, "prompt": "so it goes", "return_token_ids": True}),
    "two completions of two prompts": (COMPLETIONS, {**SAMPLED, "prompt": ["so it", "goes"], "n": 2}),
    "completion with a salt": (COMPLETIONS, {**FIXED, "prompt": "so it goes", "cache_salt": "salt"}),
    "message": ("/v1/messages", MESSAGE),
    "message under a system": ("/v1/messages", {**MESSAGE, "system": "be"}),
    "response": ("/v1/responses", RESPONSE),
}
WHOLE: dict[str, tuple[str, Json]] = {
    "chat with its ids": (CHAT, {**FIXED, "messages": [TURN], "return_token_ids": True}),
    "count of a message": ("/v1/messages/count_tokens", {"model": "tiny", "messages": [TURN]}),
    "tokens of a text": ("/tokenize", {"model": "tiny", "prompt": "so it goes"}),
    "tokens of a chat": ("/tokenize", {"model": "tiny", "messages": [TURN]}),
    "text of tokens": ("/detokenize", {"model": "tiny", "tokens": [300, 301]}),
}
STREAMED: dict[str, tuple[str, Json]] = {
    f"{name}, {what}": (path, {**body, **options})
    for name in ("chat", "two answers to a chat", "completion", "two completions of two prompts")
    for path, body in [ANSWERS[name]]
    for what, options in {"usage at its end": FINAL, "usage in its chunks": CONTINUOUS, "usage": BOTH}.items()
}
PAGES = ("/v1/models", "/health", "/ping", "/nowhere", "/v1/nowhere", CHAT, "/tokenize")
"""For a GET, which some of them are not served by."""
PAGES_OF = {
    "vllm": ("/version", "/load", "/v1/models/tiny"),
    "sglang": ("/ready", "/version", "/v1/models/tiny", "/get_load", "/kv_event_sources"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer(sides: Sides, name: str, stream: bool) -> None:
    """Members and their types are the same, those that are null too, and so are the kinds of events."""
    path, body = ANSWERS[name]
    real, emulated = (look(call(server.url, path, {**body, "stream": stream})) for server in sides.each())
    assert real[0] == 200
    assert emulated == real


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_that_is_not_streamed(sides: Sides, name: str) -> None:
    """The same of calls that have no stream, or are refused with one."""
    path, body = WHOLE[name]
    real, emulated = (look(call(server.url, path, body)) for server in sides.each())
    assert real[0] == 200
    assert emulated == real


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_with_usage(sides: Sides, name: str) -> None:
    """Usage is in the same events, with the same counts."""
    path, body = STREAMED[name]
    real, emulated = (look(call(server.url, path, {**body, "stream": True})) for server in sides.each())
    assert real[0] == 200
    assert emulated == real


def test_a_message_with_a_cached_prefix(sides: Sides) -> None:
    """Once the prompt is cached, usage says so at the same places, streamed and not."""
    body = {**MESSAGE, "messages": [{"role": "user", "content": "cached words of a message " * 20}]}
    for server in sides.each():
        assert call(server.url, "/v1/messages", body).status == 200
    for stream in (False, True):
        real, emulated = (look(call(server.url, "/v1/messages", {**body, "stream": stream})) for server in sides.each())
        assert emulated == real
        assert "cache_read_input_tokens" in str(real)


def test_pages(sides: Sides) -> None:
    """What a GET is answered, or that it is not: status, type and members."""
    for page in (*PAGES, *PAGES_OF[sides.dialect]):
        real, emulated = (look(get(server.url + page, WORKER_KEY)) for server in sides.each())
        assert (page, emulated) == (page, real)


def test_a_second_call_tells_what_was_cached(server: Server) -> None:
    """Usage of the same prompt again has the whole blocks of it that were found, and the first time none."""
    body = {**FIXED, "prompt": "words that nobody has sent so far, of this very claim " * 12}
    first, second = (call(server.url, COMPLETIONS, body).json["usage"] for _ in range(2))
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens"] - 32 <= second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
