import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answer.stream_reader import EngineError, StreamReader, read_json
from router.api.body.call import Call, Head
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.completions import parse_completion
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import Usage
from router.errors import WorkerBroke

HASHER = PromptHasher(b"secret")
HEAD = Head("/v1/chat/completions")
DONE = b"data: [DONE]\n\n"
FINAL = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def chat(usage: bool = False, continuous: bool = False, **fields: Any) -> Call:
    options = {"include_usage": usage, "continuous_usage_stats": continuous}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "stream_options": options}
    return parse_chat(HEAD, orjson.dumps({**body, **fields}), HASHER)


def completion(**fields: Any) -> Call:
    return parse_completion(HEAD, orjson.dumps({"model": "m", "stream": True, **fields}), HASHER)


def event(*choices: dict[str, Any], usage: dict[str, Any] | None = None, **more: Any) -> bytes:
    chunk: dict[str, Any] = {"id": "chatcmpl-1", "choices": list(choices), **more}
    if usage:
        chunk["usage"] = usage
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def text_choice(text: str, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}


def counted(tokens: int, prompt: int = 9) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


def read(call: Call, *blocks: bytes) -> StreamReader:
    reader = StreamReader(call)
    for block in blocks:
        reader.feed(block)
    reader.close()
    return reader


def through(call: Call, stream: bytes, places: list[int] | None = None) -> bytes:
    """Return what the client gets of a stream whose blocks end at these places."""
    reader = StreamReader(call)
    edges = [0, *sorted(place % (len(stream) + 1) for place in places or []), len(stream)]
    return b"".join([reader.feed(stream[start:end]) for start, end in pairwise(edges)]) + reader.close()


NASTY = st.one_of(
    st.text(max_size=6), st.sampled_from(['"usage":{', ',"usage":null}', "data: [DONE]", "\n\n", "\r\n", "\\", "}\n"])
)
OTHERS = st.sampled_from(
    [b": keep-alive\n\n", b'event: x\r\ndata: {"y":1}\r\n\r\n', b"data: {}\n\n", b"retry: 9\n\n", b"\n"]
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """A stream as the engine sends it, the same without usage in chunks, and its final usage chunk."""
    sent, plain = [], []
    for tokens, text in enumerate(draw(st.lists(NASTY, max_size=6)), 1):
        other = draw(st.one_of(st.just(b""), OTHERS))
        sent += [other, event(text_choice(text), usage=counted(tokens))]
        plain += [other, event(text_choice(text))]
    return b"".join(sent), b"".join(plain), event(usage=FINAL)


@given(streams(), st.lists(st.integers(min_value=0, max_value=5000), max_size=8), st.booleans(), st.booleans())
def test_client_sees_the_usage_that_it_asked_for(
    stream: tuple[bytes, bytes, bytes], places: list[int], usage: bool, continuous: bool
) -> None:
    """Chunks and final chunk carry usage as vLLM itself would send it, however the bytes are cut; all else is exact."""
    sent, plain, final = stream
    expected = (sent if usage and continuous else plain) + (final if usage else b"") + DONE
    assert through(chat(usage, continuous), sent + final + DONE, places) == expected


@given(streams(), st.lists(st.integers(min_value=0, max_value=5000), max_size=8))
def test_counts_do_not_depend_on_the_cuts(stream: tuple[bytes, bytes, bytes], places: list[int]) -> None:
    """Tokens, usage and keys are the same for every way to cut the stream, spliced or not."""
    sent, _, final = stream
    facts = set()
    for call in (chat(), chat(usage=True, continuous=True)):
        for cuts in ([], places):
            reader = StreamReader(call)
            edges = [0, *sorted(place % (len(sent) + 1) for place in cuts), len(sent)]
            for start, end in pairwise(edges):
                reader.feed(sent[start:end])
            before = reader.output_tokens(), reader.usage, reader.started
            reader.feed(final + DONE)
            facts.add((before, reader.output_tokens(), reader.usage, reader.finished, reader.ending().answer_keys))
    assert len(facts) == 1


def test_only_whole_events_go_through() -> None:
    """An incomplete event is held back, so that an error sent after a worker's failure is an event of its own."""
    reader = StreamReader(chat(usage=True, continuous=True))
    passed = [reader.feed(block) for block in (b"data: {", b'"choices":[]}\n', b"\n", b"data: [D", b"ONE]\n\n")]
    assert passed == [b"", b"", b'data: {"choices":[]}\n\n', b"", b"data: [DONE]\n\n"]
    assert (reader.close(), reader.finished) == (b"", True)


def test_vllm_stream_as_it_is_on_the_wire() -> None:
    """A role chunk has its usage in the middle, others at the end; without it they are vLLM's plain chunks."""
    role = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]%b'
    text = (
        b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null,"token_ids":null}]%b}\n\n'
    )
    role += b',"prompt_token_ids":null,"prompt_text":null}\n\n'
    usage = b',"usage":{"prompt_tokens":9,"total_tokens":%d,"completion_tokens":%d,"completion_tokens_details":null}'
    final = event(usage=FINAL, system_fingerprint="vllm-0.32.0")
    sent = role % (usage % (9, 0)) + text % (usage % (10, 1))
    assert through(chat(), sent + final + DONE) == role % b"" + text % b"" + DONE
    assert read(chat(), sent).usage == Usage(9, 1)


def test_usage_of_null_is_the_engines_own() -> None:
    """A `usage` of null, which SGLang sends unasked, goes through byte for byte."""
    stream = b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\n'
    assert through(completion(prompt="x"), stream) == stream


def test_an_incomplete_event_is_held_until_the_end() -> None:
    """An incomplete event is held back, and passed on when the stream ends."""
    reader = StreamReader(chat())
    whole, part = event(text_choice("a")), event(text_choice("b"), usage=counted(2))[:-2]
    assert reader.feed(whole + part) == whole
    assert reader.close() == event(text_choice("b"))[:-2]
    assert reader.output_tokens() == 2


def test_multi_line_events_are_spliced_too() -> None:
    """JSON spread over data lines loses its usage as well, and keeps its other lines."""
    stream = b'id: 1\r\ndata: {"choices":[{"index":0}],\r\ndata: "usage":{"prompt_tokens":1}}\r\n\r\n'
    assert through(chat(), stream) == b'id: 1\r\ndata: {"choices":[{"index":0}]}\r\n\r\n'


def test_started_with_the_first_choice() -> None:
    """Keep-alives, errors and the final usage are not a first token; the role chunk is sent with it."""
    reader = StreamReader(chat())
    reader.feed(b": keep-alive\n\n" + event(usage=counted(0)))
    assert not reader.started
    reader.feed(event({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}))
    assert reader.started


def test_tokens_are_summed_over_choices() -> None:
    """Usage in chunks is per choice: the latest of each counts, and the prompt counts once."""
    reader = read(
        chat(n=2),
        event(text_choice("a", 0), usage=counted(1)),
        event(text_choice("b", 1), usage=counted(1)),
        event(text_choice("cde", 0), usage=counted(4)),
    )
    assert reader.usage == Usage(9, 5)
    assert reader.output_tokens() == 5


def test_prompts_are_summed_over_a_list() -> None:
    """With a list of prompts each index belongs to one of them, and each prompt counts once."""
    call = completion(prompt=["a", "b"], n=2)
    chunks = [
        event({"index": index, "text": "x", "finish_reason": None}, usage=counted(2, prompt=10 + index // 2))
        for index in (0, 1, 2, 3)
    ]
    assert read(call, *chunks).usage == Usage(10 + 11, 8)


def test_final_usage_overrides_the_chunks() -> None:
    """The engine's sum at the end replaces the counts of the chunks."""
    reader = read(chat(), event(text_choice("a"), usage=counted(1)), event(usage=FINAL), DONE)
    assert reader.usage == Usage(9, 3, 4)
    assert reader.output_tokens() == 3


def test_sglang_reports_cached_tokens_early() -> None:
    """Cached tokens in a chunk's usage are known before the end; the chunks without usage change nothing."""
    early = {**counted(1), "prompt_tokens_details": {"cached_tokens": 8}}
    role = {"index": 0, "delta": {"reasoning_content": None, "role": "assistant", "content": ""}, "finish_reason": None}
    finish = {"index": 0, "delta": {"reasoning_content": None}, "finish_reason": "stop", "matched_stop": None}
    reader = read(chat(), event(role), event(text_choice("a"), usage=early), event(finish))
    assert reader.usage == Usage(9, 1, 8)
    assert reader.finished


def test_engine_without_usage_in_chunks_counts_by_chunk() -> None:
    """Each chunk with output is taken for a token until the final usage corrects it."""
    call = chat()
    tool = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}
    reasoning = {"index": 0, "delta": {"reasoning": "Hm"}}
    chunks = [
        event(text_choice("")),
        event(text_choice("a")),
        event(tool),
        event(reasoning),
        event(text_choice("", finish="stop")),
    ]
    reader = read(call, *chunks)
    assert (reader.output_tokens(), reader.usage) == (3, None)
    assert read(call, *chunks, event(usage=counted(7))).output_tokens() == 7


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"error":{"message":"No","type":"x","param":null,"code":503}}', EngineError("No", 503)),
        (b'{"error":{"object":"error","message":"No","code":"oops"}}', EngineError("No", "oops")),
        (b'{"object":"error","message":"No","type":"BadRequestError","code":400}', EngineError("No", 400)),
        (b'{"error":"Unauthorized"}', EngineError("Unauthorized")),
        (b'{"error":{"code":[]}}', EngineError("")),
        (b'{"error":null,"choices":[]}', None),
    ],
)
def test_errors_inside_an_answer(data: bytes, error: EngineError | None) -> None:
    """Both engines' error shapes are found in a stream and in an answer; from one on, a stream is held back."""
    stream = b"data: " + data + b"\n\n" + DONE
    reader = StreamReader(chat())
    assert (reader.feed(stream), reader.held) == ((b"", stream) if error else (stream, b""))
    assert (reader.error, reader.started, reader.finished) == (error, False, True)
    if error:
        assert read_json(chat(), data).error == error


def test_finished_when_every_choice_is() -> None:
    """A stream is complete when all its choices have a finish reason, or with [DONE]."""
    one, other = event(text_choice("a", 0, "stop")), event(text_choice("b", 1, "length"))
    assert not read(chat(n=2), one).finished
    assert read(chat(n=2), one, other).finished
    assert not read(chat(n=2), one, other).aborted
    assert read(chat(), DONE).finished


@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_a_finish_reason_beside_text_and_usage(reason: str) -> None:
    """The finish reason is read from the last token's chunk, whatever else is in its block."""
    chunks = [event(text_choice("a"), usage=counted(1)), event(text_choice("b", finish=reason), usage=counted(2))]
    for blocks in ([b"".join(chunks)], chunks, [*chunks, event(text_choice("", 0), usage=counted(2))]):
        reader = read(chat(), *blocks)
        assert (reader.finished, reader.aborted, reader.usage) == (True, reason == "abort", Usage(9, 2))


def test_abort_is_no_success() -> None:
    """A choice that the engine aborted is not one that finished."""
    assert read(chat(), event(text_choice("a", finish="abort"))).aborted
    assert read_json(chat(), b'{"choices":[{"index":0,"finish_reason":"abort"}]}').aborted


def test_endless_event_is_the_workers_fault() -> None:
    """An event beyond the limit ends the call, also where blocks go straight through."""
    for call in (chat(), chat(usage=True, continuous=True)):
        reader = StreamReader(call, event_limit=1000)
        for _ in range(10):
            reader.feed(b"x" * 100)
        with pytest.raises(WorkerBroke):
            reader.feed(b"x")


KEYS = st.sampled_from(["usage", "choices", "id", "\u00fc", ',"usage":'])
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), NASTY),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
CHUNKS = st.dictionaries(
    st.sampled_from(["choices", "usage", "error", "object", "id"]),
    st.one_of(VALUES, st.lists(st.dictionaries(st.sampled_from(["index", "delta", "message", "text"]), VALUES))),
)


@given(CHUNKS, st.booleans())
def test_no_chunk_can_break_the_reader(chunk: dict[str, Any], streamed: bool) -> None:
    """Any JSON from a worker is read as an answer or as a part of one, or raises WorkerBroke."""
    data = json.dumps(chunk).encode()
    for call in (chat(), completion(prompt="x")):
        if streamed:
            reader = read(call, b"data: " + data + b"\n\n")
            assert reader.output_tokens() >= 0
            assert len(reader.ending().answer_keys) <= 1
        else:
            with suppress(WorkerBroke):
                assert len(read_json(call, data).answer_keys) <= 1


def test_an_answer_that_is_not_streamed_has_usage_and_keys() -> None:
    """An answer that is not streamed gives its usage and a key for each choice."""
    choices = [{"index": index, "message": {"role": "assistant", "content": "a" * 300}} for index in (0, 1)]
    answer = read_json(chat(n=2), orjson.dumps({"choices": choices, "usage": FINAL}))
    assert answer.usage == Usage(9, 3, 4)
    assert len(answer.answer_keys) == 2
    assert (answer.error, answer.aborted) == (None, False)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices":', b"<html>", b"{}", b'{"choices":7}', b'{"choices":[7]}'])
def test_nonsense_is_the_workers_fault(body: bytes) -> None:
    """An answer with status 200 that is no JSON object, or has no choices and no error, is no answer."""
    with pytest.raises(WorkerBroke):
        read_json(chat(), body)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "nonsense",
    [
        *(b"data: {broken\n\n", b"data: 7\n\n", b"event: x\r\ndata: y\r\n\r\n", b"<html>\n\n", b"\xff\n\n"),
        *(b'data: {"choices":7}\n\n', b'data: {"choices":[{"index":"x"}]}\n\n', b"HTTP/1.1 500 X\ndata: {}\n\n"),
    ],
)
def test_bytes_that_are_not_an_event_of_an_answer_end_it(nonsense: bytes, cut: bool) -> None:
    """The client gets everything before such bytes and nothing after them, whatever the blocks."""
    before, after = event(text_choice("a"), usage=counted(1)), event(text_choice("b"), usage=counted(2)) + DONE
    reader = StreamReader(chat())
    stream = before + nonsense + after
    blocks = [stream[at : at + 1] for at in range(len(stream))] if cut else [stream]
    assert b"".join(map(reader.feed, blocks)) + reader.close() == event(text_choice("a"))
    assert (reader.broken, reader.output_tokens(), reader.finished) == (True, 1, False)
    reader.resume()
    assert reader.feed(event(text_choice("b"))) == event(text_choice("b"))


@pytest.mark.parametrize("delta", [b'{"content":"\xff"}', b'{"content":"x"}'], ids=["no text", "no usage"])
def test_invalid_json_in_the_common_form_is_passed_on(delta: bytes) -> None:
    """Text or usage that cannot be parsed is ignored."""
    usage = b"{nothing}" if delta.endswith(b'"x"}') else b'{"prompt_tokens":9,"completion_tokens":1}'
    chunk = b'data: {"id":"c","choices":[{"index":0,"delta":%b,"finish_reason":null}]' % delta
    reader = StreamReader(chat())
    assert reader.feed(chunk + b',"usage":%b}\n\n' % usage) == chunk + b"}\n\n"
    assert reader.output_tokens() == (0 if usage == b"{nothing}" else 1)
    assert len(reader.ending().answer_keys) == 1


def test_all_bytes_after_a_failure_are_held_back() -> None:
    """Comments after the failure are held back, too, so a client whose stream is not continued gets every byte."""
    reader = StreamReader(chat())
    blocks = [event(text_choice("a")), event(error={"message": "no"}), b": comment\n\n", DONE]
    shown = b"".join([reader.feed(block) for block in blocks])
    assert shown + reader.held == b"".join(blocks)


@pytest.mark.parametrize("tokens", [-5, 2**63, True, "7", 1.5])
def test_an_invalid_token_count_is_ignored(tokens: object) -> None:
    """Instead, each chunk with output counts as one token; a negative count is no credit."""
    reader = StreamReader(chat())
    reader.feed(event(text_choice("a"), usage={"prompt_tokens": 9, "completion_tokens": tokens}))
    reader.feed(event(usage={"prompt_tokens": tokens, "completion_tokens": tokens}))
    assert (reader.output_tokens(), reader.usage) == (1, None)


def test_ids_that_the_router_did_not_ask_for_are_unchanged() -> None:
    """Ids that the engine sends without being asked are passed on, however the stream is cut."""
    choice = {**text_choice("a"), "token_ids": [5]}
    for block in (event(choice), event(choice, usage=FINAL)):
        whole, cut = StreamReader(chat()), StreamReader(chat())
        shown = whole.feed(block)
        assert b'"token_ids":[5]' in shown
        assert cut.feed(block[:9]) + cut.feed(block[9:]) == shown


MARK = {"system_fingerprint": "vllm-1"}


def shown(call: Call, *blocks: bytes) -> list[dict[str, Any] | None]:
    """The events that a client gets; None for [DONE]."""
    reader = StreamReader(call)
    sent = b"".join([*map(reader.feed, blocks), reader.close()])
    data = [event.removeprefix(b"data: ") for event in sent.removesuffix(b"\n\n").split(b"\n\n")]
    return [None if each == b"[DONE]" else orjson.loads(each) for each in data]


def test_a_fingerprint_beside_usage_that_only_the_router_asked_for_goes_to_the_last_chunk_of_each_choice() -> None:
    """The client gets it where the engine puts it for a call without usage, on either way of reading."""
    call = parse_chat(HEAD, b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"stream":true,"n":2}', HASHER)
    ends = [event(text_choice("b", index, "stop"), usage=counted(2)) for index in (0, 1)]
    sent = [event(text_choice("a"), usage=counted(1)), *ends, event(usage=FINAL, **MARK), DONE]
    marks = [each and each.get("system_fingerprint") for each in shown(call, *sent)]
    assert marks == [None, "vllm-1", "vllm-1", None]
    one = parse_chat(HEAD, b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"stream":true}', HASHER)
    one_end = event({"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}, usage=counted(2))
    marks = [each and each.get("system_fingerprint") for each in shown(one, one_end, event(usage=FINAL, **MARK), DONE)]
    assert marks == ["vllm-1", None]


@pytest.mark.parametrize(("known", "mark"), [("vllm-1", MARK), ("", {})])
def test_a_choice_that_ends_early_does_not_wait_for_a_known_fingerprint(known: str, mark: dict[str, Any]) -> None:
    """Its last chunk goes on at once with what an earlier answer has shown; the last choice's waits for the usage."""
    call = parse_chat(HEAD, b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"stream":true,"n":2}', HASHER)
    reader = StreamReader(call)
    reader.last_chunks.fingerprint = known
    passed = reader.feed(event(text_choice("a", 0, "stop"), usage=counted(1)))
    assert orjson.loads(passed.removeprefix(b"data: ")) == orjson.loads(
        event(text_choice("a", 0, "stop"), **mark).removeprefix(b"data: ")
    )
    assert reader.feed(event(text_choice("b", 1, "stop"), usage=counted(2))) == b""
    assert b'"stop"' in reader.feed(event(usage=FINAL, system_fingerprint="vllm-2"))
    assert reader.last_chunks.fingerprint == "vllm-2"


def test_the_fingerprint_replaces_a_null() -> None:
    """A completion's chunks may have the member already, without a value."""
    call = completion(prompt="Hi")
    end = event({"index": 0, "text": "b", "finish_reason": "stop"}, usage=counted(2), system_fingerprint=None)
    assert shown(call, end, event(usage=FINAL, **MARK), DONE)[0] == {
        "id": "chatcmpl-1",
        "choices": [{"index": 0, "text": "b", "finish_reason": "stop"}],
        **MARK,
    }


@pytest.mark.parametrize("rest", [(), (DONE,), (event(usage=FINAL), DONE), (event(**{"error": {"message": "x"}}),)])
def test_a_last_chunk_reaches_the_client_whatever_follows(rest: tuple[bytes, ...]) -> None:
    """It waits for the usage, and goes on without it when the stream ends, fails or has none."""
    first, *_ = shown(chat(), event(text_choice("b", 0, "stop"), usage=counted(2)), *rest)
    assert first is not None
    assert first["choices"][0]["finish_reason"] == "stop"


def test_a_client_that_asks_for_usage_gets_each_chunk_at_once() -> None:
    """Nothing waits where the engine's own place of the fingerprint is the client's."""
    reader = StreamReader(chat(usage=True))
    assert b"stop" in reader.feed(event(text_choice("b", 0, "stop"), usage=counted(2)))
