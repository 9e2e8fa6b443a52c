import contextlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.body.call import COMPLETIONS, Call, Head
from router.api.body.edits import ALL_FIELDS, NO_FIELDS, AddedFields, Addition, fields_named_in
from router.api.endpoints.chat import PATH as CHAT
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.completions import parse_completion
from router.api.families import FAMILIES
from router.core.model.prompt_key import PromptHasher
from router.errors import BadRequest

HASHER = PromptHasher(b"secret")
HEAD = Head("/v1/chat/completions")
HELLO = {"role": "user", "content": "Hello"}
BOTH = {"include_usage": True, "continuous_usage_stats": True}


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [HELLO], **fields})


def completion(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "prompt": "Hello", **fields})


def sent(call: Call, accepted: AddedFields = ALL_FIELDS) -> bytes:
    """The body for a worker that accepts these of the router's added fields."""
    return call.additions.put(call.body, call.additions.wanted & accepted)


def test_endpoints_parse_their_own_path() -> None:
    """A call knows the path that it came to."""
    assert FAMILIES[CHAT].parse(Head(CHAT), chat(), HASHER).path == "/v1/chat/completions"
    assert FAMILIES[COMPLETIONS].parse(Head(COMPLETIONS), completion(), HASHER).path == "/v1/completions"


def test_facts_of_a_call() -> None:
    """Model, user, streaming and choices are what the client sent; null is the same as absent."""
    call = parse_chat(HEAD, chat(stream=False, user="alice", n=2, max_tokens=None), HASHER)
    assert (call.model, call.user, call.streamed, call.choices, call.output_limit) == ("m", "alice", False, 2, None)
    call = parse_chat(HEAD, chat(stream=None, user=None, n=None), HASHER)
    assert (call.user, call.streamed, call.choices) == (None, False, 1)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 9),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": 0}, 0),
    ],
)
def test_output_limit_of_chat(fields: dict[str, Any], limit: int | None) -> None:
    """The limit is for all choices together and, of two names, the larger."""
    assert parse_chat(HEAD, chat(**fields), HASHER).output_limit == limit


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 16),
        ({"max_tokens": None}, None),
        ({"max_tokens": 5, "n": 2, "prompt": ["a", "b", "c"]}, 30),
        ({"prompt": [[1], [2]]}, 32),
    ],
)
def test_output_limit_of_completions(fields: dict[str, Any], limit: int | None) -> None:
    """Completions have the engines' default of 16 for each choice of each prompt."""
    assert parse_completion(HEAD, completion(**fields), HASHER).output_limit == limit


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "text"}, (None,)),
        ({"prompt": ""}, (None,)),
        ({"prompt": ["a", "b"]}, (None, None)),
        ({"prompt": [1, 2, 3]}, (3,)),
        ({"prompt": [[1, 2], [3]]}, (2, 1)),
    ],
)
def test_each_prompt_has_a_key(fields: dict[str, Any], tokens: tuple[int | None, ...]) -> None:
    """There is one key for each prompt of the list, with the exact length where it came as token ids."""
    call = parse_completion(HEAD, completion(**fields), HASHER)
    assert tuple(prompt.key.tokens for prompt in call.prompts) == tokens
    assert call.extendable == (None in tokens)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(model=7), "model"),
        (chat(messages="hi"), "messages"),
        (chat(messages=[HELLO, "hi"]), "messages[1]"),
        (chat(stream="perhaps"), "stream"),
        (chat(stream=2), "stream"),
        (chat(stream=[]), "stream"),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_tokens=1.5), "max_tokens"),
        (chat(max_tokens=True), "max_tokens"),
        (chat(max_completion_tokens="5.5"), "max_completion_tokens"),
        (chat(max_completion_tokens="five"), "max_completion_tokens"),
        (chat(n=0), "n"),
        (chat(n="0"), "n"),
        (chat(user=7), "user"),
        (chat(stream_options=[]), "stream_options"),
        (chat(stream=True, stream_options={"include_usage": 2}), "stream_options.include_usage"),
    ],
)
def test_the_error_of_an_invalid_chat_names_the_member(body: bytes, param: str) -> None:
    """An invalid member that the router needs is a 400 with the name of the member."""
    with pytest.raises(BadRequest) as caught:
        parse_chat(HEAD, body, HASHER)
    assert caught.value.param == param
    assert caught.value.code in {"missing_required_parameter", "invalid_type", "invalid_value"}


@pytest.mark.parametrize(
    ("fields", "limit", "streamed", "choices"),
    [
        ({"max_tokens": "5", "stream": 1}, 5, True, 1),
        ({"max_tokens": 5.0, "stream": "true"}, 5, True, 1),
        ({"max_tokens": " +5 ", "stream": "Off"}, 5, False, 1),
        ({"max_tokens": "5.0", "stream": 0.0, "n": "2"}, 10, False, 2),
    ],
)
def test_values_are_read_as_engines_read_them(fields: dict[str, Any], limit: int, streamed: bool, choices: int) -> None:
    """Numbers as texts, whole floats and words for booleans mean in the router what they mean in an engine."""
    call = parse_chat(HEAD, chat(**fields), HASHER)
    assert (call.output_limit, call.streamed, call.choices) == (limit, streamed, choices)


@pytest.mark.parametrize("body", [chat(messages=[]), chat(messages=None), chat(model=None), chat(model="")])
def test_what_is_missing_is_the_engines_to_refuse(body: bytes) -> None:
    """A call without messages, or without a model, is a call; any model may serve it if it names none."""
    assert parse_chat(HEAD, body, HASHER).model in ("", "m")


@pytest.mark.parametrize("prompt", [None, []])
def test_a_missing_prompt_is_the_engines_to_refuse(prompt: object) -> None:
    """It may come as embeddings, and counts as uncached."""
    (one,) = parse_completion(HEAD, completion(prompt=prompt), HASHER).prompts
    assert not one.key.hashes


@pytest.mark.parametrize(
    "prompt", [{}, 7, ["a", 1], [1, "a"], [[1], "a"], [1, -1], [2**32], [1.5], [[1], [None]], [{}], [[[1]]]]
)
def test_an_invalid_prompt_is_rejected(prompt: object) -> None:
    """A prompt is a text, token ids, or a list of only one of them."""
    with pytest.raises(BadRequest) as caught:
        parse_completion(HEAD, completion(prompt=prompt), HASHER)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"model": NaN}',
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"model":"\\ud800","messages":[{}]}',
        b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        chat(messages=[{"role": "user", "content": orjson.Fragment(b"[" * 900 + b"]" * 900)}]),
        chat(tools=orjson.Fragment(b"[" * 900 + b"]" * 900)),
        chat(stream=True, stream_options={"x": orjson.Fragment(b"[" * 900 + b"]" * 900)}),
    ],
)
def test_hostile_json_is_a_bad_request(body: bytes) -> None:
    """Broken, deep or unpaired JSON is the client's fault and nothing else."""
    with pytest.raises(BadRequest):
        parse_chat(HEAD, body, HASHER)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.text(max_size=5), st.sampled_from(["role", "content", "type", "text", "tool_calls", "function"])
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=10,
)
MEMBERS = ["messages", "prompt", "tools", "stream_options", "n", "user", "stream", "max_tokens", "cache_salt", "suffix"]


@given(st.sampled_from([parse_chat, parse_completion]), st.dictionaries(st.sampled_from(MEMBERS), JSON), st.binary())
def test_any_body_is_parsed_or_a_bad_request(parse: Any, fields: dict[str, Any], junk: bytes) -> None:
    """Parsing raises no other error than BadRequest."""
    for body in (json.dumps({"model": "m", "messages": [fields], "prompt": "x", **fields}).encode(), junk):
        with contextlib.suppress(BadRequest):
            assert parse(HEAD, body, HASHER).prompts


@given(st.dictionaries(st.text(max_size=5), st.integers()), st.sampled_from([None, {}, {"include_usage": True}]))
def test_body_of_a_call_that_does_not_stream_is_the_clients(extra: dict[str, int], options: object) -> None:
    """Without streaming not a byte of the body is changed."""
    fields = {
        **{f"x-{name}": value for name, value in extra.items()},
        "model": "m",
        "messages": [HELLO],
        "stream_options": options,
        "stream": None,
    }
    body = json.dumps(fields).encode()
    assert parse_chat(HEAD, body, HASHER).body == body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("absent", (False, False)),
        (None, (False, False)),
        ({}, (False, False)),
        ({"include_usage": False}, (False, False)),
        ({"include_usage": True}, (True, False)),
        ({"continuous_usage_stats": True, "other": 7}, (False, True)),
        (BOTH, (True, True)),
    ],
)
def test_streamed_call_asks_for_usage(path: str, options: Any, wanted: tuple[bool, bool]) -> None:
    """The engine gets both options set and all else unchanged; what the client asked for is recorded."""
    fields = {"model": "m", "messages": [HELLO], "prompt": "x", "stream": True, "seed": 1}
    if options != "absent":
        fields["stream_options"] = options
    call = FAMILIES[path].parse(Head(path), orjson.dumps(fields), HASHER)
    assert (call.usage_wanted, call.continuous_wanted) == wanted
    kept = options if isinstance(options, dict) else {}
    assert orjson.loads(sent(call)) == {**fields, "stream_options": {**kept, **BOTH}}


def test_bytes_around_the_usage_request_stay() -> None:
    """Numbers beyond 64 bits, odd white space and escapes reach the engine as the client wrote them."""
    start = b' {"model" : "m", "seed": 123456789012345678901234567890, "t": 1.10e0,\n "stream": true, '
    end = b'"messages": [{"role": "user", "content": "\\u0041 \\"stream_options\\": 1"}]}\n'
    asked = b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}'
    assert sent(parse_chat(HEAD, start + end, HASHER)) == start.replace(b"{", b"{" + asked + b",", 1) + end
    for given_ in (b'"stream_options" : null, ', b'"\\u0073tream_options": {"include_usage": true}, '):
        assert sent(parse_chat(HEAD, start + given_ + end, HASHER)) == start + asked + b", " + end


def test_body_that_asks_for_all_usage_is_unchanged() -> None:
    """A client that asked for both kinds gets its own bytes forwarded."""
    body = chat(stream=True, stream_options=BOTH)
    assert sent(parse_chat(HEAD, body, HASHER)) is body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("own", [{}, {"stream_options": None}, {"stream_options": {"other": 7}}])
@given(accepted=st.frozensets(st.sampled_from(Addition)))
def test_a_worker_is_sent_the_fields_that_it_accepts(path: str, own: dict[str, Any], accepted: AddedFields) -> None:
    """Each accepted field is set, no other one is there, and what the client wrote stays."""
    fields = {"model": "m", "messages": [HELLO], "prompt": "x", "stream": True, **own}
    body = orjson.loads(sent(FAMILIES[path].parse(Head(path), orjson.dumps(fields), HASHER, ids=True), accepted))
    options = body.pop("stream_options", None) or {}
    added = {f"stream_options.{name}": value for name, value in options.items() if name != "other"}
    added |= {"return_token_ids": body.pop("return_token_ids")} if "return_token_ids" in body else {}
    assert added == {field.value: True for field in accepted}
    assert options.get("other") == (own.get("stream_options") or {}).get("other")
    assert {**body, **own} == {**fields, **own}


@pytest.mark.parametrize(
    ("refusal", "named"),
    [
        (b"return_token_ids is not supported with streaming on /v1/chat/completions.", {Addition.TOKEN_IDS}),
        (b'{"error":{"param":"stream_options.continuous_usage_stats"}}', {Addition.CHUNK_USAGE}),
        (b"Unrecognized request argument supplied: stream_options", {Addition.USAGE, Addition.CHUNK_USAGE}),
        (b"temperature must be at most 2", set()),
    ],
)
def test_a_refusal_names_the_fields_that_were_added(refusal: bytes, named: set[Addition]) -> None:
    """A field is named by its own name or by its object's, and only if it was added."""
    assert fields_named_in(refusal, ALL_FIELDS) == named
    assert fields_named_in(refusal, NO_FIELDS) == NO_FIELDS


@pytest.mark.parametrize("fields", [{"echo": True}, {"continue_final_message": True}])
def test_answer_that_is_no_new_message_does_not_extend_the_key(fields: dict[str, Any]) -> None:
    """An answer that repeats or continues the last message is not what the next prompt will hold."""
    assert parse_chat(HEAD, chat(), HASHER).extendable
    assert not parse_chat(HEAD, chat(**fields), HASHER).extendable


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "end"}, {"prompt": [1, 2]}])
def test_text_that_does_not_follow_its_prompt_does_not_extend_the_key(fields: dict[str, Any]) -> None:
    """A completion continues its prompt's key only where prompt and answer stand together as text."""
    assert parse_completion(HEAD, completion(), HASHER).extendable
    assert not parse_completion(HEAD, completion(**fields), HASHER).extendable
