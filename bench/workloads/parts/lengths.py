"""Lengths in tokens, drawn from truncated lognormal distributions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import erfc, exp, log, sqrt
from random import Random
from statistics import NormalDist
from typing import Final

_NORMAL: Final = NormalDist()
HALVINGS: Final = 32
WIDEST: Final = 3.0
"""The largest sigma that is tried."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from `least` to `most` with this mean and standard deviation; without `sd` all are equal.

    Lognormal, truncated at both ends, with the parameters that give this mean and deviation after truncation (before
    rounding). Raises ValueError if no such distribution exists.
    """

    mean: float
    sd: float = 0.0
    least: int = 1
    most: int = 32_768

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.mean <= self.most or self.sd < 0:
            raise ValueError(f"no lengths from {self.least} to {self.most} have mean {self.mean} and sd {self.sd}")
        if self.sd:
            _fitted(self)

    def draw(self, random: Random) -> int:
        """Draw a length."""
        return self.at(random.random()) if self.sd else round(self.mean)

    def at(self, share: float) -> int:
        """Return the length that this share of all lengths does not exceed."""
        if not self.sd:
            return round(self.mean)
        location, spread = _fitted(self)
        low, high = _ends(self, location, spread)
        side = -1.0 if low > 0 else 1.0  # computed in the lower tail, where shares are exact
        begin, end = _NORMAL.cdf(side * low), _NORMAL.cdf(side * high)
        inside = min(max(begin + share * (end - begin), 1e-15), 1 - 1e-15)
        length = exp(location + spread * side * _NORMAL.inv_cdf(inside))
        return min(self.most, max(self.least, round(length)))


def stratified(lengths: Lengths, shares: Sequence[float], random: Random) -> list[int]:
    """Draw a length for each item, such that the items weighted by `shares` (which sum to 1) follow the distribution.

    Drawn independently, a few popular items would shift the mean. Here each item takes the middle of its own piece of
    the distribution, with the pieces in random order.
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
    """Return the shares of `count` items, the k-th proportional to k^-exponent; they sum to 1."""
    weights = [rank**-exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


@cache
def _fitted(lengths: Lengths) -> tuple[float, float]:
    """Return the lognormal's mu and sigma for which mean and sd are right after truncation, by bisection of sigma."""

    def sd(spread: float) -> float:
        return sqrt(max(0.0, _moment(2, _location(lengths, spread), spread, lengths) - lengths.mean**2))

    spread = _bisected(lambda spread: sd(spread) < lengths.sd, 1e-3, WIDEST)
    if sd(spread) < 0.999 * lengths.sd:
        raise ValueError(f"lengths from {lengths.least} to {lengths.most} with mean {lengths.mean} vary less")
    return _location(lengths, spread), spread


def _location(lengths: Lengths, spread: float) -> float:
    """Return the mu for which the mean is right after truncation."""
    low, high = log(lengths.least) - 10 * spread, log(lengths.most) + 10 * spread
    return _bisected(lambda location: _moment(1, location, spread, lengths) < lengths.mean, low, high)


def _bisected(is_below: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def _moment(order: int, location: float, spread: float, lengths: Lengths) -> float:
    """Return the mean of the order-th power of the truncated lognormal."""
    low, high = _ends(lengths, location, spread)
    inside = _mass(low, high)
    if inside < 1e-200:  # the whole distribution lies beyond one edge
        return float(lengths.least if location < log(lengths.least) else lengths.most) ** order
    shifted = _mass(low - order * spread, high - order * spread)
    return exp(order * location + (order * spread) ** 2 / 2) * shifted / inside


def _ends(lengths: Lengths, location: float, spread: float) -> tuple[float, float]:
    """Return the edges as normal deviates. Half a token beyond each is included, because it is rounded."""
    return (log(lengths.least - 0.5) - location) / spread, (log(lengths.most + 0.5) - location) / spread


def _mass(low: float, high: float) -> float:
    """Return the mass of the standard normal distribution between these; exact in both tails."""
    if low > 0:
        low, high = -high, -low
    return (erfc(-high / sqrt(2)) - erfc(-low / sqrt(2))) / 2
