"""The step-time models: they reproduce the numbers that they were fitted to, and more work never takes less time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.hardware import HARDWARE, Batch, RankSteps, linear, rank

chunks = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 16_384)).map(lambda pair: (pair[0], sum(pair))))
batches = st.builds(
    lambda extends, decodes, context: Batch(extends, decodes, decodes * context),
    chunks,
    st.integers(0, 256),
    st.integers(1, 8192),
)


@pytest.mark.parametrize(
    ("tokens", "milliseconds"),
    [(128, 24.8), (512, 66.7), (1024, 128.4), (2048, 268.8), (4096, 553), (8192, 1183), (21_449, 3781)],
)
def test_a6000_prefill_meets_the_published_fit(tokens: int, milliseconds: float) -> None:
    """A single prompt without a prefix takes what Preble's fit gives, within 0.1 %."""
    seconds = HARDWARE["a6000-mistral-7b"].step_seconds(Batch([(tokens, tokens)]))
    assert seconds * 1000 == pytest.approx(milliseconds, rel=1e-3)


@pytest.mark.parametrize(
    ("decodes", "context", "milliseconds"),
    [(1, 1024, 24.8), (32, 1024, 27.9), (64, 1024, 31.3), (128, 1024, 38.1), (32, 4096, 51.7)],
)
def test_a6000_decode_meets_the_published_fit(decodes: int, context: int, milliseconds: float) -> None:
    """Decode steps of equal contexts take what Preble's fit gives."""
    batch = Batch(decodes=decodes, decode_context=decodes * context)
    assert HARDWARE["a6000-mistral-7b"].step_seconds(batch) * 1000 == pytest.approx(milliseconds, rel=2e-3)


def test_a6000_extension_of_a_cached_prefix() -> None:
    """A hundred new tokens behind 21k cached ones take 74 ms, not the 3.8 s of the whole prompt."""
    seconds = HARDWARE["a6000-mistral-7b"].step_seconds(Batch([(100, 21_549)]))
    assert seconds == pytest.approx(0.074, rel=1e-3)


@pytest.mark.parametrize(
    ("decodes", "prompt", "decode_seconds_per_request"),
    [(19, 256, 0.5011), (37, 8, 0.2521), (13, 512, 0.7604)],
)
def test_a10g_decode_meets_the_profile(decodes: int, prompt: int, decode_seconds_per_request: float) -> None:
    """The mean decode step of 256-token answers is within 3 % of VTC's profile."""
    batch = Batch(decodes=decodes, decode_context=decodes * (prompt + 128))
    measured = decode_seconds_per_request * decodes / 256
    assert HARDWARE["a10g-llama-7b"].step_seconds(batch) == pytest.approx(measured, rel=0.03)


def test_a100_values() -> None:
    """The A100 fit has its two constant pieces, its line, and its attention term from 2^20 on."""
    step = HARDWARE["a100-mistral-7b"].step_seconds
    assert step(Batch([(10, 10)])) * 850 == pytest.approx(8.96)
    assert step(Batch([(100, 100)])) * 850 == pytest.approx(10.5)
    assert step(Batch([(1000, 1000)])) * 850 == pytest.approx(55.819, rel=1e-4)
    assert step(Batch([(2048, 2048)])) * 850 == pytest.approx(116.383, rel=1e-4)


@pytest.mark.parametrize("name", HARDWARE)
@given(batch=batches, decodes=st.integers(0, 64), extend=st.integers(1, 4096))
def test_more_work_never_takes_less_time(name: str, batch: Batch, decodes: int, extend: int) -> None:
    """Every step takes time, and neither another chunk nor more decoded context makes it shorter.

    The exception is where the A6000's fit halves its attention term: more short requests may then be a little faster.
    """
    step = HARDWARE[name].step_seconds
    more = Batch([*batch.extends, (extend, extend)], batch.decodes, batch.decode_context)
    longer = Batch(batch.extends, batch.decodes, batch.decode_context + decodes)
    assert step(batch) > 0
    if name != "a6000-mistral-7b":
        assert step(batch) <= step(more)
        assert step(batch) <= step(longer)


def test_measured_step_times_add_up() -> None:
    """A step's time is the sum of its constant, its prefilled tokens and its decoded sequences, whatever their
    lengths.
    """
    step = linear(1000, step=2.0, prefilled_token=0.01, decoded_sequence=0.1).step_seconds
    assert step(Batch([(100, 500), (50, 50)], 3, 900)) == pytest.approx((2 + 1.5 + 0.3) / 1000)


@given(batches)
def test_a_rank_takes_a_fixed_time_and_one_for_its_context(batch: Batch) -> None:
    """A step is C + t·L, with the contexts of prompts and of decodes in L, and prompts are computed elsewhere."""
    step = rank(1000, RankSteps(20.0, 0.07)).step_seconds
    context = batch.decode_context + sum(length for _, length in batch.extends)
    assert step(batch) * 1000 == pytest.approx(20.0 + 0.07e-3 * context)


def test_a_rank_may_compute_its_prompts_itself() -> None:
    """With a prefill time, new prompt tokens cost it, and cached ones only their reading."""
    step = rank(1000, RankSteps(20.0, 0.5, prefill=0.1)).step_seconds
    assert step(Batch([(100, 1000)], decodes=2, decode_context=1000)) * 1000 == pytest.approx(20.0 + 1.0 + 10.0)


@pytest.mark.parametrize("times", [(0.0, 1.0, 0.0), (20.0, -1.0, 0.0), (20.0, 1.0, -1.0)])
def test_no_step_of_a_rank_takes_no_time(times: tuple[float, float, float]) -> None:
    """Without a fixed time, ranks without work would step for ever at one instant."""
    with pytest.raises(ValueError, match="times"):
        RankSteps(*times)
