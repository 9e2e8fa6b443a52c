"""Targets for the answers of engines: streams of events, whole answers, and their usage."""

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, Final

import orjson

from router.api.answer.event_reader import EventReader
from router.api.answer.sse import EventSplitter, event_data, plain_data, with_data
from router.api.answer.stream_reader import StreamReader, read_json
from router.api.body.call import Call, Head
from router.api.body.error_bodies import error_event, refusal_event
from router.api.continuation import Rewriter, continuation, last_events
from router.api.endpoints.plain import read_plain
from router.api.families import FAMILIES
from router.core.model.prompt_key import PromptHasher
from router.errors import WorkerBroke

from .engine import Target
from .mutation import Mutator

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
HASHER: Final = PromptHasher(b"secret")
HELLO: Final = [{"role": "user", "content": "Hello"}]
BOTH: Final = {"include_usage": True, "continuous_usage_stats": True}


def call(path: str, *, ids: bool = False, **more: Any) -> Call:
    fields = {"model": "m", "stream": True, **({"messages": HELLO} if path == CHAT else {"prompt": "Hello"}), **more}
    return FAMILIES[path].parse(Head(path), orjson.dumps(fields), HASHER, ids=ids)


CALLS: Final = (
    call(CHAT),
    call(CHAT, ids=True),
    call(CHAT, ids=True, max_tokens=50, return_token_ids=True),
    call(CHAT, stream_options={"include_usage": True}),
    call(CHAT, stream_options=BOTH, max_tokens=9),
    call(CHAT, n=2, tools=[{"type": "function", "function": {"name": "f"}}]),
    call(CHAT, stop="x", metadata=orjson.Fragment(b"[" * 300 + b"]" * 300)),
    call(COMPLETIONS),
    call(COMPLETIONS, ids=True, max_tokens=50),
    call(COMPLETIONS, prompt=["a", "b"], n=2, stream_options=BOTH),
)
USAGE: Final[dict[str, Any]] = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}


def chunk(choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [] if choice is None else [{"index": 0, **choice}], **more}


def text_chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"delta": {"content": text}, "logprobs": None, "finish_reason": finish, "token_ids": None}
    return chunk({**choice, **more}, usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 4}})


TOOL: Final = {"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
STREAMS: Final[tuple[list[Any], ...]] = (
    [
        chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2, 3], usage=USAGE),
        *(
            text_chunk("one"),
            text_chunk(" two"),
            text_chunk('"th\\ree'),
            text_chunk("", "stop"),
            chunk(None, usage=USAGE),
            b"[DONE]",
        ),
    ],
    [
        text_chunk("one", token_ids=[5]),
        text_chunk("", token_ids=[6]),
        text_chunk("é", token_ids=[7, 8]),
        text_chunk("", "length"),
        b"[DONE]",
    ],
    [
        chunk({"delta": {"role": "assistant", "tool_calls": [TOOL]}}),
        chunk({"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}]}, "finish_reason": "stop"}),
        b"[DONE]",
    ],
    [
        chunk({"text": "one", "finish_reason": None}, usage=USAGE),
        chunk({"text": "two", "index": 3, "finish_reason": "stop"}, usage=USAGE),
        *(chunk(None, usage=USAGE), b"[DONE]"),
    ],
    [text_chunk("one"), {"error": {"message": "no", "type": "x", "code": 503}}, b"[DONE]"],
    [text_chunk("one"), text_chunk("", "abort"), b"[DONE]"],
    [b"{broken", b"[1]", {"object": "error", "message": "flat", "code": "x"}],
)
NAMES: Final = (
    *("choices", "usage", "delta", "content", "index", "finish_reason", "error", "token_ids", "prompt_token_ids"),
    *("prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens", "text", "tool_calls", "message"),
    *("reasoning", "function", "object", "code", "id", "role"),
)
TOKENS: Final = (
    *(
        b"\n\n",
        b"\r\n\r\n",
        b"\r",
        b"data: ",
        b"data:",
        b"data: [DONE]\n\n",
        b": x\n\n",
        b"event: x\n",
        b"\xef\xbb\xbf",
    ),
    *(b'"usage":{}', b',"usage":null', b'"choices":[]', b'"', b"\\", b"}", b"{", b"[", b"]", b",", b"null", b"\xff"),
    *(b'"error":{"message":"x"}', b'"finish_reason":"abort"', b'"token_ids":[1,2]', b"99999999999999999999", b"\0"),
)


def make_stream(random: Random) -> bytes:
    """A stream of events, often mutated in their data or bytes."""
    mutator = Mutator(random, TOKENS, NAMES)
    events = list(random.choice(STREAMS))
    for _ in range(random.randint(0, 3)):
        at = random.randrange(len(events))
        if not isinstance(events[at], bytes):
            events[at] = mutator.tree(events[at])
        if random.random() < 0.2:
            events.insert(at, events[random.randrange(len(events))])
    end = random.choice((b"\n", b"\n", b"\n", b"\r\n", b"\r"))
    lines = []
    for event in events:
        data = event if isinstance(event, bytes) else mutator.json(event)
        extra = random.choice((b": x", b"id: 1", b"event: e", b"data: x")) + end if random.random() < 0.05 else b""
        lines.append(extra + b"data: " + data + end + end)
    stream = b"".join(lines)
    return mutator.damaged(stream) if random.random() < 0.5 else stream


def read_events(data: bytes, random: Random) -> bool:
    """The events do not depend on the cuts, and joined they are the original bytes."""
    pieces = Mutator(random, TOKENS).cuts(data)
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    rest = splitter.rest()
    assert b"".join(events) + rest == data
    whole = EventSplitter()
    assert whole.feed(data) == events or data.endswith(b"\r")
    for event in [*events, rest]:
        plain_data(event)
        if event_data(event) is not None:
            assert event_data(with_data(event, b"new")) == b"new"
    bounded = EventSplitter(limit=100)
    with suppress(WorkerBroke):
        for piece in pieces:
            bounded.feed(piece)
            assert len(bounded.tail) <= 100
    return bool(events)


def follow(asked: Call, pieces: list[bytes]) -> tuple[StreamReader, bytes]:
    """The reader after a stream, and the bytes passed on or held back."""
    reader = StreamReader(asked)
    shown = b"".join([reader.feed(piece) for piece in pieces])
    return reader, shown + reader.close() + reader.held


def read_stream(data: bytes, random: Random) -> bool:
    """The client's bytes do not depend on the cuts, counts are valid, and another engine can continue."""
    asked = random.choice(CALLS)
    reader, shown = follow(asked, [data])
    cut, shown_cut = follow(asked, Mutator(random, TOKENS).cuts(data))
    for each in (reader, cut):
        facts(each)
    if is_json(data) and not reader.broken:
        assert shown_cut == shown
        assert end_facts(cut) == end_facts(reader)
    if asked.usage_wanted and asked.continuous_wanted and not reader.broken:
        assert shown == data
    other = EventReader(asked)
    assert other.broken or data.startswith(other.feed(data) + other.close() + other.held)
    assert other.output_tokens() >= 0
    check_continuation(asked, cut, data, random)
    return reader.finished


def is_json(stream: bytes) -> bool:
    """Whether every event holds JSON. The fast path may accept invalid JSON in the common form."""
    splitter = EventSplitter()
    for event in [*splitter.feed(stream), splitter.rest()]:
        data = event_data(event)
        try:
            orjson.loads(b"0" if data in (None, b"[DONE]") else data or b"")
        except orjson.JSONDecodeError:
            return False
    return True


def end_facts(reader: StreamReader) -> tuple[object, ...]:
    """The properties that describe the end of a stream."""
    return reader.finished, reader.aborted, reader.done, reader.complete, reader.error, reader.text


def facts(reader: StreamReader) -> None:
    """Check everything that a relay reads from a reader."""
    assert reader.output_tokens() >= 0
    usage = reader.usage
    assert usage is None or (usage.input_tokens >= 0 and usage.output_tokens >= 0 and (usage.cached_tokens or 0) >= 0)
    assert all(key.size for key in reader.ending().answer_keys)
    assert isinstance(reader.text, str | None)
    assert isinstance(reader.continuable, bool)
    assert reader.error is None or isinstance(reader.error.message, str)
    token_ids = reader.ids
    assert token_ids is None or all(type(each) is int for ids in token_ids for each in ids)


def check_continuation(asked: Call, reader: StreamReader, more: bytes, random: Random) -> None:
    """Continue as if the engine had failed and another one answered with the same bytes."""
    rest = continuation(asked, reader, ids=random.random() < 0.7)
    if rest is None:
        return
    body = rest.body(random.choice((None, 100)))
    assert body is None or isinstance(orjson.loads(body), dict)
    reader.resume()
    rewriter = Rewriter(rest)
    with suppress(WorkerBroke):
        reader.feed(rewriter.feed(more) + rewriter.close())
    reader.close()
    facts(reader)
    last_events(asked, reader, random.choice((None, "length")))


COUNTED: Final[dict[str, Any]] = {**USAGE, "prompt_tokens_details": {"cached_tokens": 1}}
ANSWERS: Final[tuple[dict[str, Any], ...]] = (
    {
        **{"id": "c", "object": "chat.completion", "usage": COUNTED},
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x", "tool_calls": [TOOL]}}],
    },
    {"choices": [{"index": 1, "text": "x", "finish_reason": "abort"}, {"index": 0, "text": "y"}], "usage": USAGE},
    {"error": {"message": "no", "type": "x", "code": 400}},
    {"object": "error", "message": "flat", "code": 400},
    {"error": "Unauthorized"},
    {"usage": {"input_tokens": 9, "output_tokens": 3, "cache_read_input_tokens": 4}, "meta": {"tokens": USAGE}},
    {"response": {"response": {"usage": {"type": "duration", "seconds": 1.5}}, "usage": {"total_tokens": 3}}},
)


def make_answer(random: Random) -> bytes:
    """An answer that is not streamed."""
    mutator = Mutator(random, TOKENS, NAMES)
    answer = mutator.json(mutator.tree(random.choice(ANSWERS)))
    return mutator.damaged(answer) if random.random() < 0.3 else answer


def read_answer(data: bytes, random: Random) -> bool:
    """An answer is read or raises WorkerBroke, and can always be converted to the last event of a stream."""
    other = read_plain(random.choice(CALLS), data).usage
    assert other is None or min(other.input_tokens, other.output_tokens, other.cached_tokens or 0) >= 0
    last_event = refusal_event(500, data)
    assert last_event.endswith(b"data: [DONE]\n\n")
    assert len(EventSplitter().feed(last_event)) == 2
    try:
        answer = read_json(random.choice(CALLS), data)
    except WorkerBroke as error:
        error_event(error)
        return False
    usage = answer.usage
    assert usage is None or min(usage.input_tokens, usage.output_tokens, usage.cached_tokens or 0) >= 0
    assert all(key.size for key in answer.answer_keys)
    return True


Run = Callable[[bytes, Random], bool]
SSE: Final = Target("sse", make_stream, read_events)
STREAM: Final = Target("stream", make_stream, read_stream)
ANSWER: Final = Target("answer", make_answer, read_answer)
