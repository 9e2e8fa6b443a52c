"""The output limit that a request states, taken at its word."""

from math import inf
from random import Random

from router.core.model.request import Request
from router.core.predict.output_length import OutputPredictor, remaining_of


class StatedLimit(OutputPredictor):
    """Predicts the limit, which is the true length if the request asked for exactly that, and zero without a limit.

    Kept beside `OutputLengths`, which does not believe limits, because "VTC (oracle)" is defined by it ("Fairness in
    Serving Large Language Models", section 5.1).
    """

    def __init__(self, error: float, random: Random) -> None:
        """`error`: each prediction is the limit times a random number from 1 - error to 1 + error."""
        self._error = error
        self._random = random

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        length = float(request.output_limit or 0)
        if self._error:
            length *= self._random.uniform(1 - self._error, 1 + self._error)
        return remaining_of(length, age, horizon)
