"""The F-score: what an admission to a rank gains in imbalance (BalanceRoute, section 3.1, eq. 1, and 4.1, eq. 2).

A rank's *margin* is the load that it can take before it is the fullest of its group. For requests of s tokens together,
admitted to a rank whose margin will be m_h in h steps,

    F(s) = alpha * s * sum(gamma^h) - beta * sum(gamma^h * max(0, s - m_h)),    h = 0 .. H

With H = 0, alpha = 1 and beta = the number of ranks this is the decrease of the imbalance, sum(L_max - L_g), in one
step.

F is concave, so of the sums that can be had, the best is one of two: the largest up to the *kink*, the margin at which
the slope ceases to be positive, or the smallest beyond it. That holds for any H. (The paper's Appendix D.4 enumerates
all subsets for BR-H, or probes around every distinct margin.)
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import Final, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

MOST_COMBINED: Final = 24
"""The most weights of which all sums are searched."""


class FScore(Protocol):
    """F of one rank."""

    kink: float
    """The sum at which F is largest, in tokens; infinite if F never falls."""

    def __call__(self, tokens: float) -> float:
        """Return F for requests that have this many tokens together."""


def largest_score(candidates: Sequence[tuple[int, int, T]], score: FScore) -> tuple[int, int, T]:
    """Return the candidate with the largest F, of equals the first to arrive. There is at least one.

    `candidates`: the weight, the arrival and anything else of each, in order of weight and arrival. F rises up to the
    kink and falls beyond, so only the nearest on both sides are scored, and those that score as much; of equal weights
    only the first.
    """
    beyond = bisect_left(candidates, (score.kink, inf))
    best, best_value = candidates[0], -inf
    after = beyond
    while after:
        first = bisect_left(candidates, (candidates[after - 1][0],), 0, after)
        candidate = candidates[first]
        value = score(candidate[0])
        if value < best_value:
            break
        if value > best_value or candidate[1] < best[1]:
            best, best_value = candidate, value
        after = first
    first = beyond
    while first < len(candidates):
        candidate = candidates[first]
        value = score(candidate[0])
        if value < best_value:
            break
        if value > best_value or candidate[1] < best[1]:
            best, best_value = candidate, value
        first = bisect_left(candidates, (candidate[0], inf), first)
    return best


class HorizonScore:
    """F of one rank over a horizon."""

    __slots__ = ("_lost", "_margins", "_reward", "_slopes", "kink")

    def __init__(self, margins: Sequence[float], discounts: Sequence[float], alpha: float, beta: float) -> None:
        """`margins`: m_h, in tokens. `discounts`: gamma^h, one for each margin."""
        pairs = sorted(zip(margins, discounts, strict=True))
        self._margins = [margin for margin, _ in pairs]
        self._reward = alpha * sum(discounts)
        self._slopes = [0.0, *accumulate([beta * discount for _, discount in pairs])]
        """The penalty's slope beyond as many margins."""
        self._lost = [0.0, *accumulate([beta * discount * margin for margin, discount in pairs])]
        beyond = bisect_left(self._slopes, self._reward)
        self.kink = self._margins[beyond - 1] if 0 < beyond < len(self._slopes) else inf

    def __call__(self, tokens: float) -> float:
        overflown = bisect_left(self._margins, tokens)
        return self._reward * tokens - (self._slopes[overflown] * tokens - self._lost[overflown])


class StepScore:
    """F of one rank for one step, with alpha = 1: what `HorizonScore` returns with H = 0, for less work."""

    __slots__ = ("_beta", "_margin", "kink")

    def __init__(self, margin: float, beta: float) -> None:
        self._margin = margin
        self._beta = beta
        self.kink = margin if beta >= 1 else inf

    def __call__(self, tokens: float) -> float:
        return step_score(tokens, self._margin, self._beta)


def step_score(tokens: float, margin: float, beta: float) -> float:
    """Return F for one step, with alpha = 1."""
    return tokens - beta * (tokens - margin) if tokens > margin else tokens


class Subset(NamedTuple):
    """Some of a list of weights."""

    total: float
    chosen: int
    """A bit for each weight, the lowest for the first."""

    def members(self, items: Sequence[T]) -> list[T]:
        """Return the items that belong to the chosen weights."""
        return [item for place, item in enumerate(items) if self.chosen >> place & 1]


def best_subset(weights: Sequence[float], most: int, score: FScore) -> Subset:
    """Return the subset of these weights with the largest F, of 1 to `most` weights. There are 1 to `MOST_COMBINED`.

    All sums of one half of the weights are matched with the sorted sums of the other.
    """
    half = len(weights) // 2
    by_count = _by_count(_subsets(weights[half:], half), most)
    best, best_value = Subset(0.0, 0), -inf
    for total, chosen in _subsets(weights[:half], 0):
        count = chosen.bit_count()
        if count <= most:
            others = by_count[min(most - count, len(by_count) - 1)]
            beyond = bisect_right(others, score.kink - total, key=_total)
            for other in others[max(0, beyond - 1) : beyond + 1]:
                both = Subset(total + other.total, chosen | other.chosen)
                if both.chosen and (value := score(both.total)) > best_value:
                    best, best_value = both, value
    return best


def _total(subset: Subset) -> float:
    return subset.total


def _subsets(weights: Sequence[float], first: int) -> Iterator[Subset]:
    """Yield all subsets, the empty one first. `first`: the place of the first weight."""
    found = [Subset(0.0, 0)]
    for place, weight in enumerate(weights, first):
        found += [Subset(total + weight, chosen | 1 << place) for total, chosen in found]
    return iter(found)


def _by_count(subsets: Iterable[Subset], most: int) -> list[list[Subset]]:
    """Return the sorted subsets of at most 0, 1, 2, ... weights, up to `most`."""
    ordered = sorted(subsets)
    largest = min(most, max(subset.chosen.bit_count() for subset in ordered))
    return [[each for each in ordered if each.chosen.bit_count() <= count] for count in range(largest + 1)]
