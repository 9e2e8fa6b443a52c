"""The calls that are compared: whole and streamed, right and wrong, to every path that clients use."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..wire import CHAT, COMPLETIONS, Json

MODEL = "tiny"
TURN: Json = {"role": "user", "content": "Tell me of the sea."}
FIXED: Json = {"model": MODEL, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
USAGE: Json = {"include_usage": True}
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BOM = b"\xef\xbb\xbf"
ENDS_SGLANG = frozenset({"text: an id outside the vocabulary", "text: a negative id"})
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@dataclass(frozen=True, slots=True)
class Probe:
    """One call that is made directly and through the router."""

    name: str
    path: str
    body: bytes | None = None
    """The body of a POST; None for a GET without a body."""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers beside the key, and in place of the content type of JSON."""


def post(name: str, path: str, body: object, **headers: str) -> Probe:
    """Return a POST. An underscore in the name of a header stands for a hyphen."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Probe(name, path, content, headers={key.replace("_", "-"): value for key, value in headers.items()})


def get(path: str, method: str = "GET") -> Probe:
    return Probe(f"{method} {path}", path, None, method)


def probes(dialect: str) -> list[Probe]:
    """Return all calls for one kind of engine."""
    # Only vLLM draws the same sample twice, and needs one for two choices; a wrong token id ends an SGLang.
    two: Json = {"n": 2, "temperature": 0.8, "seed": 7} if dialect == "vllm" else {"n": 2}
    harmless = [probe for probe in wrong() if dialect == "vllm" or probe.name not in ENDS_SGLANG]
    return [*chats(two), *completions(two), *lenient(), *harmless, *other_endpoints(), *engine_paths(dialect)]


def chats(two: Json) -> Iterator[Probe]:
    chat = {**FIXED, "messages": [TURN]}
    options: Mapping[str, Json] = {
        "chat": {},
        "chat with a system message": {"messages": [{"role": "system", "content": "Be brief."}, TURN]},
        "chat in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "One."}]}]},
        "chat of two choices": two,
        "chat with logprobs": {"logprobs": True, "top_logprobs": 2},
        "chat with tools": {"tools": [TOOL], "tool_choice": "none"},
        "chat to a stop": {"stop": ["a", "e"], "max_tokens": 20},
        "chat with token ids": {"return_token_ids": True},
        "chat with a user and a priority": {"user": "me", "priority": 0},
    }
    for name, more in options.items():
        yield post(name, CHAT, {**chat, **more})
        yield post(f"{name}, streamed", CHAT, {**chat, **more, "stream": True})
    yield post("chat, streamed with usage", CHAT, {**chat, "stream": True, "stream_options": USAGE})
    every = {**USAGE, "continuous_usage_stats": True}
    yield post("chat, streamed with usage in chunks", CHAT, {**chat, "stream": True, "stream_options": every})


def completions(two: Json) -> Iterator[Probe]:
    text = {**FIXED, "prompt": "The sea is"}
    options: Mapping[str, Json] = {
        "text": {},
        "text from ids": {"prompt": [5, 6, 7, 8]},
        "texts": {"prompt": ["One is", "Two is"]},
        "texts from ids": {"prompt": [[5, 6, 7], [8, 9]]},
        "text with echo": {"echo": True},
        "text with logprobs": {"logprobs": 2},
        "text of two choices": two,
        "text with token ids": {"return_token_ids": True},
    }
    for name, more in options.items():
        yield post(name, COMPLETIONS, {**text, **more})
        yield post(f"{name}, streamed", COMPLETIONS, {**text, **more, "stream": True})
    yield post("text, streamed with usage", COMPLETIONS, {**text, "stream": True, "stream_options": USAGE})


def lenient() -> Iterator[Probe]:
    """Yield what an engine may take although it is not quite in the schema."""
    chat, text = {**FIXED, "messages": [TURN]}, {**FIXED, "prompt": "The sea is"}
    values: Mapping[str, Json] = {
        "stream of 1": {"stream": 1},
        "stream of 0": {"stream": 0},
        "stream of a string": {"stream": "true"},
        "stream of null": {"stream": None},
        "max_tokens as a string": {"max_tokens": "5"},
        "max_tokens as a float": {"max_tokens": 5.0},
        "max_tokens of null": {"max_tokens": None, "stop": ["a", "e", "i", "o", "u"]},
        "n as a string": {"n": "1"},
        "include_usage of 1": {"stream": True, "stream_options": {"include_usage": 1}},
        "a null model": {"model": None},
        "unknown members": {"no_such_member": {"a": [1]}},
    }
    for name, more in values.items():
        yield post(f"chat: {name}", CHAT, {**chat, **more})
        yield post(f"text: {name}", COMPLETIONS, {**text, **more})
    for path, body in ((CHAT, chat), (COMPLETIONS, text)):
        bare = {key: value for key, value in body.items() if key != "model"}
        yield post(f"{path}: no model", path, bare)
        yield post(f"{path}: a byte order mark", path, BOM + json.dumps(body).encode())
        yield post(f"{path}: a media type with a charset", path, body, content_type="application/json; charset=utf-8")
        yield post(f"{path}: a trailing slash", f"{path}/", body)
        yield post(f"{path}: a query", f"{path}?a=b", body)


def wrong() -> Iterator[Probe]:
    """Yield what an engine refuses."""
    chat, text = {**FIXED, "messages": [TURN]}, {**FIXED, "prompt": "The sea is"}
    chats: Mapping[str, Json] = {
        "no messages": {"messages": []},
        "null messages": {"messages": None},
        "messages that are a string": {"messages": "Hello"},
        "a message that is a string": {"messages": ["Hello"]},
        "an unknown role": {"messages": [{"role": 7, "content": "x"}]},
        "an unknown model": {"model": "nope"},
        "an empty model": {"model": ""},
        "a model that is a number": {"model": 7},
        "a negative max_tokens": {"max_tokens": -1},
        "max_tokens beyond the context": {"max_tokens": 100_000},
        "max_tokens that is no number": {"max_tokens": "many"},
        "a temperature that is a string": {"temperature": "hot"},
        "a stream that is a list": {"stream": []},
        "n of 0": {"n": 0},
        "stream_options without a stream": {"stream_options": USAGE},
        "stream_options that are a string": {"stream": True, "stream_options": "usage"},
    }
    for name, more in chats.items():
        yield post(f"chat: {name}", CHAT, {**chat, **more})
    texts: Mapping[str, Json] = {
        "an empty prompt": {"prompt": ""},
        "no prompts": {"prompt": []},
        "a null prompt": {"prompt": None},
        "a prompt that is an object": {"prompt": {}},
        "a mixed prompt": {"prompt": ["a", 1]},
        "an id outside the vocabulary": {"prompt": [10**6]},
        "a negative id": {"prompt": [-1]},
        "a prompt beyond the context": {"prompt": [5] * 9000},
    }
    for name, more in texts.items():
        yield post(f"text: {name}", COMPLETIONS, {**text, **more})
    yield post("chat: no JSON", CHAT, b"{")
    yield post("chat: an empty body", CHAT, b"")
    yield post("chat: a list", CHAT, b"[]")
    yield post("chat: another media type", CHAT, chat, content_type="text/plain")
    yield get(CHAT)
    yield get("/v1/models", "POST")
    yield get("/no/such/path")
    yield get("/v1/no/such/path")


def other_endpoints() -> Iterator[Probe]:
    yield post("response", RESPONSES, {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "temperature": 0})
    yield post(
        "response, streamed",
        RESPONSES,
        {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "temperature": 0, "stream": True},
    )
    message = {"model": MODEL, "messages": [TURN], "max_tokens": 4, "temperature": 0}
    yield post("message", MESSAGES, message)
    yield post("message, streamed", MESSAGES, {**message, "stream": True})
    yield post("message: no messages", MESSAGES, {"model": MODEL, "max_tokens": 4})
    yield post("message: tokens", f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": [TURN]})
    for path in ("/tokenize", "/v1/tokenize"):
        yield post(path, path, {"model": MODEL, "prompt": "Hello sea"})
    for path in ("/detokenize", "/v1/detokenize"):
        yield post(path, path, {"model": MODEL, "tokens": [5, 6, 7]})
    yield post("embeddings", "/v1/embeddings", {"model": MODEL, "input": "Hello"})
    yield post("score", "/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b"})
    yield get("/v1/models")
    yield get(f"/v1/models/{MODEL}")
    yield get("/v1/models/nope")
    yield get("/v1/models/")
    yield get("/health")


def engine_paths(dialect: str) -> Iterator[Probe]:
    """Yield the paths of this engine's own."""
    chat, text = {**FIXED, "messages": [TURN]}, {**FIXED, "prompt": "The sea is"}
    for path in ("/version", "/ping", "/load", "/tokenizer_info", "/ready"):
        yield get(path)
    yield get("/ping", "POST")
    yield post("invocations", "/invocations", chat)
    yield post("invocations, streamed", "/invocations", {**chat, "stream": True})
    yield post("invocations: a text", "/invocations", text)
    if dialect == "vllm":
        for call, body in ((CHAT, chat), (COMPLETIONS, text)):
            yield post(f"{call}/render", f"{call}/render", body)
        batch = {**FIXED, "messages": [[TURN], [TURN]]}
        yield post("batch of chats", f"{CHAT}/batch", batch)
        yield post("tokens in, tokens out", "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {}})
        yield post("chat with ORCA", CHAT, chat, endpoint_load_metrics_format="TEXT")
    else:
        for path in ("/model_info", "/get_model_info", "/api/tags"):
            yield get(path)
        native = {"text": "The sea is", "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
        yield post("generate", "/generate", native)
        yield post("generate, streamed", "/generate", {**native, "stream": True})
        yield post("generate from ids", "/generate", {**native, "text": None, "input_ids": [5, 6, 7]})
        few = {"options": {"num_predict": 4}}
        yield post("Ollama's chat", "/api/chat", {"model": MODEL, "messages": [TURN], "stream": False, **few})
