"""What the window foresees of an answer: what its client's answers came to, beside the limits that were stated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.request import ClientId, Request, RequestId
from router.core.predict.output_length import FIRST_OUTPUT, LEAST_BOUND, MEAN_FACTOR, OutputLengths


def asked(limit: int | None, client: str = "ada", model: str = "llama") -> Request:
    return Request(RequestId("r"), ClientId(client), model, (), output_limit=limit)


def after(*pasts: tuple[int | None, int], client: str = "ada") -> OutputLengths:
    """These limits were stated, and this came of them."""
    answers = OutputLengths(100)
    for limit, tokens in pasts:
        answers.learn(asked(limit, client), tokens)
    return answers


def test_exact_limits_are_believed() -> None:
    """A client whose answers always came to their limits is foreseen to have another such."""
    answers = after((300, 300), (500, 500), (400, 400))
    assert answers.forecast(asked(700)) == 700


def test_one_limit_for_all_is_taken_for_what_comes_of_it() -> None:
    """In proportion."""
    answers = after(*[(4096, 256)] * 10)
    assert answers.forecast(asked(4096)) == pytest.approx(256)


@given(
    limit=st.integers(1, 10**9),
    tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    lies=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_no_limit_makes_more_than_a_few_times_what_was_answered(
    limit: int, tokens: list[int], lies: list[bool]
) -> None:
    """Whatever was stated before, truly or not."""
    answers = after(*((limit if lie else each, each) for lie, each in zip(lies, tokens, strict=False)))
    assert answers.forecast(asked(limit)) <= min(limit, max(LEAST_BOUND, MEAN_FACTOR * max(tokens)))


def test_ones_lies_change_nothing_for_others() -> None:
    """What another's answers are foreseen to have is as it was."""
    answers = after((300, 300), client="bob")
    for _ in range(30):
        answers.learn(asked(128_000), 10)
    assert answers.forecast(asked(300, "bob")) == 300


def test_a_new_clients_answers_are_foreseen_from_those_of_others() -> None:
    """By the same model; before there are any, as a few times the first that is expected."""
    answers = after((1000, 100))
    assert answers.forecast(asked(1000, "bob")) == 100
    assert answers.forecast(asked(128_000, "bob", "qwen")) == MEAN_FACTOR * FIRST_OUTPUT
    assert answers.forecast(asked(100, "bob", "qwen")) == 100


def test_without_a_limit_the_mean_is_foreseen() -> None:
    """And it says nothing of what comes of limits."""
    answers = after((None, 80))
    assert answers.forecast(asked(None)) == 80
    assert answers.forecast(asked(200)) == 200
    assert OutputLengths(100).forecast(asked(None)) == FIRST_OUTPUT


def test_one_that_goes_on_elsewhere_is_foreseen_to_have_as_much_again() -> None:
    """When it has had more than was foreseen, and never more than its limit leaves."""
    answers = after((1000, 100))
    assert answers.forecast(asked(1000), so_far=30) == 70
    assert answers.forecast(asked(1000), so_far=300) == 300
    assert answers.forecast(asked(1000), so_far=900) == 100


def test_the_full_limit_is_reserved() -> None:
    """The bound on the service gap allows for all that a call may have, whatever is foreseen."""
    assert after((128_000, 10)).expected(asked(128_000)) == 128_000
