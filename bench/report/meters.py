"""Percentiles and means of durations, some of which may not have ended."""

from collections.abc import Iterable, Iterator


def censored_percentile(spans: Iterable[tuple[float, bool]], share: float) -> float | None:
    """Return a percentile of durations, some not ended (False), by Kaplan and Meier; None without durations.

    If all have ended, it is the smallest value that at least `share` of them do not exceed. If too few have ended to
    determine it, it is the longest one, a lower bound.
    """
    span = None
    for span, surviving in _survival(spans):
        if surviving <= 1 - share + 1e-9:
            return span
    return span


def censored_mean(spans: Iterable[tuple[float, bool]]) -> float | None:
    """Return the mean of durations, some not ended (False), by Kaplan and Meier; None without durations.

    The area under the survival function, up to the longest duration: the plain mean if all have ended, else a lower
    bound.
    """
    area, before, left = 0.0, 0.0, 1.0
    span = None
    for span, surviving in _survival(spans):
        area += left * (span - before)
        before, left = span, surviving
    return None if span is None else area


def _survival(spans: Iterable[tuple[float, bool]]) -> Iterator[tuple[float, float]]:
    """Yield the durations in ascending order, each with the estimated share that is longer."""
    ordered = sorted((span, not ended) for span, ended in spans)
    surviving = 1.0
    for position, (span, going) in enumerate(ordered):
        if not going:
            surviving *= 1 - 1 / (len(ordered) - position)
        yield span, surviving
