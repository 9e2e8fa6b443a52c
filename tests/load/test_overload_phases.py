"""What `python -m tests.chaos.overload` reports about its phases."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.chaos.load import Called
from tests.chaos.phases import Phase, measured, objections, table
from tests.chaos.raw_connection import Reply

WELL = Phase("x", 100.0, 30.0, 70.0, 0.001, 0.01, 5.0, 1.0, 0.1, 0.2, 40, 0, 0.5, 0.001, Counter())


def answered(sent: float, first: float, ended: float, *, light: bool) -> Called:
    return Called(light, 0.001, Reply(sent, 200, None, sent + first, sent + ended, whole=True))


def refused(sent: float, seconds: float, reason: str) -> Called:
    return Called(False, 0.002, Reply(sent, 429, reason, None, sent + seconds))


def test_a_phase_is_what_was_sent_and_answered_in_it() -> None:
    """Answers count in the phase in which they end; refusals without a wait are kept apart from those after one."""
    called = [
        answered(9.0, 0.5, 2.0, light=False),
        answered(10.0, 0.5, 2.0, light=True),
        answered(19.0, 0.7, 2.0, light=True),
        refused(11.0, 0.01, "rejected-saturated"),
        refused(12.0, 3.0, "rejected-displaced"),
        refused(20.0, 9.0, "rejected-saturated"),
        Called(True, 0.0, Reply(13.0, 200, None, 13.1, 14.0, whole=False)),
        Called(False, 0.0, Reply(14.0, 0, None, None, 30.0), cut=True),
    ]
    seen = measured("p", called, 10.0, 20.0, 4.0)
    assert (seen.offered, seen.answered, seen.refused, seen.gave_way) == (0.6, 0.2, 0.2, 0.1)
    assert [seen.refusal_p99, seen.gave_way_p99] == pytest.approx([0.01, 3.0])
    assert [seen.ttft_p50, seen.ttft_p95] == pytest.approx([0.5, 0.7])
    assert (seen.light, seen.light_refused, seen.cores, seen.late_p99) == (3, 0, 0.4, 0.002)
    assert seen.odd == {"status 200": 1}
    assert all(text in table([seen]) for text in ("p\n", "700.0", "10.0"))


@pytest.mark.parametrize(
    ("worse", "objected"),
    [
        (replace(WELL, answered=28.6), 0),
        (replace(WELL, answered=28.4), 1),
        (replace(WELL, refusal_p99=0.05), 1),
        (replace(WELL, refusal_p99=None), 1),
        (replace(WELL, ttft_p50=0.2, ttft_p95=0.4), 0),
        (replace(WELL, ttft_p50=0.21), 1),
        (replace(WELL, ttft_p95=0.41), 1),
        (replace(WELL, light_refused=1), 1),
        (replace(WELL, late_p99=0.03), 1),
        (replace(WELL, odd=Counter({"status 0": 2})), 1),
    ],
)
def test_harm_done_by_a_flood_is_reported(worse: Phase, objected: int) -> None:
    """The report objects to lower throughput, slow refusals, light clients that wait or are refused, and calls
    without an end.
    """
    assert len(objections(WELL, WELL, worse)) == objected
