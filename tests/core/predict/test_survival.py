"""Answers are predicted to end soon if past answers of their age did."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, Request, RequestId
from router.core.predict.survival import ExactMatchLengths, PastLengths, SurvivalLengths


def request(prompt: str = "") -> Request:
    return Request(RequestId("r"), ClientId("ada"), "llama", (PromptKey(prompt.encode() * 8, 128, 32),))


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=31),
    age=st.integers(0, 60),
    horizon=st.integers(1, 40),
    gate=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_prediction_is_that_of_its_definition(lengths: list[int], age: int, horizon: int, gate: float) -> None:
    """Share and mean are those of the past answers longer than this age; below the gate the horizon is returned
    (BalanceRoute, Appendix C.2).
    """
    past = PastLengths(100)
    for length in lengths:
        past.record(length)
    alive = [length - age for length in lengths if length > age]
    ending = [left for left in alive if left <= horizon]
    expected: float | None
    if not alive:
        expected = None
    elif not ending or len(ending) / len(alive) < gate:
        expected = horizon
    else:
        share = len(ending) / len(alive)
        expected = share * sum(ending) / len(ending) + (1 - share) * horizon
    assert past.remaining(age, horizon, gate) == (None if expected is None else pytest.approx(expected))


def test_heavy_tails_keep_the_gate_closed() -> None:
    """Where most answers of an age outlive the horizon, every answer is predicted to."""
    predictor, random = SurvivalLengths(0.5), Random(0)
    for _ in range(2000):
        predictor.answer_ended(request(), int(random.lognormvariate(5.5, 1.3)) + 1)
    assert {predictor.remaining(request(), age, 48) for age in (0, 100, 1000)} == {48}


def test_the_same_prompt_is_predicted_by_its_own_answers() -> None:
    """Answers to the same prompt count alone; another prompt is predicted by all answers."""
    predictor = ExactMatchLengths(0.5)
    for _ in range(40):
        predictor.answer_ended(request("a"), 20)
        predictor.answer_ended(request("b"), 500)
    assert predictor.remaining(request("a"), 5, 48) == 15
    assert predictor.remaining(request("b"), 5, 48) == 48
    assert predictor.remaining(request("new"), 5, 48) == pytest.approx(0.5 * 15 + 0.5 * 48, abs=1)


def test_the_oldest_answers_are_forgotten() -> None:
    """What answers are like now counts, once as many have ended as are remembered."""
    past = PastLengths(10)
    for length in [5] * 10 + [30] * 10:
        past.record(length)
    assert past.remaining(0, 48, 0.5) == 30
