"""Calls with many prompts: the limit on their number, and on the bytes hashed for each."""

from typing import Any

import orjson
import pytest

from router.api.body.call import Call, Head
from router.api.body.prompts import HEADS_LIMIT, MAX_PROMPTS
from router.api.endpoints.scoring import MAX_KEYED_BYTES, MAX_KEYED_PAIRS
from router.api.families import FAMILIES
from router.core.model.prompt_key import PromptHasher
from router.errors import BadRequest

COMPLETIONS, EMBEDDINGS, SCORE = "/v1/completions", "/v1/embeddings", "/v1/score"
HASHER = PromptHasher(b"secret")
LONG = "x" * 100_000
TEXT = "sea " * 100


def parse(path: str, **fields: Any) -> Call:
    return FAMILIES[path].parse(Head(path), orjson.dumps({"model": "m", **fields}), HASHER)


def hashed(call: Call) -> int:
    """Bytes hashed over all prompts of a call."""
    return sum(prompt.key.size for prompt in call.prompts if prompt.key.hashes)


def test_too_many_prompts_are_rejected_and_too_many_texts_count_as_uncached() -> None:
    """A completion needs an answer per prompt, so it is rejected; texts to embed count as one uncached prompt."""
    assert len(parse(COMPLETIONS, prompt=["a"] * MAX_PROMPTS).prompts) == MAX_PROMPTS
    with pytest.raises(BadRequest, match="more than 1024 items") as caught:
        parse(COMPLETIONS, prompt=["a"] * (MAX_PROMPTS + 1))
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")
    assert len(parse(EMBEDDINGS, input=["a"] * MAX_PROMPTS).prompts) == MAX_PROMPTS
    (prompt,) = parse(EMBEDDINGS, input=["a"] * (MAX_PROMPTS + 1)).prompts
    assert (prompt.key.hashes, prompt.key.tokens) == (b"", (4 * (MAX_PROMPTS + 1) + 22) // 4)


@pytest.mark.parametrize(
    ("path", "name", "before"), [(COMPLETIONS, "prompt", "suffix"), (EMBEDDINGS, "input", "tools")]
)
def test_what_stands_before_many_prompts_is_hashed_once(path: str, name: str, before: str) -> None:
    """A long head is replaced by a digest, which still differs exactly if the heads differ."""
    fields: dict[str, Any] = {name: [TEXT] * 256}
    one, same, other = (parse(path, **fields, **{before: LONG + end}) for end in ("a", "a", "b"))
    assert hashed(one) < HEADS_LIMIT < len(LONG) * 256
    assert one.prompts[0].key == one.prompts[-1].key == same.prompts[0].key
    assert one.prompts[0].key.hashes[:8] != other.prompts[0].key.hashes[:8]
    assert parse(path, **{name: TEXT, before: LONG}).prompts[0].key.size > len(LONG)


def test_a_long_query_with_many_texts_counts_as_uncached() -> None:
    """So do too many pairs. A shorter query is hashed with each text."""
    assert len(parse(SCORE, text_1=TEXT, text_2=[TEXT] * MAX_KEYED_PAIRS).prompts) == MAX_KEYED_PAIRS
    assert len(parse(SCORE, text_1=[TEXT] * 300, text_2=["b"] * MAX_KEYED_PAIRS).prompts) == MAX_KEYED_PAIRS
    for query, texts in ((LONG, [TEXT] * MAX_KEYED_PAIRS), (TEXT, [TEXT] * (MAX_KEYED_PAIRS + 1)), (TEXT, [])):
        call = parse(SCORE, text_1=query, text_2=texts)
        assert (len(call.prompts), hashed(call)) == (1, 0)
    assert hashed(parse(SCORE, text_1=LONG, text_2=["b"] * (MAX_KEYED_BYTES // 2 // len(LONG)))) > MAX_KEYED_BYTES // 3
