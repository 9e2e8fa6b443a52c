"""Predicted output follows a client's past answers and the limits that it set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.request import ClientId, Request, RequestId
from router.core.predict.output_length import FIRST_OUTPUT, LEAST_BOUND, MEAN_FACTOR, OutputLengths, ReservedOutput


def asked(limit: int | None, client: str = "ada", model: str = "llama") -> Request:
    return Request(RequestId("r"), ClientId(client), model, (), output_limit=limit)


def lengths_after(*pasts: tuple[int | None, int], client: str = "ada") -> OutputLengths:
    """Return the lengths learned from these pairs of a limit and the tokens of an answer."""
    lengths = OutputLengths(100)
    for limit, tokens in pasts:
        lengths.answer_ended(asked(limit, client), tokens)
    return lengths


def test_exact_limits_are_believed() -> None:
    """A client whose answers always reached their limits is predicted to reach the next one."""
    lengths = lengths_after((300, 300), (500, 500), (400, 400))
    assert lengths.remaining(asked(700)) == 700


def test_a_large_limit_on_every_request_is_discounted() -> None:
    """The prediction is the client's usual share of the limit."""
    lengths = lengths_after(*[(4096, 256)] * 10)
    assert lengths.remaining(asked(4096)) == pytest.approx(256)


@given(
    limit=st.integers(1, 10**9),
    tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    exaggerates=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_predictions_are_at_most_a_few_times_the_past_answers(
    limit: int, tokens: list[int], exaggerates: list[bool]
) -> None:
    """The bound holds whatever limits were set before, exact or not."""
    lengths = lengths_after(
        *((limit if exaggerated else each, each) for exaggerated, each in zip(exaggerates, tokens, strict=False))
    )
    assert lengths.remaining(asked(limit)) <= min(limit, max(LEAST_BOUND, MEAN_FACTOR * max(tokens)))


def test_one_clients_limits_do_not_affect_other_clients() -> None:
    """The prediction for another client is unchanged."""
    lengths = lengths_after((300, 300), client="bob")
    for _ in range(30):
        lengths.answer_ended(asked(128_000), 10)
    assert lengths.remaining(asked(300, "bob")) == 300


def test_a_new_client_is_predicted_from_others_of_the_same_model() -> None:
    """Before there are answers of others, the prediction is a multiple of the first expected length."""
    lengths = lengths_after((1000, 100))
    assert lengths.remaining(asked(1000, "bob")) == 100
    assert lengths.remaining(asked(128_000, "bob", "qwen")) == MEAN_FACTOR * FIRST_OUTPUT
    assert lengths.remaining(asked(100, "bob", "qwen")) == 100


def test_without_a_limit_the_mean_is_predicted() -> None:
    """Such answers do not affect predictions for requests with limits."""
    lengths = lengths_after((None, 80))
    assert lengths.remaining(asked(None)) == 80
    assert lengths.remaining(asked(200)) == 200
    assert OutputLengths(100).remaining(asked(None)) == FIRST_OUTPUT


def test_an_answer_beyond_its_prediction_is_predicted_to_double() -> None:
    """Such an answer is never predicted to exceed its limit."""
    lengths = lengths_after((1000, 100))
    assert lengths.remaining(asked(1000), age=30) == 70
    assert lengths.remaining(asked(1000), age=300) == 300
    assert lengths.remaining(asked(1000), age=900) == 100


def test_the_full_limit_is_reserved() -> None:
    """The bound on the service gap covers all that a request may produce, whatever is predicted."""
    reserved = ReservedOutput(lengths_after((128_000, 10)))
    assert reserved.remaining(asked(128_000)) == 128_000
    assert reserved.remaining(asked(128_000), age=8_000) == 120_000


def test_without_a_limit_the_mean_is_reserved() -> None:
    """The reservation is the client's mean, rounded up; else the model's; else a constant."""
    lengths = lengths_after((None, 40), client="bob")
    reserved = ReservedOutput(lengths)
    assert reserved.remaining(asked(None)) == 40
    lengths.answer_ended(asked(None), 10)
    lengths.answer_ended(asked(None), 11)
    assert reserved.remaining(asked(None)) == 11
    assert reserved.remaining(asked(None, "bob")) == 40
    assert reserved.remaining(asked(None, model="qwen")) == FIRST_OUTPUT


@given(tokens=st.lists(st.integers(0, 5000), min_size=1))
def test_the_mean_is_between_the_extremes(tokens: list[int]) -> None:
    """The mean of a client's answers is between the shortest and the longest so far."""
    lengths = lengths_after(*((None, each) for each in tokens))
    assert min(tokens) <= lengths.mean_length(asked(None)) <= max(tokens)


def test_clients_that_are_long_gone_are_forgotten() -> None:
    """The least recently updated means are dropped first, so that new clients take no more memory."""
    lengths = OutputLengths(3)
    for client, tokens in (("ada", 100), ("bob", 10), ("ada", 100), ("cyd", 1)):
        lengths.answer_ended(asked(None, client), tokens)
    assert lengths.mean_length(asked(None)) == 100
    assert lengths.mean_length(asked(None, "bob")) not in (10, 100)


def test_a_request_without_output_does_not_change_the_mean() -> None:
    """An embedding does not change what is expected of the client's next answer."""
    lengths = lengths_after((None, 40), (0, 0))
    assert lengths.mean_length(asked(None)) == 40
