"""Tests that an emulated engine answers each call in the same shape as the real engine."""

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
# Shorter than a page of the cache: usage would report a cached part.
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
    "continued chat": (
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
    "message with a system prompt": ("/v1/messages", {**MESSAGE, "system": "be"}),
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
"""Paths for a GET, some of which are not served, or not by a GET."""
PAGES_OF = {
    "vllm": ("/version", "/load", "/v1/models/tiny"),
    "sglang": ("/ready", "/version", "/v1/models/tiny", "/get_load", "/kv_event_sources"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_have_equal_shapes(sides: Sides, name: str, stream: bool) -> None:
    """An emulated answer has the engine's members and types, nulls included, and a stream the same kinds of events."""
    path, body = ANSWERS[name]
    real, emulated = (look(call(server.url, path, {**body, "stream": stream})) for server in sides.each())
    assert real[0] == 200
    assert emulated == real


@pytest.mark.parametrize("name", WHOLE)
def test_whole_answers_have_equal_shapes(sides: Sides, name: str) -> None:
    """The answer to a call that has no stream, or is refused with one, has the engine's status, members and types."""
    path, body = WHOLE[name]
    real, emulated = (look(call(server.url, path, body)) for server in sides.each())
    assert real[0] == 200
    assert emulated == real


@pytest.mark.parametrize("name", STREAMED)
def test_streams_have_usage_in_the_same_events(sides: Sides, name: str) -> None:
    """Usage comes in the same kinds of events, with the same members."""
    path, body = STREAMED[name]
    real, emulated = (look(call(server.url, path, {**body, "stream": True})) for server in sides.each())
    assert real[0] == 200
    assert emulated == real


def test_messages_report_a_cached_prefix_alike(sides: Sides) -> None:
    """Once its prompt is cached, a message's usage says so at the same places, streamed or not."""
    body = {**MESSAGE, "messages": [{"role": "user", "content": "cached words of a message " * 20}]}
    for server in sides.each():
        assert call(server.url, "/v1/messages", body).status == 200
    for stream in (False, True):
        real, emulated = (look(call(server.url, "/v1/messages", {**body, "stream": stream})) for server in sides.each())
        assert emulated == real
        assert "cache_read_input_tokens" in str(real)


def test_pages_have_equal_shapes(sides: Sides) -> None:
    """The answer to a GET has the engine's status, type and members, also where the path is not served."""
    for page in (*PAGES, *PAGES_OF[sides.dialect]):
        real, emulated = (look(get(server.url + page, WORKER_KEY)) for server in sides.each())
        assert (page, emulated) == (page, real)


def test_usage_reports_the_cached_blocks_of_a_repeated_prompt(server: Server) -> None:
    """Usage reports no cached tokens for a new prompt, and all its whole blocks when it is repeated."""
    body = {**FIXED, "prompt": "words that nobody has sent so far, of this very claim " * 12}
    first, second = (call(server.url, COMPLETIONS, body).json["usage"] for _ in range(2))
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens"] - 32 <= second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
