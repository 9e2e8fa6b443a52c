"""Statistics of a simulation: percentiles and means of what may not have ended."""

from collections.abc import Iterable, Iterator


def censored_percentile(spans: Iterable[tuple[float, bool]], share: float) -> float | None:
    """The percentile of spans of which some have not ended (False), by Kaplan and Meier; None without spans.

    Where all have ended it is the smallest that at least this share do not exceed. Where too few have ended to tell,
    it is the longest seen, a lower bound.
    """
    span = None
    for span, surviving in _survival(spans):
        if surviving <= 1 - share + 1e-9:
            return span
    return span


def censored_mean(spans: Iterable[tuple[float, bool]]) -> float | None:
    """The mean of spans of which some have not ended (False), by Kaplan and Meier; None without spans.

    The area under the share that is longer, up to the longest seen: where all have ended the plain mean, else a
    lower bound.
    """
    area, before, left = 0.0, 0.0, 1.0
    span = None
    for span, surviving in _survival(spans):
        area += left * (span - before)
        before, left = span, surviving
    return None if span is None else area


def _survival(spans: Iterable[tuple[float, bool]]) -> Iterator[tuple[float, float]]:
    """Every span in ascending order, and the share that is longer, estimated from those that ended up to it."""
    ordered = sorted((span, not ended) for span, ended in spans)
    surviving = 1.0
    for position, (span, going) in enumerate(ordered):
        if not going:
            surviving *= 1 - 1 / (len(ordered) - position)
        yield span, surviving
