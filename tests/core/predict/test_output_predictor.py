"""These properties hold for every predictor of output length."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.cost import NOTHING, Charge, Tokens
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.predict.output_length import (
    ClientMeans,
    OutputPredictions,
    OutputPredictor,
    RecentMean,
    StatedLimit,
    WorkerMean,
)

ONE = WorkerId("w1")

PREDICTORS: dict[str, Callable[[OutputPredictions], OutputPredictor]] = {
    "OutputLengths": lambda outputs: outputs.lengths,
    "ReservedOutput": lambda outputs: outputs.reserved,
    "ClientMeans": lambda _: ClientMeans(),
    "WorkerMean": lambda _: WorkerMean(),
    "RecentMean": lambda _: RecentMean(60.0, first=45, now=0.0),
    "StatedLimit": lambda _: StatedLimit(0.0, Random(0)),
}


def asked(limit: int | None) -> Request:
    return Request(RequestId("r"), ClientId("ada"), "llama", (), output_limit=limit)


def ended(worker: WorkerId, output: int) -> Charge:
    return Charge(RequestId("r"), ClientId("ada"), worker, NOTHING, Tokens(4, 0, output), 0.0)


@pytest.mark.parametrize("name", PREDICTORS)
@given(
    limit=st.none() | st.integers(1, 10_000),
    outputs=st.lists(st.integers(0, 5000), max_size=5),
    age=st.integers(0, 20_000),
    horizon=st.integers(1, 5000),
)
def test_a_prediction_lies_within_the_horizon(
    name: str, limit: int | None, outputs: list[int], age: int, horizon: int
) -> None:
    """Whatever was learned, nothing negative is left, and a horizon only caps what is predicted without one."""
    predictions = OutputPredictions()
    predictor = PREDICTORS[name](predictions)
    predictions.add(predictor, ONE)
    for output in outputs:
        predictions.answer_ended(asked(limit), output)
        predictions.attempt_ended(ended(ONE, output))
    unlimited = predictor.remaining(asked(limit), age)
    assert unlimited >= 0
    assert predictor.remaining(asked(limit), age, horizon) == min(unlimited, horizon)


@pytest.mark.parametrize("name", ["ReservedOutput", "OutputLengths"])
def test_nothing_is_left_at_the_limit(name: str) -> None:
    """An answer that has reached its limit ends there."""
    predictor = PREDICTORS[name](OutputPredictions())
    assert predictor.remaining(asked(100), age=100) == 0


def test_a_stated_limit_is_zero_where_there_is_none() -> None:
    """A client that sets no limit is charged nothing in advance."""
    assert StatedLimit(0.5, Random(0)).remaining(asked(None)) == 0
