"""Arrival processes: ascending times in seconds since the beginning, endless unless stated otherwise."""

from collections.abc import Iterable, Iterator
from itertools import count
from math import inf, sqrt
from random import Random


def gamma(random: Random, rate: float, cv: float) -> Iterator[float]:
    """Yield `rate` arrivals per second, with Gamma distributed gaps of this coefficient of variation.

    Shape 1/cv² and scale cv²/rate, as in the DLPM paper (6.1) and those it follows; cv = 1 is a Poisson process.
    """
    shape, scale = 1 / cv**2, cv**2 / rate
    at = 0.0
    while True:
        at += random.gammavariate(shape, scale)
        yield at


def poisson(random: Random, rate: float) -> Iterator[float]:
    """Yield the arrival times of a Poisson process with `rate` arrivals per second."""
    at = 0.0
    while True:
        at += random.expovariate(rate)
        yield at


def uniform(rate: float, phase: float = 0.0) -> Iterator[float]:
    """Yield arrival times with equal gaps, the first after the share `phase` of a gap."""
    return ((number + phase) / rate for number in count())


def ramp(first: float, last: float, seconds: float, phase: float = 0.0) -> Iterator[float]:
    """Yield arrivals at a rate that goes linearly from `first` to `last` within `seconds`, and then stays.

    Deterministic: one arrival for each whole number that the rate's integral passes, shifted by `phase`.
    """
    slope = (last - first) / seconds
    total = (first + last) / 2 * seconds
    for number in count():
        due = number + phase
        if due <= total:
            # The earlier root of first·t + slope·t²/2 = due, in the form that allows a slope of 0.
            root = first + sqrt(max(0.0, first**2 + 2 * slope * due))
            yield 2 * due / root if root else 0.0
        elif last > 0:
            yield seconds + (due - total) / last
        else:
            return


def on_off(times: Iterable[float], window: float) -> Iterator[float]:
    """Yield the times in every other window of `window` seconds, beginning with the first."""
    return (at for at in times if int(at / window) % 2 == 0)


def in_turn(stretches: Iterable[tuple[float, Iterable[float]]]) -> Iterator[float]:
    """Chain processes, given as (seconds that it lasts, times since it began). Ends with the last one."""
    begin = 0.0
    for seconds, times in stretches:
        end = begin + seconds
        for at in times:
            if begin + at >= end:
                break
            yield begin + at
        if end == inf:
            return
        begin = end
