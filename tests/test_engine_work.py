"""What a worker computed by its own counters, beside what was charged for it."""

from router.core.accounts import Tokens
from router.core.engine_work import EngineWork
from router.core.model import WorkReport


def reported(*reports: WorkReport | None) -> tuple[float | None, float | None]:
    """The totals of input and output after these reports."""
    work = EngineWork()
    for report in reports:
        work.reported(report)
    return work.input_tokens, work.output_tokens


def test_counters_are_added_up_from_the_first_report_on() -> None:
    """What an engine had computed before belongs to nobody here."""
    assert reported(WorkReport(1000.0, 50.0)) == (0.0, 0.0)
    assert reported(WorkReport(1000.0, 50.0), WorkReport(1300.0, 80.0), WorkReport(1400.0, 80.0)) == (400.0, 30.0)


def test_a_counter_that_fell_began_anew() -> None:
    """The engine was started again, and what it counts since is new."""
    assert reported(WorkReport(1000.0, 50.0), WorkReport(20.0, 5.0)) == (20.0, 5.0)


def test_an_engine_that_does_not_count_is_not_taken_to_compute_nothing() -> None:
    """Neither all of the time nor of one of the two."""
    assert reported(None, WorkReport()) == (None, None)
    assert reported(WorkReport(1.0), WorkReport(4.0)) == (3.0, None)


def test_charges_are_added_up_and_put_right() -> None:
    """A bill that falls is given back."""
    work = EngineWork()
    work.charge(Tokens(), Tokens(100, 20, 0))
    work.charge(Tokens(100, 20, 0), Tokens(70, 50, 9))
    assert work.charged == Tokens(70, 50, 9)
