"""How accurate the cache predictions for one worker are, compared with what its engine reports afterwards."""

from collections import deque
from dataclasses import dataclass
from typing import Final

ANSWERS_KEPT: Final = 200
"""Answers over which the error is averaged."""
MIN_ANSWERS: Final = 20
"""Answers needed before anything is concluded from their error, or from an engine that reports nothing."""
MAX_MEAN_ERROR: Final = 0.15
"""Mean error, as a share of the prompt, above which predictions are discounted."""


Comparison = tuple[float, int, int]
"""The error of a prediction, as a share of the prompt; the tokens predicted; the tokens found."""


@dataclass(slots=True)
class CacheTotals:
    """Sums over all answers of a worker that reported cached tokens, in tokens."""

    answers: int = 0
    prompt: int = 0
    predicted: int = 0
    actual: int = 0
    false_hit: int = 0
    """Predicted, but not cached."""
    missed_hit: int = 0
    """Cached, but not predicted."""


class Calibration:
    """Compares predictions with reports for one worker."""

    def __init__(self) -> None:
        self.totals = CacheTotals()
        self.discount = 1.0
        """The factor to apply to predictions, at most 1: less while they promise too much."""
        self._recent: deque[Comparison] = deque()
        self._error = 0.0
        self._predicted = self._actual = 0
        """This and `_actual`: sums over the recent comparisons, in tokens."""
        self._unreported = 0
        """Answers that reported nothing about the cache."""

    @property
    def error(self) -> float | None:
        """Mean absolute error of the recent comparisons, as a share of the prompt; None if there are none."""
        return max(0.0, self._error) / len(self._recent) if self._recent else None

    @property
    def suspect(self) -> bool:
        """Whether the predictions are too wrong to be used without a discount."""
        return len(self._recent) >= MIN_ANSWERS and self._error > MAX_MEAN_ERROR * len(self._recent)

    @property
    def silent(self) -> bool:
        """Whether the engine never reports what was cached."""
        return not self.totals.answers and self._unreported >= MIN_ANSWERS

    def record_unreported(self) -> None:
        """Count an answer that reported nothing about the cache."""
        self._unreported += 1

    def record(self, predicted: int, actual: int, prompt: int) -> None:
        """Record how many tokens of its prompt an answer reported as cached. `predicted` is before any discount."""
        totals = self.totals
        totals.answers += 1
        totals.prompt += prompt
        totals.predicted += predicted
        totals.actual += actual
        if predicted > actual:
            totals.false_hit += predicted - actual
        else:
            totals.missed_hit += actual - predicted
        self._add(predicted, actual, prompt)

    def record_totals(self, predicted: int, actual: int, prompt: int) -> None:
        """Record sums over several prompts, from the counters of an engine whose answers report nothing."""
        if predicted or actual:
            self._add(predicted, actual, prompt)

    def reset(self) -> None:
        """Start anew, because the cache was emptied: earlier errors say nothing about its new content."""
        self._recent.clear()
        self._error, self._predicted, self._actual = 0.0, 0, 0
        self.discount = 1.0

    def _add(self, predicted: int, actual: int, prompt: int) -> None:
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
