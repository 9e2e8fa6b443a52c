"""The true length of each answer, which only a simulation knows."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from router.core.model.request import Request
from router.core.predict.output_length import OutputPredictor, remaining_of


@dataclass(frozen=True, slots=True)
class TrueOutputs:
    """What a simulation adds to a policy's parameters, so that `oracle` can be chosen there."""

    of: Callable[[Request], int] | None = None
    """Returns how many output tokens a request will have; None outside of simulations."""


class TrueLength(OutputPredictor):
    """Predicts what will happen."""

    def __init__(self, of: Callable[[Request], int]) -> None:
        """`of`: returns a request's output tokens."""
        self._of = of

    def remaining(self, request: Request, age: int = 0, horizon: float = inf) -> float:
        return remaining_of(self._of(request), age, horizon)
