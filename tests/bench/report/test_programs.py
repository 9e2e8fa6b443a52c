"""The latencies of whole programs."""

import pytest

from bench.report.programs import summarise_programs
from bench.report.records import Record
from bench.workloads.parts.traffic import Outcome


def call(
    program: str | None,
    arrived: float,
    finished: float | None,
    calls: int = 1,
    outcome: Outcome = Outcome.DONE,
    client: str = "a",
) -> Record:
    """Return the record of one call; a call without an end is unfinished."""
    outcome = Outcome.UNFINISHED if finished is None else outcome
    name = f"r{arrived}{client}"
    return Record(name, client, outcome, arrived, arrived, None, finished, "w1", "x", 1, 0, 0, 1, program, calls)


def test_a_program_lasts_from_its_first_arrival_to_its_last_end() -> None:
    """Neither the order of ends nor another client's program of the same name changes the latency."""
    records = [
        call("1", 1, 9, 3),
        call("1", 1, 2, 3),
        call("1", 2, 4, 3),
        call("1", 1, 3, client="b"),
        call(None, 5, 8),
    ]
    summary = summarise_programs(records, 0, 10)
    assert (summary["done"], summary["unfinished"], summary["broken"]) == (3, 0, 0)
    assert summary["latency_p50_s"] == 3.0
    assert summary["latency_p99_s"] == 8.0
    assert summary["latency_mean_s"] == pytest.approx((8 + 2 + 3) / 3)


def test_an_unfinished_program_does_not_count_as_short() -> None:
    """A program with calls that run or are still to come at the end counts as at least its duration so far."""
    running = [call("1", 1, 2, 3), call("1", 2, None, 3)]
    pausing = [call("2", 4, 5, 3)]
    whole = [call("3", 3, 5, 2), call("3", 4, 6, 2)]
    summary = summarise_programs([*running, *pausing, *whole], 0, 10)
    assert (summary["done"], summary["unfinished"]) == (1, 2)
    assert summary["latency_p50_s"] == summary["latency_p99_s"] == 9.0
    assert summary["latency_mean_s"] == pytest.approx(3 + 2 / 3 * (9 - 3))


def test_a_broken_program_is_counted_apart() -> None:
    """A program with a call that was not answered never completes, so it has no latency."""
    records = [call("1", 1, 2, 3), call("1", 2, 3, 3, Outcome.REJECTED), call("2", 1, 5)]
    summary = summarise_programs(records, 0, 10)
    assert (summary["done"], summary["unfinished"], summary["broken"]) == (1, 0, 1)
    assert summary["latency_p99_s"] == 4.0


def test_programs_of_the_warm_up_are_left_out() -> None:
    """Only programs that begin in the measured time count, and without any there are no latencies."""
    summary = summarise_programs([call("1", 1, 12, 2), call("1", 11, 14, 2)], 10, 20)
    assert (summary["done"], summary["latency_p50_s"], summary["latency_mean_s"]) == (0, None, None)
