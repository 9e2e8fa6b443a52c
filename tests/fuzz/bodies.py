"""Targets for the bodies of calls from clients, and for the edits before they are forwarded."""

from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any, Final

import orjson

from router.api.answer.client_view import UsageSplice
from router.api.body.call import Call, Head
from router.api.body.edits import Addition
from router.api.body.json_object import cut_member, insert_members, member_span, replace_member
from router.api.endpoints.other import parse_other
from router.api.families import FAMILIES
from router.auth.identity import Identifier
from router.core.model.prompt_key import PromptHasher
from router.errors import BadRequest, RouterError
from router.front.byte_budget import ByteBudget
from router.front.exchange import ClientGone, Exchange
from router.kv_events.tokenize import _texts, _tokenize_requests

from .engine import Target
from .mutation import Mutator, deep_equal
from .streams import CALLS, CHAT, COMPLETIONS, STREAMS
from .streams import NAMES as CHUNK_NAMES

HASHER: Final = PromptHasher(b"secret")
IDENTIFIER: Final = Identifier()
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MESSAGES: Final = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE], "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "t", "content": "7"},
]
OPTIONS: Final = {"include_usage": True, "continuous_usage_stats": False}
BODIES: Final[tuple[dict[str, Any], ...]] = (
    {"model": "m", "messages": MESSAGES, "max_tokens": 5, "tools": TOOLS},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": OPTIONS, "n": 2},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "user": "ann", "stop": ["x"]},
    {"model": "m", "prompt": "x" * 300, "stream": True, "max_tokens": 5, "cache_salt": "s"},
    {"model": "m", "prompt": ["a", "b"], "n": 2, "suffix": "x", "echo": True},
    {"model": "m", "prompt": [[1, 2, 3], [4]], "stream": True, "return_token_ids": True},
    {"model": "m", "prompt": [1, 2, 3], "response_format": {"type": "text"}, "best_of": 1},
)
NAMES: Final = (
    *("model", "messages", "prompt", "stream", "stream_options", "n", "user", "max_tokens", "max_completion_tokens"),
    *("return_token_ids", "role", "content", "type", "text", "tool_calls", "function", "arguments", "name", "tools"),
    *("tool_choice", "response_format", "best_of", "stop", "logprobs", "echo", "suffix", "cache_salt", "documents"),
    *("reasoning_content", "function_call", "include_usage", "continuous_usage_stats", "chat_template_kwargs"),
)
TOKENS: Final = (
    *(b'"stream":true,', b'"stream_options":', b'"model":"m",', b'"\\u0073tream":true,', b"{", b"}", b"[", b"]", b'"'),
    *(
        b"\\",
        b"\\ud800",
        b"\\u0000",
        b":",
        b",",
        b" ",
        b"\n",
        b"\xff",
        b"\xed\xa0\x80",
        b"NaN",
        b"1e999",
        b"-0",
        b"null",
    ),
    *(
        b"[" * 1100,
        b'{"a":' * 300,
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n',
        b"--x--",
        b"9" * 400,
        b"true",
        b"/*",
        b"\xef\xbb\xbf",
        b"\0",
    ),
)


def make_body(random: Random) -> bytes:
    """A body with changed members or bytes."""
    mutator = Mutator(random, TOKENS, NAMES)
    fields = random.choice(BODIES)
    if random.random() < 0.8:
        fields = mutator.tree(fields)
    body = mutator.json(fields)
    return mutator.damaged(body) if random.random() < 0.4 else body


def read_body(data: bytes, random: Random) -> bool:
    """A body is a valid call or a BadRequest, and the forwarded body equals it except for added fields."""
    path = random.choice((CHAT, COMPLETIONS))
    boundary = random.choice(("x", '"', "x; boundary=y"))
    parse_other(Head("/v1/other", content_type=f"multipart/form-data; boundary={boundary}"), data, HASHER)
    with suppress(BadRequest):
        assert parse_other(Head("/v1/other"), data, HASHER).prompts
    try:
        call = FAMILIES[path].parse(Head(path), data, HASHER, ids=random.random() < 0.5)
    except BadRequest:
        return False
    assert call.body is data
    added = frozenset(each for each in call.additions.wanted if random.random() < 0.8)
    body = call.additions.put(data, added)
    assert (body is data) == (not added)
    fields, sent = orjson.loads(data), orjson.loads(body)
    for each in added:
        assert value_at(sent, each) is True
    for name in ("stream_options", "return_token_ids"):
        fields.pop(name, None)
        sent.pop(name, None)
    assert deep_equal(sent, fields)
    assert call.prompts
    assert all(prompt.key.size for prompt in call.prompts)
    assert call.output_limit is None or call.output_limit >= 0
    assert IDENTIFIER.identify({}, call.user, "127.0.0.1").client.isprintable()
    _ask_for_tokens(call)
    return True


def value_at(fields: Mapping[str, Any], field: Addition) -> object:
    """The value in a body of a field that the router adds."""
    value: Any = fields
    for name in field.value.split("."):
        value = value[name]
    return value


def _ask_for_tokens(call: Call) -> None:
    """Build tokenize requests like `router.kv_events.tokenize`, which handles these errors as not tokenizable."""
    fields = orjson.loads(call.body)
    with suppress(ValueError, TypeError, LookupError):
        if call.path.endswith("/chat/completions"):
            orjson.dumps(_tokenize_requests(fields, True))
        else:
            _texts(fields, None)
            orjson.dumps(_tokenize_requests(fields, False))


def receive_body(data: bytes, random: Random) -> bool:
    """A body in pieces arrives unchanged, or is too large, or its client left; no bytes stay held afterwards."""
    pieces = Mutator(random, TOKENS).cuts(data)
    limit, budget = random.choice((10, 1000, 1 << 20)), ByteBudget(random.choice((100, 1 << 20)))
    left = random.randint(1, len(pieces)) if random.random() < 0.2 else len(pieces) + 1
    coming: list[Mapping[str, Any]] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    coming[-1] = {**coming[-1], "more_body": False}
    coming = [*coming[:left], {"type": "http.disconnect"}]
    declared = random.choice((b"0", b"%d" % len(data), b"99999999999999999999", b"x", b"-1"))
    headers = [(b"content-length", declared)] if random.random() < 0.5 else []

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"path": "/", "method": "POST", "headers": headers, "client": ("127.0.0.1", 1)}
    got = None
    try:
        with budget.hold("owner") as hold:
            Exchange(scope, receive, send).body(limit, hold).send(None)
    except StopIteration as done:
        got = done.value
    except (RouterError, ClientGone):
        pass
    assert got is None or (got == data and len(data) <= limit)
    assert budget.held == 0
    return got is not None


def make_object(random: Random) -> bytes:
    """A chunk or a body that is an object, with unusual spacing."""
    mutator = Mutator(random, TOKENS, (*CHUNK_NAMES, *NAMES))
    chunks = [each for stream in STREAMS for each in stream if isinstance(each, dict)]
    data = mutator.json(mutator.tree(random.choice(random.choice((chunks, BODIES)))))
    if random.random() < 0.3:
        data = data.replace(b'"usage"', random.choice((b'"\\u0075sage"', b' "usage" ', b'"usage":0,"usage"')), 1)
    return mutator.damaged(data) if random.random() < 0.2 else data


def change_members(data: bytes, random: Random) -> bool:
    """Cutting, replacing or inserting a member in bytes equals the same edit of the object. So does cutting usage."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        fields = None
    for asked in random.sample(CALLS, 2):
        visible = UsageSplice(asked).filter_data(data)
        if fields is not None and visible is not None:
            orjson.loads(visible)
    if not isinstance(fields, dict):
        return False
    name = random.choice(list(fields) or ["x"]) if random.random() < 0.7 else random.choice(CHUNK_NAMES)
    span = member_span(data, name)
    assert (span is None) is (name not in fields)
    if data.count(b'"%b"' % name.encode()) == 1 and b"\\" not in data:
        left = orjson.loads(cut_member(data, name))
        assert deep_equal(left, {other: fields[other] for other in fields if other != name})
    if span is not None:
        assert deep_equal(orjson.loads(replace_member(data, name, b"[1]")), {**fields, name: [1]})
    else:
        assert deep_equal(orjson.loads(insert_members(data, {name: b"[1]"})), {**fields, name: [1]})
    return True


BODY: Final = Target("body", make_body, read_body)
INTAKE: Final = Target("intake", make_body, receive_body)
MEMBERS: Final = Target("members", make_object, change_members)
