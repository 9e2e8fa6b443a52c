"""The emulation rejects what its engine rejects: with the same status and shape, naming the same field."""

import json
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import httpx
import pytest

from ..fleet import CONTEXT
from ..processes import Server
from ..wire import CHAT, COMPLETIONS, WORKER_KEY, Answer, Json, call, get, mapped
from .shapes import shape
from .sides import Sides

pytestmark = pytest.mark.engine

MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
TURN: Json = {"role": "user", "content": "so it goes"}
BASE: Mapping[str, Json] = {
    CHAT: {"model": "tiny", "messages": [TURN], "max_tokens": 2},
    COMPLETIONS: {"model": "tiny", "prompt": "so it goes", "max_tokens": 2},
    MESSAGES: {"model": "tiny", "messages": [TURN], "max_tokens": 2},
    RESPONSES: {"model": "tiny", "input": "so it goes", "max_output_tokens": 8},
    "/tokenize": {"model": "tiny", "messages": [TURN]},
    "/detokenize": {"model": "tiny", "tokens": [300]},
}
BOTH: Final = (CHAT, COMPLETIONS)
ON_CHAT: Final = (CHAT,)
EITHER: Final = {"vllm": 400, "sglang": 400}
VLLM: Final = {"vllm": 400, "sglang": 200}
SGLANG: Final = {"vllm": 200, "sglang": 400}
NEITHER: Final = {"vllm": 200, "sglang": 200}
USAGE: Json = {"include_usage": True}
GONE_ON: Json = {"continue_final_message": True}


class Case(NamedTuple):
    """Fields added to a valid body, the paths, and the status with which each engine answers."""

    fields: Json
    status: Mapping[str, int]
    paths: tuple[str, ...] = BOTH
    streams: tuple[bool, ...] = (False, True)


CASES: dict[str, Case] = {
    # What the router may add.
    "ids in a streamed chat": Case({"return_token_ids": True}, SGLANG, ON_CHAT, (True,)),
    "the prompt's ids in a streamed chat": Case({"return_prompt_token_ids": True}, SGLANG, ON_CHAT, (True,)),
    "no ids in a streamed chat": Case({"return_token_ids": False}, NEITHER, ON_CHAT, (True,)),
    "ids in a whole chat": Case({"return_token_ids": True}, NEITHER, ON_CHAT, (False,)),
    "ids in completions": Case({"return_token_ids": True}, NEITHER, (COMPLETIONS,)),
    "ids elsewhere": Case({"return_token_ids": True}, NEITHER, (MESSAGES, RESPONSES, "/tokenize"), (False,)),
    "stream options without a stream": Case({"stream_options": USAGE}, VLLM, BOTH, (False,)),
    "no stream options without a stream": Case({"stream_options": {}}, NEITHER, BOTH, (False,)),
    "stream options of messages": Case({"stream_options": USAGE}, NEITHER, (MESSAGES, RESPONSES)),
    "unknown stream option": Case({"stream_options": {"nonsense": 1}}, NEITHER, BOTH, (True,)),
    "stream options that are a number": Case({"stream_options": 7}, EITHER),
    "unknown field": Case({"nonsense": 1}, NEITHER, tuple(BASE), (False,)),
    "salt": Case({"cache_salt": "s"}, NEITHER, (*BOTH, MESSAGES, RESPONSES)),
    "empty salt": Case({"cache_salt": ""}, VLLM, (*BOTH, RESPONSES)),
    "empty salt of a message": Case({"cache_salt": ""}, VLLM, (MESSAGES,)),
    "salt that is a number": Case({"cache_salt": 7}, EITHER),
    "gone on with, no answer opened": Case(GONE_ON | {"add_generation_prompt": False}, NEITHER, ON_CHAT),
    "gone on with": Case(GONE_ON, VLLM, ON_CHAT),
    "gone on with and opened": Case(GONE_ON | {"add_generation_prompt": True}, VLLM, ON_CHAT),
    "tokens of both": Case(GONE_ON | {"add_generation_prompt": True}, VLLM, ("/tokenize",), (False,)),
    "tokens of what is gone on with": Case(
        GONE_ON | {"add_generation_prompt": False}, SGLANG, ("/tokenize",), (False,)
    ),
    # Values.
    "limit as a text": Case({"max_tokens": "5"}, NEITHER),
    "limit as a float": Case({"max_tokens": 5.0}, NEITHER),
    "limit that is no number": Case({"max_tokens": "x"}, EITHER),
    "limit with a fraction": Case({"max_tokens": 5.5}, EITHER),
    "limit beyond the context": Case({"max_tokens": CONTEXT + 1}, EITHER),
    "no limit of a message": Case({"max_tokens": None}, EITHER, (MESSAGES,)),
    "a message of nothing": Case({"max_tokens": 0}, EITHER, (MESSAGES,)),
    "negative temperature": Case({"temperature": -1}, EITHER),
    "temperature that is no number": Case({"temperature": "x"}, EITHER),
    "nothing on top": Case({"top_p": 0}, EITHER),
    "two greedy answers": Case({"n": 2, "temperature": 0}, VLLM),
    "answers that are no number": Case({"n": "x"}, EITHER),
    "user that is a number": Case({"user": 7}, EITHER),
    "stream that is neither": Case({"stream": "x"}, EITHER, BOTH, (False,)),
    "no model": Case({"model": None}, SGLANG),
    "model that is a number": Case({"model": 7}, EITHER),
    "other model": Case({"model": "nope"}, {"vllm": 404, "sglang": 200}),
    "other model of a message": Case(
        {"model": "nope"}, {"vllm": 404, "sglang": 200}, (MESSAGES, "/tokenize"), (False,)
    ),
    "other model of a response": Case({"model": "nope"}, {"vllm": 404, "sglang": 404}, (RESPONSES,)),
    # Prompts.
    "no messages": Case({"messages": []}, EITHER, (CHAT, MESSAGES)),
    "messages that are a text": Case({"messages": "x"}, EITHER, ON_CHAT),
    "message of nobody": Case({"messages": [{"content": "x"}]}, EITHER, ON_CHAT),
    "message of an unknown role": Case({"messages": [{"role": "nobody", "content": "x"}]}, SGLANG, ON_CHAT),
    "unknown role": Case({"messages": [{"role": "nobody", "content": "x"}]}, EITHER, (MESSAGES,)),
    "empty prompt": Case({"prompt": ""}, EITHER, (COMPLETIONS,)),
    "no prompts": Case({"prompt": []}, EITHER, (COMPLETIONS,)),
    "prompt that is a number": Case({"prompt": 7}, EITHER, (COMPLETIONS,)),
    "prompt too long": Case({"prompt": [300] * (CONTEXT + 1)}, EITHER, (COMPLETIONS,)),
    "chat too long": Case({"messages": [{**TURN, "content": "so it goes " * CONTEXT}]}, EITHER, ON_CHAT),
    "input that is a number": Case({"input": 7}, EITHER, (RESPONSES,)),
    "no input": Case({"input": []}, EITHER, (RESPONSES,)),
    "tokens that are a text": Case({"tokens": "x"}, EITHER, ("/detokenize",), (False,)),
}
BROKEN: dict[str, bytes] = {
    "half a body": b'{"model": ',
    "no body": b"",
    "no UTF-8": b"\xff\xfe{}",
    "only a model": b'{"model": "tiny"}',
}
REFUSED_IDS: Json = {
    "object": "error",
    "message": "return_token_ids is not supported with streaming on /v1/chat/completions. "
    "Please set stream=false when using return_token_ids=true.",
    "type": "BadRequest",
    "param": None,
    "code": 400,
}


def rejection(answer: Answer) -> tuple[object, ...]:
    """Return status, type and shape of a rejection, and the parts that do not depend on wording: kind, field and
    code.
    """
    content_type = answer.headers.get("content-type")
    if answer.status == 200 or content_type != "application/json":
        return answer.status, content_type
    body = answer.json
    error = body.get("error", body)
    fixed = {name: error.get(name) for name in ("object", "type", "code")} if isinstance(error, dict) else error
    return answer.status, content_type, shape(body), fixed


def bodies(case: Case) -> Iterator[tuple[str, Json]]:
    for path in case.paths:
        for stream in case.streams or (False,):
            yield path, {**BASE[path], "stream": stream, **case.fields}


@pytest.mark.parametrize("name", CASES)
def test_a_refusal(sides: Sides, name: str) -> None:
    """The status is the one listed here; the emulation has the same, and equal kind, shape and code of error."""
    case = CASES[name]
    for path, body in bodies(case):
        real, emulated = (rejection(call(server.url, path, body)) for server in sides.each())
        assert (path, body.get("stream"), real[0]) == (path, body.get("stream"), case.status[sides.dialect])
        assert emulated == real


@pytest.mark.parametrize("name", BROKEN)
def test_a_body_that_cannot_be_read(sides: Sides, name: str) -> None:
    """Each such body gets 400 on every path."""
    for path in BASE:
        real, emulated = (rejection(call(server.url, path, BROKEN[name])) for server in sides.each())
        assert (path, real[0]) == (path, 400)
        assert emulated == real


def test_ids_in_a_streamed_chat_are_refused_in_these_words(sides: Sides) -> None:
    """The refusal has SGLang's exact message in both SGLang servers, and both vLLM servers stream the ids."""
    body = {**BASE[CHAT], "stream": True, "return_token_ids": True}
    for server in sides.each():
        answer = call(server.url, CHAT, body)
        if sides.dialect == "sglang":
            assert (answer.status, answer.json) == (400, REFUSED_IDS)
        else:
            assert answer.status == 200
            assert b'"token_ids":[' in answer.body


def test_a_refusal_names_the_field(server: Server, sides: Sides) -> None:
    """For each field that the router may add, vLLM names it in `param`, SGLang only in the message."""
    named = {"cache_salt": 7, "stream_options": 7}
    for field, value in named.items():
        error = call(server.url, CHAT, {**BASE[CHAT], "stream": True, field: value}).json
        if sides.dialect == "vllm":
            assert field in str(mapped(error["error"])["param"])
        else:
            assert error["param"] is None
            assert field in str(error["message"])


def test_who_needs_the_key(sides: Sides) -> None:
    """The emulation requires the key on the same paths as the real engine, with the same answer."""
    pages = (
        "/health",
        "/ready",
        "/ping",
        "/metrics",
        "/version",
        "/server_info",
        "/v1/models",
        "/nowhere",
        "/v1/nowhere",
    )
    for page in pages:
        for key in (None, "wrong"):
            real, emulated = (get(server.url + page, key) for server in sides.each())
            asked = [answer.status == 401 for answer in (real, emulated)]
            assert (page, asked[1]) == (page, asked[0])
            assert not asked[0] or real.json == emulated.json == {"error": "Unauthorized"}
    for path, body in BASE.items():
        real, emulated = (call(server.url, path, body, "wrong") for server in sides.each())
        assert (path, emulated.status) == (path, real.status)


def test_a_body_that_is_not_said_to_be_json(server: Server) -> None:
    """A JSON body of another content type gets 400."""
    headers = {"content-type": "text/plain", "authorization": f"Bearer {WORKER_KEY}"}
    answer = httpx.post(server.url + CHAT, content=json.dumps(BASE[CHAT]), headers=headers, timeout=60)
    assert answer.status_code == 400
