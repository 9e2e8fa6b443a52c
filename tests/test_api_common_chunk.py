import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from router.api.common_chunk import take_apart

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "completion_tokens_details": None}
NULLS = st.dictionaries(st.sampled_from(["logprobs", "finish_reason", "token_ids", "matched_stop"]), st.none())
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\'), min_size=1)
MARKS = st.sampled_from([(",", ":"), (", ", ": ")])


def dump(chunk: Any, marks: tuple[str, str] = (",", ":")) -> bytes:
    return json.dumps(chunk, separators=marks, ensure_ascii=False).encode()


@given(TEXTS, NULLS, NULLS, MARKS)
def test_the_chunks_of_both_engines_are_common(
    text: str, before: dict[str, None], after: dict[str, None], marks: tuple[str, str]
) -> None:
    """Text with nothing but nulls around it is taken apart: the chunk without usage, the text, the usage."""
    choice = {"index": 0, "delta": {**dict.fromkeys(before), "content": text}, **after}
    chunk = {"id": "chatcmpl-1", "created": 1, "choices": [choice]}
    parts = take_apart(dump({**chunk, "usage": USAGE}, marks))
    assert parts is not None
    assert (parts[0], parts[1].decode(), json.loads(parts[2])) == (dump(chunk, marks), text, USAGE)


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
def test_what_is_taken_apart_was_common(chunk: dict[str, Any], marks: tuple[str, str]) -> None:
    """Of whatever else may come, nothing is mistaken: the parts are those that a parser finds."""
    parts = take_apart(dump(chunk, marks))
    if parts is not None:
        without = {name: value for name, value in chunk.items() if name != "usage"}
        choice = {"index": 0, "delta": {"content": parts[1].decode()}}
        assert (json.loads(parts[0]), json.loads(parts[2])) == (without, chunk["usage"])
        assert [{name: value for name, value in c.items() if value is not None} for c in chunk["choices"]] == [choice]


@given(st.sampled_from(['"', "\\", "\n", "\u0000", "tab\t"]))
def test_text_with_escapes_is_left_to_the_parser(text: str) -> None:
    """What stands in JSON otherwise than in the text is not taken for the text."""
    assert take_apart(dump({"choices": [{"index": 0, "delta": {"content": text}}], "usage": USAGE})) is None
