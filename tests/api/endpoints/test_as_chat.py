"""Calls that engines convert to chats, with members or answers nested too deeply to serialise."""

import orjson
import pytest

from router.api.answer.stream_reader import Answer
from router.api.body.call import Call, Head
from router.api.endpoints.messages import MessageReader, failure_of, parse_messages, read_message
from router.api.endpoints.responses import ResponseReader, parse_response, read_response
from router.api.endpoints.responses import failure_of as response_failure_of
from router.api.families import FAMILIES
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import Usage
from router.errors import BadRequest

HASHER = PromptHasher(b"secret")
DEEP = b"[" * 300 + b"]" * 300
"""orjson can parse it but not serialise it."""
DEEPEST = b"[" * 1000 + b"]" * 1000
"""orjson can parse it, and Python cannot compute its repr."""
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def event(kind: bytes, fields: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (kind, kind, fields)


def message() -> Call:
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]})
    return parse_messages(Head(MESSAGES), body, HASHER)


def response() -> Call:
    return parse_response(Head(RESPONSES), b'{"model":"m","input":"Hello"}', HASHER)


def test_a_message_that_cannot_be_sent_again_has_the_prompts_key() -> None:
    """The arguments of its tool are too deep. The message is still complete and charged, streamed or not."""
    call, usage = message(), b'"usage":{"input_tokens":5,"output_tokens":6}'
    use = b'{"type":"tool_use","id":"t","name":"f","input":{%b}}'
    whole = read_message(call, b'{"type":"message","content":[%b],%b}' % (use % (b'"x":%b' % DEEP), usage))
    assert (whole.error, whole.usage, whole.answer_keys) == (None, Usage(5, 6), (call.prompts[0].key,))
    reader = MessageReader(call)
    for each in (
        event(b"message_start", b'"message":{%b}' % usage),
        event(b"content_block_start", b'"index":0,"content_block":%b' % (use % b"")),
        event(b"content_block_delta", b'"index":0,"delta":{"partial_json":"{\\"x\\":%b}"}' % DEEP),
        event(b"message_stop", b'"x":0'),
    ):
        assert reader.feed(each) == each
    assert (reader.complete, reader.usage, reader.ending().answer_keys) == (True, Usage(5, 6), (call.prompts[0].key,))


def test_a_response_that_cannot_be_sent_again_has_the_prompts_key() -> None:
    """A part of it is too deep. The response is still complete and charged, streamed or not."""
    call = response()
    fields = b'{"output":[{"role":"assistant","content":[%b]}],"usage":{"input_tokens":5,"output_tokens":6}}' % DEEP
    whole = read_response(call, fields)
    assert (whole.error, whole.usage, whole.answer_keys) == (None, Usage(5, 6), (call.prompts[0].key,))
    reader = ResponseReader(call)
    last = event(b"response.completed", b'"response":%b' % fields)
    assert reader.feed(last) == last
    assert (reader.complete, reader.usage, reader.ending().answer_keys) == (True, Usage(5, 6), (call.prompts[0].key,))


@pytest.mark.parametrize("value", [b"7", b"{}", DEEPEST], ids=["number", "object", "deep"])
def test_a_response_can_continue_only_one_with_a_string_as_id(value: bytes) -> None:
    """Any other value is a bad request."""
    with pytest.raises(BadRequest) as caught:
        parse_response(Head(RESPONSES), b'{"input":"x","previous_response_id":%b}' % value, HASHER)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "invalid_type")


@pytest.mark.parametrize("name", ["message", "type", "code"])
def test_members_of_an_error_may_have_any_type(name: str) -> None:
    """Such an error has an empty message and status 500."""
    fields = orjson.loads(b'{"error":{"%b":%b}}' % (name.encode(), DEEPEST))
    for error in (failure_of(fields), response_failure_of(fields)):
        assert (error.message, error.code) == ("", 500)


@pytest.mark.parametrize("path", FAMILIES)
def test_no_whole_answer_is_too_deep_for_its_reader(path: str) -> None:
    """The nesting may be in an error, its message or the choices."""
    calls = {RESPONSES: response(), MESSAGES: message()}
    call = calls.get(path, message())._replace(path=path)
    for name in ("message", "finish_reason", "id", "x"):
        choice = b'{"index":0,"%b":%b,"message":{"tool_calls":[{"id":%b,"function":{"name":%b}}]}}'
        for body in (
            b'{"error":{"%b":%b}}' % (name.encode(), DEEPEST[10:-10]),
            b'{"choices":[%b]}' % (choice % (name.encode(), *(DEEPEST[10:-10],) * 3)),
        ):
            assert isinstance(FAMILIES[path].read_whole(call, body), Answer)
