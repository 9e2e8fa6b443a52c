"""The tokens of prompts are estimated, and the estimates learn from the engine's usage."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.prompt_key import CHUNK_BYTES, PromptKey, unmatched
from router.core.model.request import ClientId, Request, RequestId, Usage
from router.core.predict.token_estimates import Estimates
from tests.core.scenario import HASHER


def request(*sizes: int, client: str = "ada", model: str = "llama", tokens: int | None = None) -> Request:
    keys = tuple(PromptKey(b"", size, tokens) for size in sizes)
    return Request(RequestId("r"), ClientId(client), model, keys)


@given(
    size=st.integers(0, 10**4) | st.integers(0, 50).map(lambda n: n * CHUNK_BYTES),
    tokens=st.none() | st.integers(0, 10**6),
    data=st.data(),
)
def test_a_match_is_never_the_whole_prompt(size: int, tokens: int | None, data: st.DataObject) -> None:
    """More chunks are worth more tokens, and at least one token is left, because an engine always computes the last
    one.
    """
    prompt = PromptKey(b"", size, tokens)
    estimates = Estimates()
    chunks = data.draw(st.integers(0, size // CHUNK_BYTES))
    measure = estimates.measure("llama", prompt)
    less, more = (measure.held(count) for count in (chunks, size // CHUNK_BYTES))
    assert 0 <= less <= more < measure.tokens


def test_input_is_exact_for_token_ids() -> None:
    """A prompt of token ids needs no estimate and teaches nothing about text."""
    estimates = Estimates()
    exact = request(4000, tokens=77)
    assert estimates.input_tokens(exact) == 77
    before = estimates.tokens_per_chunk("llama")
    estimates.learn(exact, Usage(77, 5))
    assert estimates.tokens_per_chunk("llama") == before


def test_several_prompts_add_up() -> None:
    """A request with a list of prompts is as large as all of them."""
    estimates = Estimates()
    assert estimates.input_tokens(request(400, 800)) == sum(estimates.input_tokens(request(s)) for s in (400, 800))


def test_the_ratio_follows_the_engine_model_by_model() -> None:
    """After prompts of two bytes per token the estimate follows, and other models are unchanged."""
    estimates = Estimates()
    untouched = estimates.input_tokens(request(4000, model="qwen"))
    for _ in range(20):
        estimates.learn(request(4000), Usage(2000, 1))
    assert estimates.input_tokens(request(4000)) == pytest.approx(2000, rel=0.02)
    assert estimates.input_tokens(request(4000, model="qwen")) == untouched


def test_prompts_with_images_do_not_spoil_the_estimates_of_text() -> None:
    """A prompt with more tokens than bytes is not of text, so it says nothing about the text of others."""
    estimates = Estimates()
    before = estimates.input_tokens(request(4000))
    for _ in range(20):
        estimates.learn(request(200), Usage(1500, 1))
    assert estimates.input_tokens(request(4000)) == before


def test_an_engine_that_counts_no_input_teaches_nothing() -> None:
    """Zero usage must not reduce the tokens per chunk."""
    estimates = Estimates()
    before = estimates.tokens_per_chunk("llama")
    estimates.learn(request(4000), Usage(0, 0))
    assert estimates.tokens_per_chunk("llama") == before


def test_an_answers_length_is_learned_from_its_usage() -> None:
    """The predictors of output learn what the engine counted."""
    estimates = Estimates()
    estimates.learn(request(1), Usage(1, 40))
    assert estimates.outputs.lengths.remaining(request(1)) == 40


def test_a_prompt_of_a_guessed_size_teaches_no_ratio() -> None:
    """Audio and other input that is not text would spoil the estimates of text."""
    estimates = Estimates()
    before = estimates.tokens_per_chunk("llama")
    guessed = Request(RequestId("r"), ClientId("ada"), "llama", (unmatched(7).key,))
    assert estimates.input_tokens(guessed) == 7
    estimates.learn(guessed, Usage(100_000, 1))
    assert estimates.tokens_per_chunk("llama") == before


def test_the_next_turn_is_found_up_to_the_last_token_of_the_answer() -> None:
    """No engine has computed that last token. Bytes of the answer that fill no chunk count as well."""
    estimates = Estimates()
    asked, answered, again = (HASHER.prompt(b"x" * size).key for size in (400, 700, 1400))
    estimates.learn(replace(request(400), prompts=(asked,)), Usage(100, 90), (answered,))
    assert estimates.measure("llama", again).held(5) == 189


@pytest.mark.parametrize(("found", "learned"), [(100, 100), (40, 64), (400, 64)])
def test_a_cache_hit_teaches_only_if_it_is_plausible(found: int, learned: int) -> None:
    """Far fewer tokens mean a partial eviction, and far more an unknown prefix: neither shows how many tokens a chunk
    has.
    """
    estimates = Estimates()
    prompt = HASHER.prompt(b"x" * 1000).key
    assert estimates.measure("llama", prompt).held(2) == 64
    estimates.on_cache_hit("llama", prompt, 2, found)
    assert estimates.measure("llama", prompt).held(2) == learned


def test_a_cache_hit_teaches_nothing_about_token_ids() -> None:
    """The size of its chunks is exact already."""
    estimates = Estimates()
    prompt = replace(HASHER.prompt(b"x" * 1024).key, tokens=256)
    estimates.on_cache_hit("llama", prompt, 2, 80)
    assert (estimates.measure("llama", prompt).held(2), estimates.version) == (64, 0)
