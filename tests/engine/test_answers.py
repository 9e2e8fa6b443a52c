"""A client gets through the router the answer that the engine itself gives."""

import pytest

from . import prompts
from .fleet import Engine, Router, SglangEngine
from .wire import CHAT, COMPLETIONS, Answer, Json, call, joined, listed, mapped, shape, without

pytestmark = pytest.mark.engine

GREEDY: Json = {"model": "tiny", "temperature": 0, "seed": 7, "ignore_eos": True, "max_tokens": 8}
SAMPLED: Json = {**GREEDY, "temperature": 0.8}
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def chat(name: str, options: Json) -> tuple[str, Json]:
    messages = [{"role": "system", "content": prompts.text(name)}, {"role": "user", "content": "Hé, 你好 \U0001f600?"}]
    return CHAT, {"messages": messages, **options}


def completion(prompt: object, options: Json) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": prompt, **options}


CALLS = {
    "chat": chat("chat", GREEDY),
    "chat of two choices": chat("chat-n", {**SAMPLED, "n": 2}),
    "chat with logprobs": chat("chat-logprobs", {**GREEDY, "logprobs": True, "top_logprobs": 2}),
    "chat with tools": chat("chat-tools", {**GREEDY, "tools": [TOOL], "tool_choice": "none"}),
    "chat in parts": (
        CHAT,
        {**GREEDY, "messages": [{"role": "user", "content": [{"type": "text", "text": prompts.text("parts")}] * 2}]},
    ),
    "chat with token ids": chat("chat-ids", {**GREEDY, "return_token_ids": True}),
    "text": completion(prompts.text("text"), GREEDY),
    "text of two choices": completion(prompts.text("text-n"), {**SAMPLED, "n": 2}),
    "text with logprobs": completion(prompts.text("text-logprobs"), {**GREEDY, "logprobs": 2}),
    "text with echo": completion(prompts.text("echo"), {**GREEDY, "echo": True}),
    "text to a stop": completion(prompts.text("stop"), {**GREEDY, "stop": ["a", "e"]}),
    "tokens": completion(prompts.tokens("tokens"), GREEDY),
    "texts": completion([prompts.text("first"), prompts.text("second")], GREEDY),
    "texts of two choices": completion([prompts.text("third"), prompts.text("fourth")], {**SAMPLED, "n": 2}),
    "lists of tokens": completion([prompts.tokens("one"), prompts.tokens("two")], GREEDY),
}
STREAMED = [
    # SGLang refuses it as a stream; see test_errors.
    pytest.param(name, marks=pytest.mark.fleets("vllm")) if name == "chat with token ids" else name
    for name in CALLS
]
STREAM_OPTIONS: dict[str, Json] = {
    "no options": {},
    "usage": {"stream_options": {"include_usage": True}},
    "usage in each event": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
UNASKED: dict[str, Json] = {
    "no usage": {"stream_options": {"include_usage": False}},
    "neither": {"stream_options": {"include_usage": False, "continuous_usage_stats": False}},
    "null": {"stream_options": None},
}


@pytest.fixture(scope="module")
def warm(running_fleet: tuple[Engine, ...]) -> None:
    """Put each prompt into both caches, so that an answer does not depend on its cached part."""
    for name in CALLS:
        for engine in running_fleet:
            assert call(engine.url, *one(name, running_fleet)).status == 200


def one(name: str, engines: tuple[Engine, ...]) -> tuple[str, Json]:
    """Return the call of this name in a form that these engines answer the same each time.

    vLLM samples equally for equal seeds, and rejects several choices without sampling; SGLang samples differently.
    """
    path, body = CALLS[name]
    drawn = "n" in body and isinstance(engines[0], SglangEngine)
    return path, {**body, "temperature": 0} if drawn else body


def routed_and_direct(router: Router, engines: tuple[Engine, ...], path: str, body: Json) -> tuple[Answer, Answer]:
    """Send the same call through the router, and to the engine that served it."""
    routed = call(router.url, path, body)
    assert routed.status == 200, routed.body
    engine = next(engine for engine in engines if router.worker(engine)["id"] == routed.headers["x-d2lpm-worker"])
    return routed, call(engine.url, path, body)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", CALLS)
def test_whole_answer(router: Router, engines: tuple[Engine, ...], name: str) -> None:
    """An answer that is not streamed differs only in its id and its time."""
    path, body = one(name, engines)
    routed, direct = routed_and_direct(router, engines, path, body)
    assert without(routed.json, "id", "created") == without(direct.json, "id", "created")
    assert set(routed.json) == set(direct.json)
    assert routed.headers["content-type"] == direct.headers["content-type"]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("options", STREAM_OPTIONS)
@pytest.mark.parametrize("name", STREAMED)
def test_stream(router: Router, engines: tuple[Engine, ...], name: str, options: str) -> None:
    """A stream has the same sum, ends with the same usage if requested, and has no field that was not requested."""
    path, body = one(name, engines)
    assert_same_stream(*routed_and_direct(router, engines, path, {**body, "stream": True, **STREAM_OPTIONS[options]}))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("options", UNASKED)
@pytest.mark.parametrize("name", ["chat", "text"])
def test_stream_without_usage(router: Router, engines: tuple[Engine, ...], name: str, options: str) -> None:
    """A client that declines usage gets none, in whatever way it declines."""
    path, body = one(name, engines)
    routed, direct = routed_and_direct(router, engines, path, {**body, "stream": True, **UNASKED[options]})
    assert_same_stream(routed, direct)
    assert not any(event.get("usage") for event in routed.events())


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", ["chat", "text"])
def test_stream_with_continuous_usage_alone(router: Router, engines: tuple[Engine, ...], name: str) -> None:
    """The events with text have usage if the engine's own have: SGLang honours this option, vLLM ignores it."""
    path, body = one(name, engines)
    wish: Json = {"stream_options": {"continuous_usage_stats": True}}
    routed, direct = routed_and_direct(router, engines, path, {**body, "stream": True, **wish})
    assert joined(routed.events())[0].text == joined(direct.events())[0].text
    shown, sent = (
        {bool(event.get("usage")) for event in answer.events() if joined([event])[0].text}
        for answer in (routed, direct)
    )
    assert shown == sent
    assert closing(routed) == []


def assert_same_stream(routed: Answer, direct: Answer) -> None:
    assert joined(routed.events()) == joined(direct.events())
    assert closing(routed) == closing(direct)
    ours, theirs = forms(routed), forms(direct)
    for kind in ours.keys() & theirs.keys():
        assert ours[kind] == theirs[kind], kind
    assert len(ids(routed)) == len(ids(direct))
    assert routed.headers["content-type"] == direct.headers["content-type"]


def ids(answer: Answer) -> set[object]:
    """Return the ids: one for a vLLM's stream, one per choice of an SGLang's."""
    return {event["id"] for event in answer.events()}


def closing(answer: Answer) -> list[Json]:
    """Return the events without a choice: the usage of the whole call, if requested."""
    ends = [event for event in answer.events() if not listed(event["choices"])]
    return [without(event, "id", "created", "system_fingerprint") for event in ends]


def forms(answer: Answer) -> dict[str, set[object]]:
    """The forms of a stream's events by kind; where an engine puts all tokens into one event, a kind is missing.

    One field is left out. vLLM puts `system_fingerprint` into its very last event: where only the router has
    asked for usage, that is the usage event, so the client gets no fingerprint.
    """
    kinds: dict[str, set[object]] = {}
    for event in answer.events():
        kinds.setdefault(kind_of(event), set()).add(shape(without(event, "system_fingerprint")))
    return kinds


def kind_of(event: Json) -> str:
    choices = listed(event["choices"])
    if not choices:
        return "usage"
    if any("role" in mapped(choice.get("delta", {})) for choice in choices):
        return "role"
    first = "first " if any(choice.get("prompt_token_ids") for choice in choices) else ""
    return first + ("last" if any(choice["finish_reason"] for choice in choices) else "text")
