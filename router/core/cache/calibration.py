"""How right the predictions of one worker's cache are, by what its engine says afterwards."""

from collections import deque
from dataclasses import dataclass
from typing import Final

ANSWERS_KEPT: Final = 200
"""Answers whose error counts."""
MIN_ANSWERS: Final = 20
"""Answers below which nothing is concluded from their error, nor from their silence."""
MAX_MEAN_ERROR: Final = 0.15
"""Mean error, as a share of the prompt, above which predictions are discounted."""


Comparison = tuple[float, int, int]
"""The error of a prediction, as a share of the prompt; what was predicted and what was found, in tokens."""


@dataclass(slots=True)
class CacheTotals:
    """Sums over all answers of a worker in which it told what was cached, in tokens."""

    answers: int = 0
    prompt: int = 0
    predicted: int = 0
    actual: int = 0
    false_hit: int = 0
    """Predicted, and not there."""
    missed_hit: int = 0
    """There, and not predicted."""


class Calibration:
    """Of one worker."""

    def __init__(self) -> None:
        self.totals = CacheTotals()
        self.discount = 1.0
        """What to multiply predictions with, at most 1: less while they promise too much."""
        self._recent: deque[Comparison] = deque()
        self._error = 0.0
        self._predicted = self._actual = 0
        """Sums over the recent ones."""
        self._untold = 0
        """Answers that told nothing."""

    @property
    def error(self) -> float | None:
        """Mean absolute error over the last `ANSWERS_KEPT` answers, as a share of the prompt; None without any."""
        return max(0.0, self._error) / len(self._recent) if self._recent else None

    @property
    def suspect(self) -> bool:
        """Whether the predictions are too wrong to be taken at their word."""
        return len(self._recent) >= MIN_ANSWERS and self._error > MAX_MEAN_ERROR * len(self._recent)

    @property
    def silent(self) -> bool:
        """Whether the engine never tells what was cached."""
        return not self.totals.answers and self._untold >= MIN_ANSWERS

    def record_unreported(self) -> None:
        """An answer came without a word about the cache."""
        self._untold += 1

    def record(self, predicted: int, actual: int, prompt: int) -> None:
        """An answer said how many tokens of its prompt were cached; `predicted` before any discount."""
        totals = self.totals
        totals.answers += 1
        totals.prompt += prompt
        totals.predicted += predicted
        totals.actual += actual
        if predicted > actual:
            totals.false_hit += predicted - actual
        else:
            totals.missed_hit += actual - predicted
        self._take(predicted, actual, prompt)

    def record_totals(self, predicted: int, actual: int, prompt: int) -> None:
        """A silent engine's counters say what was cached of several prompts; all in sums."""
        if predicted or actual:
            self._take(predicted, actual, prompt)

    def reset(self) -> None:
        """The cache was emptied: what was wrong about it says nothing about the next one."""
        self._recent.clear()
        self._error, self._predicted, self._actual = 0.0, 0, 0
        self.discount = 1.0

    def _take(self, predicted: int, actual: int, prompt: int) -> None:
        error = abs(predicted - actual) / max(1, prompt)
        self._recent.append((error, predicted, actual))
        self._error += error
        self._predicted += predicted
        self._actual += actual
        if len(self._recent) > ANSWERS_KEPT:
            error, predicted, actual = self._recent.popleft()
            self._error -= error
            self._predicted -= predicted
            self._actual -= actual
        self.discount = min(1.0, self._actual / max(1, self._predicted)) if self.suspect else 1.0
