"""Each predictor learns from what ended at its workers, as long as it is registered."""

import pytest

from router.core.model.cost import NOTHING, Charge, Tokens
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.predict.output_length import OutputPredictions, WorkerMean
from tests.core.scenario import Scene

ONE, TWO = WorkerId("w1"), WorkerId("w2")


def asked(limit: int | None) -> Request:
    return Request(RequestId("r"), ClientId("ada"), "llama", (), output_limit=limit)


def ended(worker: WorkerId, output: int) -> Charge:
    return Charge(RequestId("r"), ClientId("ada"), worker, NOTHING, Tokens(4, 0, output), 0.0)


def test_a_predictor_learns_from_its_own_worker_until_it_is_removed() -> None:
    """Each attempt is passed on once, to the predictors of its worker alone."""
    predictions = OutputPredictions()
    here, there = WorkerMean(), WorkerMean()
    predictions.add(here, ONE)
    predictions.add(there, TWO)
    predictions.attempt_ended(ended(ONE, 100))
    assert here.mean == pytest.approx(3)
    assert there.mean == 0
    predictions.remove(here, ONE)
    predictions.attempt_ended(ended(ONE, 100))
    assert here.mean == pytest.approx(3)


def test_a_forgotten_workers_predictors_learn_nothing_more() -> None:
    """The worker may come back; what was added for it before is not taught again."""
    predictions = OutputPredictions()
    mean = WorkerMean()
    predictions.add(mean, ONE)
    predictions.forget_worker(ONE)
    predictions.attempt_ended(ended(ONE, 100))
    assert mean.mean == 0


def test_answers_teach_the_common_predictors() -> None:
    """Prediction and reservation without a limit follow the same mean."""
    predictions = OutputPredictions()
    predictions.answer_ended(asked(None), 30)
    assert predictions.lengths.remaining(asked(None)) == predictions.reserved.remaining(asked(None)) == 30


def test_a_window_learns_once_from_each_attempt_at_its_worker() -> None:
    """A failed attempt counts with what the worker produced, and a refused one does not count."""
    talk = Scene("pooled_fcfs")
    mean = talk.scheduler.fleet[ONE].mean_output
    talk.serve(talk.arrive("ada", "why?"), output=100)
    assert mean.mean == pytest.approx(3)
    talk.refuse(talk.arrive("ada", "why?"))
    assert mean.mean == pytest.approx(3)
    broken = talk.arrive("ada", "why?")
    talk.progress(broken, 100)
    talk.fail(broken)
    assert mean.mean == pytest.approx(0.97 * 3 + 3)


def test_a_worker_that_comes_back_is_learned_anew() -> None:
    """What ran before it left says nothing about what will run there, and is not taught any more."""
    talk = Scene("pooled_fcfs")
    before = talk.scheduler.fleet[ONE].mean_output
    talk.serve(talk.arrive("ada", "why?"), output=100)
    talk.leave("w1")
    talk.join("w1")
    after = talk.scheduler.fleet[ONE].mean_output
    assert after.mean == 0
    talk.serve(talk.arrive("ada", "why?"), output=50)
    assert before.mean == pytest.approx(3)
    assert after.mean == pytest.approx(1.5)
