"""The interface of everything that predicts how long answers will be.

There is one question, how many output tokens a request still produces, and there are two occasions to learn: an answer
ended, or a worker's attempt at one. `OutputPredictions` passes each of them on once. The predictors differ in what they
count as likely, because each serves a rule of its own:

    predictor          learns from                      used for
    -----------------  -------------------------------  ------------------------------------------------------------
    OutputLengths      answers, by client and model     the KV cache that a request will hold; how long a call runs
    ReservedOutput     the same                         the bound on the service gap
    WorkerMean         attempts at one worker           the KV cache that the next request there will hold
    ClientMeans        attempts at one worker           VTC (predict), `vtc_predict`
    StatedLimit        nothing                          VTC (oracle), `vtc_oracle`
    RecentMean         recent attempts at one worker    the load of a worker under Preble
    SurvivalLengths    answers, by model                BR-H, `brh`: which running answers end soon
    ExactMatchLengths  answers, by prompt and model     the same
    TrueLength         nothing                          the same, in simulations
"""

from math import inf
from typing import Protocol

from router.core.model.cost import Charge
from router.core.model.request import Request


class OutputPredictor(Protocol):
    """Predicts the output of requests, in tokens."""

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        """Return how many output tokens a request will produce beyond the `age` that it has; never negative.

        `horizon`: how many tokens ahead the caller looks. The result is at most that: a request predicted to outlive
        the horizon has exactly `horizon` left.
        """

    def answer_ended(self, request: Request, tokens: int) -> None:  # noqa: ARG002 - some predictors learn otherwise
        """Learn from an answer that ended with this many tokens, whichever workers computed them."""
        return

    def attempt_ended(self, charge: Charge) -> None:  # noqa: ARG002 - some predictors learn otherwise
        """Learn from an attempt that ended. `charge`: its last one, whose `after` is all that the worker did for it."""
        return


def remaining_of(predicted: float, age: float, horizon: float) -> float:
    """Return what is left of a predicted length after `age`, in tokens: from 0 to `horizon`."""
    return min(max(0.0, predicted - age), horizon)
