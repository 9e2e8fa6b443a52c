"""Targets for the endpoints beside chats and completions: calls, answers and errors."""

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, Final

import orjson

from router.api.answer.event_reader import EventReader
from router.api.answer.sse import EventSplitter, event_data
from router.api.answer.stream_reader import EngineError
from router.api.body.call import Call, Head
from router.api.body.edits import rename, with_cache_salt
from router.api.body.error_bodies import ErrorShape
from router.api.body.json_object import load
from router.api.endpoints import messages, responses
from router.api.families import FAMILIES, Reader, error_shape_of, family_of
from router.auth.identity import Identifier
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import Usage
from router.errors import BadRequest, NoWorker, RouterError, UnknownModel, UnknownPath, WorkerBroke, WorkerHung

from .engine import Target
from .mutation import Mutator, deep_equal

HASHER: Final = PromptHasher(b"secret")
IDENTIFIER: Final = Identifier()
OTHERS: Final = ("/v1/audio/transcriptions", "/v1/responses/r/cancel", "/v1/x y\r\n\x00é?#%", "/v1/messages/batches")
HASHED_BYTES: Final = 4 * 2**20
"""Bytes hashed at most over all prompts of a call with a short body."""
MARK: Final = "Zanzibar"
"""A word in every prompt and answer. No error of the router may contain it."""
IMAGE: Final = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
USE: Final = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}
RESULT: Final = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": MARK}]}
CALLED: Final = {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"}
GIVEN: Final = {"type": "function_call_output", "call_id": "t", "output": MARK}
TURNS: Final = [
    {"role": "user", "content": [{"type": "text", "text": MARK, "cache_control": {"type": "ephemeral"}}, IMAGE]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": MARK}, USE]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": MARK}]},
]
ITEMS: Final = [
    {"role": "user", "content": [{"type": "input_text", "text": MARK}, {"type": "input_image", "image_url": "x"}]},
    {"type": "reasoning", "summary": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": MARK}]},
    *(CALLED, GIVEN),
]
FORM: Final = (
    b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--x\r\ncontent-disposition: form-data; name="user"\r\n\r\nann\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nZanzibar\0\xff\r\n--x--\r\n'
)
SCHEMA: Final = {"input_schema": {"type": "object"}}
BODIES: Final[tuple[dict[str, Any], ...]] = (
    {"model": "m", "max_tokens": 9, "system": MARK, "messages": TURNS, "tools": [{"name": "f", **SCHEMA}]},
    {
        **{"model": "m", "max_tokens": 9, "stream": True, "metadata": {"user_id": "ann"}},
        **{"system": [{"type": "text", "text": MARK}], "messages": [{"role": "user", "content": MARK}]},
    },
    {"model": "m", "input": ITEMS, "instructions": MARK, "tools": [{"type": "function", "name": "f"}]},
    {"model": "m", "input": MARK, "stream": True, "max_output_tokens": 9, "reasoning": {"effort": "low"}},
    {"input": MARK, "user": "ann", "previous_response_id": "r", "store": False},
    {"model": "m", "input": [MARK, "x"], "encoding_format": "float", "dimensions": 8},
    {"model": "m", "input": [[1, 2], [3]], "truncate_prompt_tokens": 5},
    {"input": [1, 2, 3], "user": "ann"},
    {"model": "m", "messages": [{"role": "user", "content": MARK}], "add_special_tokens": True},
    {"model": "m", "query": MARK, "documents": [MARK, {"text": "x"}, IMAGE], "top_n": 1},
    {"model": "m", "text_1": [MARK, "x"], "text_2": [MARK, "y"]},
    {"queries": MARK, "items": ["x"] * 300, "user": "ann"},
    {"query": MARK * 999, "documents": ["x"] * 250, "suffix": MARK * 999, "input": ["x"] * 1000},
    {"model": "m", "prompt": MARK},
    {"model": "m", "tokens": [1, 2, 3]},
    {"stream": True, "max_tokens": 5, "max_new_tokens": 9, "user": "ann", "cache_salt": "s"},
)
NAMES: Final = (
    *(
        "model",
        "messages",
        "input",
        "system",
        "metadata",
        "user_id",
        "role",
        "content",
        "type",
        "text",
        "tools",
        "name",
    ),
    *(
        "instructions",
        "previous_response_id",
        "reasoning",
        "effort",
        "output_config",
        "max_tokens",
        "max_output_tokens",
    ),
    *("stream", "user", "query", "documents", "text_1", "text_2", "queries", "items", "data_1", "data_2", "tokens"),
    *("tool_use_id", "call_id", "arguments", "input_schema", "cache_salt", "prompt", "tool_calls", "output", "summary"),
)
TOKENS: Final = (
    *(b'"model":"n",', b'"\\u006dodel":7,', b'"stream":true,', b"{", b"}", b"[", b"]", b'"', b"\\", b"\\ud800"),
    *(b":", b",", b"\n", b"\xff", b"null", b"1e999", b"[" * 1100, b'{"a":' * 300, b"9" * 400, b"\0", b"--x", b"\r\n"),
    *(b'; name="model"', b'; name="', b"filename", b"\r\n\r\n"),
)


def make_call(random: Random) -> bytes:
    """A body of one of these families, or a form, often mutated."""
    mutator = Mutator(random, TOKENS, NAMES)
    if random.random() < 0.1:
        return mutator.damaged(FORM)
    fields = random.choice(BODIES)
    body = mutator.json(mutator.tree(fields) if random.random() < 0.8 else fields)
    return mutator.damaged(body) if random.random() < 0.3 else body


def read_call(data: bytes, random: Random) -> bool:
    """A body is a call that is forwarded unchanged, or a BadRequest that does not reveal the prompt."""
    head = any_head(random)
    family = family_of(head.path)
    assert family is not None
    try:
        call = family.parse(head, data, HASHER, ids=random.random() < 0.5)
    except BadRequest as error:
        check_error(error, head.path)
        return False
    assert call.body is data
    assert call.path.isascii()
    assert call.path.isprintable()
    assert " " not in call.path
    assert call.prompts
    assert all(prompt.key.size > 0 for prompt in call.prompts)
    assert sum(prompt.key.size for prompt in call.prompts) <= HASHED_BYTES
    assert call.output_limit is None or call.output_limit >= 0
    assert IDENTIFIER.identify({}, call.user, "127.0.0.1").client.isprintable()
    if call.model:
        assert family.parse(head, rename(data, call.content_type, "other"), HASHER).model == "other"
    check_salted(head, data)
    return True


def any_head(random: Random) -> Head:
    """A random head of a call."""
    path = random.choice((*OTHER_FAMILIES, *OTHERS))
    content_type = random.choice(("application/json", 'multipart/form-data; boundary="x"', "multipart/form-data"))
    return Head(path, query=random.choice((b"", b"a=b c", random.randbytes(8))), content_type=content_type)


def check_salted(head: Head, data: bytes) -> None:
    """A salted body differs from the original only in its salt."""
    with suppress(BadRequest):
        salted = with_cache_salt(data, lambda user: f"client {user}", b"secret")
        fields = load(data)
        assert (salted is data) is (fields is None)
        if fields is not None:
            assert deep_equal({**orjson.loads(salted), "cache_salt": 0}, {**fields, "cache_salt": 0})
            family = family_of(head.path)
            assert family is not None
            family.parse(head, salted, HASHER)


def check_error(error: RouterError, path: str) -> None:
    """An error has the shape of its path, as a response and in a stream, and reveals nothing of the prompt."""
    shape = error_shape_of(path)
    body = shape.body(error)
    members = orjson.loads(body)["error"]
    assert members["message"] == error.message
    assert isinstance(members["type"], str)
    event = shape.event(error)
    assert holds_json(event)
    assert MARK.encode() not in body + event


def holds_json(events: bytes) -> bool:
    """Whether the first of these complete events holds a JSON object."""
    splitter = EventSplitter()
    first = splitter.feed(events)[0]
    return not splitter.tail and isinstance(orjson.loads(event_data(first) or b"0"), dict)


def parse(path: str, **fields: Any) -> Call:
    family = family_of(path)
    assert family is not None
    return family.parse(Head(path), orjson.dumps({"model": "m", **fields}), HASHER)


MESSAGE: Final = parse(messages.PATH, messages=TURNS, stream=True)
RESPONSE: Final = parse(responses.PATH, input=ITEMS, stream=True)
AFTER: Final = parse(responses.PATH, input=MARK, previous_response_id="r", stream=True)
ANY: Final = parse(OTHERS[0])
READERS: Final[tuple[tuple[Callable[[Call], Reader], Call, ErrorShape], ...]] = (
    (messages.MessageReader, MESSAGE, messages.ANTHROPIC),
    (responses.ResponseReader, RESPONSE, responses.ERRORS),
    (responses.ResponseReader, AFTER, responses.ERRORS),
    (EventReader, ANY, ErrorShape()),
)
INPUT: Final = {"input_tokens": 9, "cache_read_input_tokens": 4, "output_tokens": 0}
USED: Final = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3, "total_tokens": 12}
ANSWERED: Final = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": MARK}]}
DIED: Final = {"type": "overloaded_error", "message": MARK, "code": "rate_limit_exceeded"}
STREAMS: Final[tuple[list[tuple[str, dict[str, Any]]], ...]] = (
    [
        ("message_start", {"message": {"id": "a", "role": "assistant", "usage": INPUT}}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": MARK}}),
        ("content_block_start", {"index": 1, "content_block": {**USE, "input": {}}}),
        ("content_block_delta", {"index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a":1}'}}),
        ("content_block_stop", {"index": 1}),
        ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}),
        ("message_stop", {}),
    ],
    [
        ("response.created", {"response": {"id": "r", "usage": None}}),
        ("response.output_text.delta", {"delta": MARK, "output_index": 0}),
        ("response.output_text.delta", {"delta": "x", "output_index": 0}),
        ("response.completed", {"response": {"id": "r", "output": [ANSWERED, CALLED], "usage": USED}}),
    ],
    [("response.created", {}), ("response.failed", {"response": {"error": DIED}})],
    [("ping", {}), ("error", {"error": DIED}), ("error", DIED)],
    [("", {"error": DIED}), ("", {"text": MARK, "usage": {"total_tokens": 7}})],
)
EVENT_NAMES: Final = (
    *("type", "index", "delta", "content_block", "text", "partial_json", "usage", "input_tokens", "output_tokens"),
    *("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens_details", "message", "response", "error"),
    *("output", "content", "code", "input", "id", "name", "total_tokens", "seconds", "meta", "tokens", "count"),
)
EVENT_TOKENS: Final = (
    *(b"\n\n", b"\r\n\r\n", b"\r", b"data: ", b"data:", b"event: error\n", b"event: message_stop\n", b": x\n\n"),
    *(b"event: response.completed\n", b'"usage":{}', b'"type":"error"', b'"', b"\\", b"{", b"}", b"\xff", b"null"),
    *(b"\xef\xbb\xbf", b"99999999999999999999", b"data: [DONE]\n\n", b"\0"),
)


def make_events(random: Random) -> bytes:
    """Events with names, often mutated in their data or bytes."""
    mutator = Mutator(random, EVENT_TOKENS, EVENT_NAMES)
    events = list(random.choice(STREAMS))
    for _ in range(random.randint(0, 3)):
        at = random.randrange(len(events))
        events[at] = random.choice(events)[0], mutator.tree(events[at][1])
    end = random.choice((b"\n", b"\n", b"\n", b"\r\n", b"\r"))
    lines = []
    for name, fields in events:
        named = isinstance(fields, dict) and random.random() < 0.9
        data = mutator.json({"type": name, **fields} if named else fields)
        first = b"event: %b" % name.encode() + end if name and random.random() < 0.9 else b""
        lines.append(first + b"data: " + data + end + end)
    stream = b"".join(lines)
    return mutator.damaged(stream) if random.random() < 0.4 else stream


def follow_events(data: bytes, random: Random) -> bool:
    """All bytes before an invalid event are passed on or held back, and the result does not depend on the cuts."""
    kind, call, shape = random.choice(READERS)
    reader, shown = follow(kind(call), [data])
    cut, shown_cut = follow(kind(call), Mutator(random, EVENT_TOKENS).cuts(data))
    assert data.startswith(shown + reader.held)
    assert reader.broken or shown + reader.held == data
    if not data.endswith(b"\r") or not reader.broken:
        assert (shown_cut, cut.held) == (shown, reader.held)
        assert facts(cut) == facts(reader)
    if reader.error is not None:
        assert not reader.held or data.endswith(reader.held) or reader.broken
        assert holds_json(shape.refusal_event(500, reader.held))
    return reader.finished and not reader.broken


def follow(reader: Reader, pieces: list[bytes]) -> tuple[Reader, bytes]:
    """The reader after a stream, and the bytes that went to the client."""
    shown = []
    tokens = 0
    for piece in pieces:
        shown.append(reader.feed(piece))
        assert 0 <= tokens <= reader.output_tokens() or reader.usage is not None
        tokens = reader.output_tokens()
    return reader, b"".join([*shown, reader.close()])


def facts(reader: Reader) -> tuple[object, ...]:
    """Everything that a relay reads from a reader."""
    check_usage(reader.usage)
    check_failure(reader.error)
    assert reader.output_tokens() >= 0
    answers = reader.ending().answer_keys
    assert all(key.size for key in answers)
    return (
        *(reader.has_delivered, reader.started, reader.finished, reader.complete, reader.aborted, reader.broken),
        *(reader.error, reader.usage, reader.output_tokens(), answers, reader.ending().answer_keys),
    )


def check_usage(usage: Usage | None) -> None:
    """Check that counts are not negative."""
    assert usage is None or min(usage.input_tokens, usage.output_tokens, usage.cached_tokens or 0) >= 0


def check_failure(error: EngineError | None) -> None:
    """Check the types of an error."""
    assert error is None or (isinstance(error.message, str) and isinstance(error.code, int | str | None))


ANSWERS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "message", "role": "assistant", "content": [{"type": "text", "text": MARK}, USE], "usage": INPUT},
    {"type": "message", "content": [{"type": "thinking", "thinking": MARK}], "usage": {**INPUT, "output_tokens": 3}},
    {"type": "error", "error": {"type": "overloaded_error", "message": MARK}},
    {"id": "r", "output": [ANSWERED, CALLED], "usage": USED, "error": None, "status": "completed"},
    {"id": "r", "output": [{"type": "reasoning"}, ANSWERED], "usage": USED},
    {"id": "r", "status": "failed", "error": {"code": "rate_limit_exceeded", "message": MARK}},
    {"data": [{"embedding": [0.5, 1.0], "index": 0}], "usage": {"prompt_tokens": 9, "total_tokens": 9}},
    {"results": [{"index": 0, "relevance_score": 0.5}], "meta": {"billed_units": {"input_tokens": 9}}},
    {"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]},
    {"prompt": MARK, "input_tokens": 3},
    {"text": MARK, "usage": {"type": "duration", "seconds": 1.5}},
    {"object": "error", "message": MARK, "code": 400},
    {"detail": [{"loc": ["body"], "msg": MARK}]},
    {"error": MARK},
)
STATUSES: Final = (200, 204, 301, 400, 401, 404, 422, 429, 499, 500, 503, 504, 599)


def make_whole(random: Random) -> bytes:
    """An answer that is not streamed, sometimes too long to be parsed."""
    mutator = Mutator(random, EVENT_TOKENS, EVENT_NAMES)
    answer = random.choice(ANSWERS)
    data = mutator.json(mutator.tree(answer) if random.random() < 0.8 else answer)
    if random.random() < 0.02:
        data = b'{"data":[%b],' % b",".join([b"0.125"] * 11_000) + data[1:]
    return mutator.damaged(data) if random.random() < 0.3 else data


def read_whole(data: bytes, random: Random) -> bool:
    """Each family reads the answer or raises WorkerBroke, and converts it as an error to the family's shape."""
    accepted = True
    for path in random.sample((*OTHER_FAMILIES, OTHERS[0]), 3):
        family = family_of(path)
        assert family is not None
        try:
            answer = family.read_whole(CALLS[path], data)
        except WorkerBroke as error:
            check_error(error, path)
            accepted = False
        else:
            check_usage(answer.usage)
            check_failure(answer.error)
            assert all(key.size for key in answer.answer_keys)
        status = random.choice(STATUSES)
        converted = family.errors.refusal(status, data)
        assert converted is None or isinstance(orjson.loads(converted)["error"], dict)
        assert holds_json(family.errors.refusal_event(status, data))
    return accepted


CLASSES: Final[tuple[Callable[[str], RouterError], ...]] = (
    *(UnknownModel, UnknownPath, WorkerBroke, lambda _: WorkerHung()),
    lambda text: NoWorker(text, retry_after=1e300, reason="rejected-no-endpoints"),
    lambda text: BadRequest(text, param=text, code="invalid_value"),
)


def make_words(random: Random) -> bytes:
    """Text from a client that an error quotes."""
    mutator = Mutator(random, EVENT_TOKENS, EVENT_NAMES)
    return mutator.damaged(random.choice((b"model", b"/v1/x\r\ny", b"\xed\xa0\x80", b"x" * 500)))


def render_error(data: bytes, random: Random) -> bool:
    """Each error of the router has each API's shape, whatever it quotes; its headers have one line each."""
    error = random.choice(CLASSES)(data.decode(errors="replace"))
    for path in (*OTHER_FAMILIES, *OTHERS):
        check_error(error, path)
    for name, value in error.headers():
        assert b"\n" not in name + value
        assert b"\r" not in name + value
    return len(error.message) > 100


OTHER_FAMILIES: Final = tuple(path for path, family in FAMILIES.items() if not family.tokenizable)
CALLS: Final = {
    path: {messages.PATH: MESSAGE, responses.PATH: RESPONSE}.get(path, ANY) for path in (*OTHER_FAMILIES, *OTHERS)
}
CALL: Final = Target("call", make_call, read_call)
FOLLOWED: Final = Target("followed", make_events, follow_events)
WHOLE: Final = Target("whole", make_whole, read_whole)
WORDS: Final = Target("words", make_words, render_error)
