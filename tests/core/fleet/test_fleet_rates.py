"""The service rates of a fleet equal those of a look at each worker."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.service_rate import SPEED_TOLERANCE, FleetRates
from router.core.model.request import WorkerId

Rate = float | None
rates = st.none() | st.floats(0.5, 8.0)
changes = st.lists(st.tuples(st.sampled_from([WorkerId(name) for name in "abcde"]), rates, rates), max_size=12)


def speed(of: WorkerId, full: dict[WorkerId, Rate], least: dict[WorkerId, Rate]) -> float:
    """Compute the speed by visiting all workers."""
    counting = {worker: rate for worker, rate in full.items() if rate is not None}
    if not counting:
        return 1.0
    mean_of_full = sum(counting.values()) / len(counting)
    for worker, rate in least.items():
        if worker not in counting and rate is not None and rate > mean_of_full:
            counting[worker] = rate
    if of not in counting:
        return 1.0
    found = counting[of] / (sum(counting.values()) / len(counting))
    return 1.0 if 1 / SPEED_TOLERANCE < found < SPEED_TOLERANCE else found


def together(workers: Collection[WorkerId], full: dict[WorkerId, Rate], least: dict[WorkerId, Rate]) -> Rate:
    """Compute the rate of several workers by visiting them."""
    known = [rate for worker in workers if (rate := full[worker] or least[worker]) is not None]
    return sum(known) * len(workers) / len(known) if known else None


@given(changes)
def test_speeds_and_sums_equal_those_of_a_scan(changes: list[tuple[WorkerId, Rate, Rate]]) -> None:
    """To the last bit, after every change."""
    fleet = FleetRates()
    full: dict[WorkerId, Rate] = {}
    least: dict[WorkerId, Rate] = {}
    for worker, while_full, at_least in changes:
        fleet.set(worker, while_full, at_least)
        full[worker], least[worker] = while_full, at_least
        assert [fleet.speed(each) for each in full] == [speed(each, full, least) for each in full]
        assert fleet.together(full) == together(full, full, least)


def test_a_worker_that_is_gone_counts_no_more() -> None:
    """Neither for the mean nor for the sum."""
    fleet = FleetRates()
    fast, slow = WorkerId("fast"), WorkerId("slow")
    fleet.set(fast, 3.0, None)
    fleet.set(slow, 1.0, None)
    assert (fleet.speed(slow), fleet.together([fast, slow])) == (0.5, 4.0)
    fleet.remove(fast)
    assert (fleet.speed(slow), fleet.together([slow])) == (1.0, 1.0)
    with pytest.raises(KeyError):
        fleet.together([fast])
