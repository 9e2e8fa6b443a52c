import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from router.api.answer.answer_record import TokenRecord
from router.api.answer.fast_path import ChunkRun, CommonChunks
from router.api.answer.sse import plain_data
from router.api.answer.stream_reader import StreamReader
from router.api.body.call import Head
from router.api.endpoints.chat import parse_chat
from router.core.model.prompt_key import PromptHasher

HEAD = Head("/v1/chat/completions")

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "completion_tokens_details": None}
NULLS = st.dictionaries(st.sampled_from(["reasoning_content", "stop_reason", "token_ids", "matched_stop"]), st.none())
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='"'))
MARKS = st.sampled_from([(",", ":"), (", ", ": ")])


def dump(chunk: Any, marks: tuple[str, str] = (",", ":")) -> bytes:
    return json.dumps(chunk, separators=marks, ensure_ascii=False).encode()


def parse_common_chunk(data: bytes) -> tuple[bytes, str, Any, bytes | None] | None:
    """A chunk's JSON without its usage, its text, its usage and its finish reason; None if it is not common."""
    (part,) = CommonChunks().split_runs([data])
    if not isinstance(part, ChunkRun):
        return None
    usage = json.loads(part.usage) if part.usage else None
    return part.client_bytes[6:-2], json.loads(b'"%b"' % part.text), usage, part.finish_reason


def joined(parts: Sequence[ChunkRun | bytes]) -> tuple[bytes, bytes, bytes, set[bytes | None], list[int] | None]:
    """The bytes for the client, with other chunks unchanged; the text; the last usage; the finish reasons; the ids.

    The chunks that no usage counts are appended to the usage.
    """
    runs = [part for part in parts if isinstance(part, ChunkRun)]
    seen = [part.client_bytes if isinstance(part, ChunkRun) else b"data: %b\n\n" % part for part in parts]
    reasons = {run.finish_reason for run in runs}
    text = b"".join([run.text for run in runs])
    usage = b"%b%d" % (runs[-1].usage if runs else b"", sum([run.uncounted for run in runs]))
    return b"".join(seen), text, usage, reasons, ids_of(runs)


def ids_of(runs: Sequence[ChunkRun]) -> list[int] | None:
    """The token ids of the answer that a record of these runs has."""
    record = TokenRecord()
    record.set_prompt([0])
    for run in runs:
        record.add(run.ids, run.pending_ids)
    return None if record.ids is None else record.ids[1]


@given(TEXTS, NULLS, NULLS, st.sampled_from([None, "stop"]), st.sampled_from([USAGE, None]), MARKS)
def test_the_chunks_of_both_engines_are_common(
    text: str,
    before: dict[str, None],
    after: dict[str, None],
    finish: str | None,
    usage: dict[str, Any] | None,
    marks: tuple[str, str],
) -> None:
    """Text with nothing but nulls and a finish reason around it is taken apart, with usage or without."""
    choice = {"index": 0, "delta": {**before, "content": text}, "logprobs": None, "finish_reason": finish, **after}
    chunk = {"id": "chatcmpl-1", "created": 1, "choices": [choice]}
    parts = parse_common_chunk(dump(chunk if usage is None else {**chunk, "usage": usage}, marks))
    assert parts == (dump(chunk, marks), text, usage, None if finish is None else finish.encode())


CHOICES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"index": st.integers(0, 1), "delta": st.one_of(st.none(), st.dictionaries(st.just("content"), TEXTS))},
    optional={"finish_reason": st.sampled_from([None, "length"]), "choices": st.just([])},
)
CHUNKS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES, max_size=2)},
    optional={"usage": st.sampled_from([None, {}, USAGE, {"a": {"b": {}}}]), "error": st.just({"message": "x"})},
)


@given(st.recursive(CHUNKS, lambda inner: st.dictionaries(st.sampled_from(["meta", "id", "usage"]), inner)), MARKS)
@example({"meta": {"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": {}}}, (",", ":"))
def test_no_other_chunk_is_taken_for_a_common_one(chunk: dict[str, Any], marks: tuple[str, str]) -> None:
    """The parts of a common chunk are always those that a JSON parser finds."""
    parts = parse_common_chunk(dump(chunk, marks))
    if parts is not None:
        without = {name: value for name, value in chunk.items() if name != "usage"}
        choice: dict[str, Any] = {"index": 0, "delta": {"content": parts[1]}}
        if parts[3] is not None:
            choice["finish_reason"] = parts[3].decode()
        assert (json.loads(parts[0]), parts[2]) == (without, chunk.get("usage"))
        assert [{name: value for name, value in c.items() if value is not None} for c in chunk["choices"]] == [choice]


@given(st.sampled_from(['"', 'a"b', '\\"}}],"usage":{', '"},"finish_reason":null}],"usage":{}}']))
def test_text_with_quotes_is_left_to_the_parser(text: str) -> None:
    """The first quote is not the end of such a text."""
    assert parse_common_chunk(dump({"choices": [{"index": 0, "delta": {"content": text}}], "usage": USAGE})) is None


@given(st.lists(st.tuples(TEXTS, st.lists(st.integers(0, 200_000), max_size=3)), min_size=1), MARKS)
def test_ids_are_recorded_and_hidden_from_the_client(
    pieces: list[tuple[str, list[int]]], marks: tuple[str, str]
) -> None:
    """The client sees null, as if ids were not asked for. The record has the ids up to the last text."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids}]} for text, ids in pieces]
    parts = list(CommonChunks().split_runs([dump({**chunk, "usage": USAGE}, marks) for chunk in chunks]))
    shown = [{"choices": [{"index": 0, "delta": {"content": text}, "token_ids": None}]} for text, _ in pieces]
    last = max((index for index, (text, _) in enumerate(pieces) if text), default=-1)
    seen, _, _, _, ids = joined(parts)
    assert seen == b"".join([b"data: %b\n\n" % dump(chunk, marks) for chunk in shown])
    assert ids == [each for _, ids_ in pieces[: last + 1] for each in ids_]


ENGINES = st.builds(
    lambda text, finish, usage, ids: {
        "choices": [{"index": 0, "delta": {"content": text}, **finish, **ids}],
        **({} if usage == "none" else {"usage": usage}),
    },
    st.one_of(TEXTS, st.sampled_from(["", "", "}", '"}],"usage":{', "\\"])),
    st.sampled_from([{}, {}, {"finish_reason": None}, {"finish_reason": "stop"}]),
    st.sampled_from([USAGE, USAGE, {"details": {"cached_tokens": 3}}, {"a": {"a": {}}}, {"}": "}}"}, None, "none"]),
    st.sampled_from([{}, {"token_ids": None}, {"token_ids": [5]}, {"token_ids": [6, 7]}, {"token_ids": []}]),
)


@given(st.lists(st.one_of(ENGINES, ENGINES, CHUNKS), max_size=8), MARKS, st.integers(0, 8))
def test_consecutive_chunks_are_split_like_single_ones(
    chunks: list[dict[str, Any]], marks: tuple[str, str], cut: int
) -> None:
    """Earlier chunks, in the same block or before, change neither the parts of a chunk nor the order."""
    sent = [dump(chunk, marks) for chunk in chunks]
    alone = [part for each in sent for part in CommonChunks().split_runs([each])]
    stream = CommonChunks()
    together = [*stream.split_runs(sent[:cut]), *stream.split_runs(sent[cut:])]
    assert joined(together) == joined(alone)


ENDS = st.sampled_from([b"\n\n", b"\n\n", b"\n\n", b"\n", b"\r\n\r\n", b"\n\ndata: 1\n\n", b"\n\n\n", b"}\n\n", b""])


@given(ENGINES, st.one_of(ENGINES, CHUNKS), MARKS, ENDS, st.sampled_from([b"", b"\n", b"\r", b" "]))
def test_a_block_of_one_chunk_is_read_in_one_step_as_in_several(
    before: dict[str, Any], chunk: dict[str, Any], marks: tuple[str, str], end: bytes, inside: bytes
) -> None:
    """Whatever the block is, the short way finds the run that the long way finds, or leaves the block to it."""
    short, long = CommonChunks(), CommonChunks()
    for stream in (short, long):
        list(stream.split_runs([dump(before, marks)]))
    block = b"data: %b" % dump(chunk, marks).replace(b'"usage"', b'"usage"' + inside) + end
    run = short.single_run(block)
    data = plain_data(block)
    assert run is None or (data is not None and [run] == list(long.split_runs(data)))


def test_the_chunks_of_one_stream_take_the_short_way() -> None:
    """After the first chunk of a form, with token ids and usage or without, the next one is read in one step."""
    for ids, usage in product(({}, {"token_ids": [5]}), ({}, {"usage": USAGE})):
        chunks = [dump({"choices": [{"index": 0, "delta": {"content": text}, **ids}], **usage}) for text in "ab"]
        stream = CommonChunks()
        list(stream.split_runs([chunks[0]]))
        run = stream.single_run(b"data: %b\n\n" % chunks[1])
        assert run is not None
        assert run.text == b"b"


SAYS = st.one_of(
    st.builds(lambda text: {"content": text}, st.sampled_from(["", "", "a", "b"])),
    st.sampled_from([{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"content": "a", "reasoning": "hm"}, {}]),
)
STREAMS = st.lists(
    st.tuples(
        SAYS,
        st.sampled_from([{}, {"token_ids": None}, {"token_ids": [5]}, {"token_ids": [6, 7]}]),
        st.sampled_from([{}, {}, {"finish_reason": "stop"}]),
        st.sampled_from([{"usage": USAGE}, {"usage": USAGE}, {"usage": None}, {}, {}]),
        st.sampled_from([{}, {}, {"sglext": {"x": 1}}]),
    ),
    max_size=6,
)
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'
FIRST: tuple[dict[str, Any], ...] = ({"role": "assistant"}, {}, {}, {"usage": None}, {"prompt_token_ids": [1]})


@given(STREAMS)
def test_both_ways_of_reading_a_stream_agree(stream: list[tuple[dict[str, Any], ...]]) -> None:
    """Bytes for the client, usage and the continuation are the same on the fast path and with the JSON parser."""
    read = []
    for common in (True, False):
        reader = StreamReader(parse_chat(HEAD, BODY, PromptHasher(b"secret"), ids=True))
        shown = b""
        for delta, ids, finish, usage, more in [FIRST, *stream]:
            content = {"id": "c", "choices": [{"index": 0, "delta": delta, **ids, **finish}]}
            apart: dict[str, Any] = {"meta": []}  # a bracket before the choices makes no chunk common
            chunk = content | usage | more if common else apart | content | usage | more
            shown += reader.feed(b"data: %b\n\n" % dump(chunk))
        shown += reader.close()
        events = [json.loads(event.removeprefix(b"data: ")) for event in shown.split(b"\n\n")[:-1]]
        for event in events:
            event.pop("meta", None)
        resumable = (reader.continuable, reader.ids, reader.text, reader.output_tokens())
        read.append((events, reader.usage, reader.ending().answer_keys, resumable))
    assert read[0] == read[1]


def test_chunks_of_one_form_are_one_run() -> None:
    """Consecutive common chunks form one run, and another chunk between them keeps its place."""
    sent = [dump({"choices": [{"index": 0, "delta": {"content": text}}], "usage": USAGE}) for text in "abc"]
    run, other, last = CommonChunks().split_runs([*sent[:2], b"[DONE]", sent[2]])
    assert isinstance(run, ChunkRun)
    assert isinstance(last, ChunkRun)
    assert (run.text, other, last.text) == (b"ab", b"[DONE]", b"c")
