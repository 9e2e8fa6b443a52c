"""Predicted output, from a client's past answers and the limits that it set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.request import ClientId, Request, RequestId
from router.core.predict.output_length import FIRST_OUTPUT, LEAST_BOUND, MEAN_FACTOR, OutputLengths


def asked(limit: int | None, client: str = "ada", model: str = "llama") -> Request:
    return Request(RequestId("r"), ClientId(client), model, (), output_limit=limit)


def lengths_after(*pasts: tuple[int | None, int], client: str = "ada") -> OutputLengths:
    """Return the lengths learned from these pairs of a limit and the tokens of an answer."""
    lengths = OutputLengths(100)
    for limit, tokens in pasts:
        lengths.learn(asked(limit, client), tokens)
    return lengths


def test_exact_limits_are_believed() -> None:
    """A client whose answers always reached their limits is predicted to reach the next one."""
    lengths = lengths_after((300, 300), (500, 500), (400, 400))
    assert lengths.forecast(asked(700)) == 700


def test_a_large_limit_on_every_request_is_discounted() -> None:
    """The prediction is the usual share of the limit."""
    lengths = lengths_after(*[(4096, 256)] * 10)
    assert lengths.forecast(asked(4096)) == pytest.approx(256)


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
    assert lengths.forecast(asked(limit)) <= min(limit, max(LEAST_BOUND, MEAN_FACTOR * max(tokens)))


def test_one_clients_limits_do_not_affect_other_clients() -> None:
    """The prediction for another client is unchanged."""
    lengths = lengths_after((300, 300), client="bob")
    for _ in range(30):
        lengths.learn(asked(128_000), 10)
    assert lengths.forecast(asked(300, "bob")) == 300


def test_a_new_client_is_predicted_from_others_of_the_same_model() -> None:
    """Before there are any, the prediction is a multiple of the first expected length."""
    lengths = lengths_after((1000, 100))
    assert lengths.forecast(asked(1000, "bob")) == 100
    assert lengths.forecast(asked(128_000, "bob", "qwen")) == MEAN_FACTOR * FIRST_OUTPUT
    assert lengths.forecast(asked(100, "bob", "qwen")) == 100


def test_without_a_limit_the_mean_is_predicted() -> None:
    """Such answers do not affect predictions for requests with limits."""
    lengths = lengths_after((None, 80))
    assert lengths.forecast(asked(None)) == 80
    assert lengths.forecast(asked(200)) == 200
    assert OutputLengths(100).forecast(asked(None)) == FIRST_OUTPUT


def test_an_answer_beyond_its_prediction_is_predicted_to_double() -> None:
    """It is never predicted to exceed its limit."""
    lengths = lengths_after((1000, 100))
    assert lengths.forecast(asked(1000), so_far=30) == 70
    assert lengths.forecast(asked(1000), so_far=300) == 300
    assert lengths.forecast(asked(1000), so_far=900) == 100


def test_the_full_limit_is_reserved() -> None:
    """The bound on the service gap covers all that a request may produce, whatever is predicted."""
    assert lengths_after((128_000, 10)).expected(asked(128_000)) == 128_000
