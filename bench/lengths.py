"""Lengths in tokens, drawn from truncated lognormal distributions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from random import Random
from statistics import NormalDist
from typing import Final

_NORMAL: Final = NormalDist()
_HALVINGS: Final = 80


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from `least` to `most` with this mean: lognormal, cut off at both ends; without `sd` all equal.

    `sd` is the standard deviation before the cut; the location is chosen so that the mean is right after it. Raises
    ValueError where no such distribution exists.
    """

    mean: float
    sd: float = 0.0
    least: int = 1
    most: int = 32_768

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.mean <= self.most or self.sd < 0:
            raise ValueError(f"no lengths from {self.least} to {self.most} have mean {self.mean} and sd {self.sd}")

    def draw(self, random: Random) -> int:
        """One length."""
        return self.at(random.random()) if self.sd else round(self.mean)

    def at(self, share: float) -> int:
        """The length that this share of all lengths does not exceed."""
        if not self.sd:
            return round(self.mean)
        spread = _spread(self.mean, self.sd)
        location = _location(self)
        low, high = (_NORMAL.cdf((edge - location) / spread) for edge in _edges(self))
        inside = min(max(low + share * (high - low), 1e-15), 1 - 1e-15)
        length = exp(location + spread * _NORMAL.inv_cdf(inside))
        return min(self.most, max(self.least, round(length)))


def stratified(lengths: Lengths, shares: Sequence[float], random: Random) -> list[int]:
    """A length for each item, such that those drawn by these shares (which add up to 1) follow the distribution.

    Drawn independently, a few popular items would shift the mean of what is drawn; here each takes the middle of its
    own piece of the distribution, the pieces in random order.
    """
    order = list(range(len(shares)))
    random.shuffle(order)
    chosen = [0] * len(shares)
    below = 0.0
    for item in order:
        chosen[item] = lengths.at(below + shares[item] / 2)
        below += shares[item]
    return chosen


def zipf(count: int, exponent: float) -> list[float]:
    """Shares of so many items, the k-th in proportion to k^-exponent; they add up to 1."""
    weights = [rank**-exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def _spread(mean: float, sd: float) -> float:
    return sqrt(log(1 + (sd / mean) ** 2))


def _edges(lengths: Lengths) -> tuple[float, float]:
    return log(max(lengths.least, 0.5)), log(lengths.most)


@cache
def _location(lengths: Lengths) -> float:
    """The lognormal's mu for which the mean within the edges is right, by bisection."""
    spread = _spread(lengths.mean, lengths.sd)
    edges = _edges(lengths)
    low, high = edges[0] - 10 * spread, edges[1] + 10 * spread
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _mean(middle, spread, edges) < lengths.mean:
            low = middle
        else:
            high = middle
    return low


def _mean(location: float, spread: float, edges: tuple[float, float]) -> float:
    """Of the lognormal between the edges (whose logarithms these are)."""
    low, high = ((edge - location) / spread for edge in edges)
    inside = _NORMAL.cdf(high) - _NORMAL.cdf(low)
    if inside <= 1e-12:  # all of it lies beyond one edge
        return exp(edges[0]) if location < edges[0] else exp(edges[1])
    return exp(location + spread**2 / 2) * (_NORMAL.cdf(high - spread) - _NORMAL.cdf(low - spread)) / inside
