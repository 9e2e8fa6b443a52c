"""The VTC paper's measure of fairness, on calls written out by hand."""

import pytest

from bench.report.records import Record, Result, ServiceSample
from bench.report.service_difference import difference_line, service_difference, widest
from bench.workloads.parts.traffic import Outcome


def call(client: str, service: int, arrived: float, started: float | None, finished: float | None) -> Record:
    """Return a call of this service: half is input and half is output, of which each token counts twice."""
    outcome = Outcome.UNFINISHED if finished is None else Outcome.DONE
    return Record(
        "r", client, outcome, arrived, arrived, started, finished, "w1", "x", service // 2, 0, 0, service // 4
    )


def within(begin: float, finished: float, service: int, client: str = "a") -> Record:
    """Return a call that arrives, starts and ends with its window."""
    return call(client, service, begin, begin, finished)


def test_the_client_served_most_is_not_behind() -> None:
    """One client alone has no difference, however much more it asked for than it got."""
    assert service_difference([within(0, 60, 600), call("a", 6000, 1, None, None)], 60.0) == (0.0, 0.0, 0.0)


def test_a_client_that_gets_all_it_asks_for_is_not_behind() -> None:
    """A client that asks for less than another is served adds nothing when it gets it."""
    assert service_difference([within(0, 60, 600), within(0, 60, 60, "b")], 60.0).largest == 0.0


def test_an_unserved_client_is_behind_by_what_it_asked_for() -> None:
    """A client that asks for 5 a second and is served nothing, beside one served 10, is behind by 5."""
    assert service_difference([within(0, 60, 600), call("b", 300, 10, 90, 100)], 60.0).largest == pytest.approx(5.0)


def test_a_client_is_behind_at_most_by_the_largest_service() -> None:
    """A client that asks for 20 a second and is served nothing, beside one served 10, is behind by 10."""
    assert service_difference([within(0, 60, 600), call("b", 1200, 10, 90, 100)], 60.0).largest == pytest.approx(10.0)


def test_differences_of_clients_add_up() -> None:
    """Two clients that are each behind by 5 make 10."""
    behind = [call(name, 300, 10, 90, 100) for name in "bc"]
    assert service_difference([within(0, 60, 600), *behind], 60.0).largest == pytest.approx(10.0)


def test_service_in_a_window_without_demand_is_a_difference() -> None:
    """A client served in a window in which it asked for nothing differs by that service, up to the largest service."""
    records = [within(30, 90, 600), call("b", 240, 0, 30, 90)]
    assert service_difference(records, 90.0).largest == pytest.approx(4.0)


def test_service_is_spread_from_the_first_token_to_the_last() -> None:
    """Of a call that streams from 30 s to 90 s, the window that ends at 60 s gets one half and the next window all."""
    records = [call("a", 1200, 0, 30, 90), call("b", 6000, 0, None, None), call("b", 6000, 30, None, None)]
    spread = service_difference(records, 90.0)
    assert spread.largest == pytest.approx(20.0)
    assert spread.mean == pytest.approx((10.0 + 20.0) / 2)
    assert spread.variance == pytest.approx(25.0)


def test_an_answer_of_one_token_is_served_at_once() -> None:
    """A call whose first token is its last counts in full in the windows that contain this token."""
    records = [call("a", 600, 5, 5, 5), call("b", 6000, 0, None, None), call("b", 6000, 40, None, None)]
    assert service_difference(records, 120.0).mean == pytest.approx(10.0 / 3)


def test_ten_minutes_are_nineteen_windows() -> None:
    """Windows of a minute begin every half minute, and none extends beyond the end."""
    records = [within(0, 30, 19 * 60), call("b", 100_000, 0, None, None)]
    assert service_difference(records, 600.0).mean == pytest.approx(1.0)


def test_less_than_a_window_is_refused() -> None:
    """A time too short for one window raises ValueError."""
    with pytest.raises(ValueError, match="window"):
        service_difference([], 59.0)


def timeline(*leads: float) -> Result:
    """Return a result measured from 10 s on, with the lead in service of `a` over `b` at every ten seconds from 0 s
    on.
    """
    samples = [
        ServiceSample(10.0 * number, {"a": 100 + lead, "b": 100}, {"a": 0.0, "b": 0.0})
        for number, lead in enumerate(leads)
    ]
    return Result(10.0 * (len(leads) - 2), 10.0, (), {}, {"a": 1.0, "b": 1.0}, tuple(samples))


def test_a_lead_begins_at_zero_and_ends_with_the_measured_time() -> None:
    """The line covers the measured time only, and is relative to its value at the beginning of that time."""
    assert difference_line(timeline(7, 5, 9, 1, 50), "a", "b") == [(10.0, 0), (20.0, 4), (30.0, -4)]


def test_the_widest_change_counts_in_both_directions() -> None:
    """The widest change of a lead is that of the interval in which it rose or fell most."""
    assert widest([(0.0, 0.0), (1.0, 4.0), (2.0, -4.0), (3.0, 1.0)]) == 8.0
