"""Arrival processes: their rates, their spacing, and the arrivals that they leave out."""

from collections.abc import Iterable
from itertools import islice, pairwise, takewhile
from math import inf
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads.parts.arrivals import gamma, in_turn, on_off, poisson, ramp, uniform


def until(end: float, times: Iterable[float]) -> list[float]:
    return list(takewhile(lambda at: at < end, times))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_their_mean_and_variation(cv: float) -> None:
    """The gaps' mean is one over the rate, and their standard deviation is cv times the mean."""
    gaps = [after - before for before, after in pairwise(islice(gamma(Random(1), 4.0, cv), 20_000))]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_poisson_is_gamma_with_cv_1() -> None:
    """The standard deviation of the gaps equals their mean."""
    gaps = [after - before for before, after in pairwise(islice(poisson(Random(1), 4.0), 20_000))]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("process", [lambda r: gamma(r, 2.0, 2.0), lambda r: poisson(r, 2.0)])
def test_times_depend_only_on_the_random_generator(process: object) -> None:
    """Equal seeds give equal times, and other seeds give other times."""
    assert callable(process)
    one, same, other = (list(islice(process(Random(seed)), 10)) for seed in (1, 1, 2))
    assert one == same != other
    assert one == sorted(one)


@given(st.floats(0.01, 100), st.floats(0, 0.99))
def test_uniform_times_are_equally_far_apart(rate: float, phase: float) -> None:
    """The first time is the phase, and each other one follows a gap later."""
    times = list(islice(uniform(rate, phase), 20))
    assert times[0] == phase / rate
    assert [after - before for before, after in pairwise(times)] == pytest.approx([1 / rate] * 19)


@given(st.floats(0, 5), st.floats(0.1, 5), st.floats(1, 300), st.floats(0, 0.99))
def test_a_ramp_has_as_many_arrivals_as_its_area(first: float, last: float, seconds: float, phase: float) -> None:
    """At any time, also after the ramp, the number of arrivals is the area under the rate, within one."""
    times = until(2 * seconds, ramp(first, last, seconds, phase))
    assert times == sorted(times)
    for share in (0.25, 0.5, 1.0):
        at = share * seconds
        area = first * at + (last - first) / seconds * at**2 / 2
        assert abs(len([time for time in times if time <= at]) - area) <= 1.01
    assert abs(len(times) - (first + last) / 2 * seconds - last * seconds) <= 1.01


def test_a_ramp_down_to_zero_ends() -> None:
    """If the last rate is 0, there are no arrivals after the ramp."""
    assert len(list(ramp(2.0, 0.0, 10.0))) in (10, 11)


def test_windows_are_on_and_off_in_turn() -> None:
    """Arrivals in every second window are left out, and the others are unchanged."""
    assert until(40.0, on_off(uniform(0.2), 10.0)) == [0.0, 5.0, 20.0, 25.0]


def test_processes_follow_each_other() -> None:
    """Each process begins where the one before it ends and stops after its own duration; nothing follows the last
    one.
    """
    stretches = [(10.0, uniform(0.2)), (5.0, uniform(1.0, 0.5)), (10.0, iter([3.0]))]
    assert list(in_turn(stretches)) == [0.0, 5.0, 10.5, 11.5, 12.5, 13.5, 14.5, 18.0]
    assert until(4.0, in_turn([(1.0, iter([])), (inf, uniform(1.0))])) == [1.0, 2.0, 3.0]
