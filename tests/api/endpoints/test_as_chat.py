"""Calls that engines turn into chats, where what is in them or in their answers is nested too deeply to be written."""

import orjson
import pytest

from router.api.body.call import Call, Head
from router.api.endpoints.messages import MessageReader, failure_of, parse_messages, read_message
from router.api.endpoints.responses import ResponseReader, parse_response, read_response
from router.api.endpoints.responses import failure_of as response_failure_of
from router.api.registry import FAMILIES
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import Usage
from router.errors import BadRequest

HASHER = PromptHasher(b"secret")
DEEP = b"[" * 300 + b"]" * 300
"""It can be read, and not written."""
DEEPEST = b"[" * 1000 + b"]" * 1000
"""It can be read, and not be shown by Python either."""
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def event(kind: bytes, fields: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (kind, kind, fields)


def message() -> Call:
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]})
    return parse_messages(Head(MESSAGES), body, HASHER)


def response() -> Call:
    return parse_response(Head(RESPONSES), b'{"model":"m","input":"Hello"}', HASHER)


def test_a_message_that_cannot_be_sent_again_has_the_prompts_key() -> None:
    """The arguments of its tool are too deep; it is complete and charged all the same, streamed or whole."""
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
    assert (reader.complete, reader.usage, reader.answer_keys()) == (True, Usage(5, 6), (call.prompts[0].key,))


def test_a_response_that_cannot_be_sent_again_has_the_prompts_key() -> None:
    """A part of it is too deep; it is complete and charged all the same, streamed or whole."""
    call = response()
    told = b'{"output":[{"role":"assistant","content":[%b]}],"usage":{"input_tokens":5,"output_tokens":6}}' % DEEP
    whole = read_response(call, told)
    assert (whole.error, whole.usage, whole.answer_keys) == (None, Usage(5, 6), (call.prompts[0].key,))
    reader = ResponseReader(call)
    last = event(b"response.completed", b'"response":%b' % told)
    assert reader.feed(last) == last
    assert (reader.complete, reader.usage, reader.answer_keys()) == (True, Usage(5, 6), (call.prompts[0].key,))


@pytest.mark.parametrize("value", [b"7", b"{}", DEEPEST], ids=["number", "object", "deep"])
def test_a_response_goes_on_from_one_that_has_a_name(value: bytes) -> None:
    """Anything else is the client's mistake."""
    with pytest.raises(BadRequest) as caught:
        parse_response(Head(RESPONSES), b'{"input":"x","previous_response_id":%b}' % value, HASHER)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "invalid_type")


@pytest.mark.parametrize("name", ["message", "type", "code"])
def test_an_error_may_have_anything_where_its_words_are_looked_for(name: str) -> None:
    """It counts as an error without words, of the engine's own."""
    told = orjson.loads(b'{"error":{"%b":%b}}' % (name.encode(), DEEPEST))
    for error in (failure_of(told), response_failure_of(told)):
        assert (error.message, error.code) == ("", 500)


@pytest.mark.parametrize("path", FAMILIES)
def test_no_whole_answer_is_too_deep_for_its_reader(path: str) -> None:
    """Wherever it is: as an error, its words, its choices or its usage."""
    calls = {RESPONSES: response(), MESSAGES: message()}
    call = calls.get(path, message())._replace(path=path)
    for name in ("message", "finish_reason", "id", "x"):
        choice = b'{"index":0,"%b":%b,"message":{"tool_calls":[{"id":%b,"function":{"name":%b}}]}}'
        for body in (
            b'{"error":{"%b":%b}}' % (name.encode(), DEEPEST[10:-10]),
            b'{"choices":[%b]}' % (choice % (name.encode(), *(DEEPEST[10:-10],) * 3)),
        ):
            FAMILIES[path].read_whole(call, body)
