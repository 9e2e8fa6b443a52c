import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.api.answer.client_view import UsageSplice
from router.api.body.call import Head
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.completions import parse_completion
from router.core.model.prompt_key import PromptHasher

HEAD = Head("/v1/chat/completions")

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
NASTY = st.sampled_from(["", "usage", '"usage":{}}', ',"usage":', "}\n\ndata: {", "\u00fc", '"choices":[]', "\\"])
KEYS = st.sampled_from(["usage", "id", "metrics", ',"usage":', "\u00fc"])
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), NASTY, st.just(USAGE)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
MARKS = st.sampled_from([(",", ":"), (", ", ": ")])
CHUNKS = st.builds(
    lambda front, text, back: {**front, "choices": [{"index": 0, "delta": {"content": text}}], **back},
    st.dictionaries(KEYS, VALUES, max_size=3),
    NASTY,
    st.one_of(st.just({"usage": USAGE}), st.dictionaries(KEYS, VALUES, max_size=3)),
)


def splice(usage: bool = False, continuous: bool = False) -> UsageSplice:
    options = {"include_usage": usage, "continuous_usage_stats": continuous}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "stream_options": options}
    return UsageSplice(parse_chat(HEAD, orjson.dumps(body), PromptHasher(b"secret")))


def through(client: UsageSplice, event: bytes) -> bytes:
    """Return what the client receives of one event."""
    seen = client.filter_data(event[6:-2])
    return b"" if seen is None else b"data: %b\n\n" % seen


def event(chunk: dict[str, Any], marks: tuple[str, str] = (",", ":")) -> bytes:
    return b"data: " + json.dumps(chunk, separators=marks, ensure_ascii=False).encode() + b"\n\n"


def chunk_of(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data: "))


@given(CHUNKS, MARKS)
@example({"choices": [1], "metrics": {"id": 1, "usage": {"id": 1}}}, (",", ":"))
def test_splice_removes_the_member_and_nothing_else(chunk: dict[str, Any], marks: tuple[str, str]) -> None:
    """A chunk loses its top-level usage, unless that is null, and one run of bytes; all others are kept."""
    sent = event(chunk, marks)
    seen = through(splice(), sent)
    wanted = chunk if chunk.get("usage") is None else {name: chunk[name] for name in chunk if name != "usage"}
    assert chunk_of(seen) == wanted
    start = next((at for at, (old, new) in enumerate(zip(sent, seen, strict=False)) if old != new), len(seen))
    assert sent.endswith(seen[start:])


@given(CHUNKS, MARKS, st.booleans(), st.booleans(), st.sampled_from([b"%b\n\n", b"event: x\r\n%b\r\n\r\n", b"%b\r\r"]))
def test_form_of_the_event_does_not_matter(
    chunk: dict[str, Any], marks: tuple[str, str], usage: bool, continuous: bool, form: bytes
) -> None:
    """An event of several lines, or with other line ends, loses what a plain one would and keeps its form."""
    plain = event(chunk, marks)
    client = splice(usage, continuous)
    assert client.filter_event(form % plain[:-2]) == (form % seen[:-2] if (seen := through(client, plain)) else b"")


@pytest.mark.parametrize(
    ("usage", "continuous", "engine", "chunk_keeps", "final_stays"),
    [
        (False, False, "vllm", False, False),
        (True, False, "vllm", False, True),
        (False, True, "vllm", False, False),
        (False, True, "sglang", True, False),
        (True, True, "vllm", True, True),
    ],
)
def test_client_sees_the_usage_that_its_engine_would_send(
    usage: bool, continuous: bool, engine: str, chunk_keeps: bool, final_stays: bool
) -> None:
    """Each of the two switches of `stream_options` decides about its own usage; vLLM needs the first for the second."""
    client = splice(usage, continuous)
    marks = {"vllm": {"stop_reason": None}, "sglang": {"matched_stop": None}}[engine]
    chunk = event({"choices": [{"index": 0, "delta": {"content": "x"}, **marks}], "usage": USAGE})
    final = event({"choices": [], "usage": USAGE})
    assert ("usage" in chunk_of(through(client, chunk))) is chunk_keeps
    assert through(client, final) == (final if final_stays else b"")


@pytest.mark.parametrize("continuous", [False, True])
def test_sglangs_completion_looks_as_if_only_the_client_asked(continuous: bool) -> None:
    """`usage` is null if the client asked for none, and members with token ids are cut out."""
    options = {"include_usage": False, "continuous_usage_stats": continuous}
    body = {"model": "m", "prompt": "Hi", "stream": True, "stream_options": options}
    client = UsageSplice(parse_completion(HEAD, orjson.dumps(body), PromptHasher(b"secret"), ids=True))
    choice = {"index": 0, "text": ',"token_ids":[1]', "finish_reason": None, "matched_stop": None}
    sent = {"choices": [{**choice, "token_ids": [3, 4], "prompt_token_ids": [1]}], "usage": USAGE}
    wanted = {"choices": [choice], "usage": USAGE if continuous else None}
    assert chunk_of(through(client, event(sent))) == wanted
    assert through(client, event({"choices": [], "usage": USAGE})) == b""
    assert chunk_of(through(client, event({**sent, "usage": None}))) == {**wanted, "usage": None}
