"""What a worker computed by its own counters, beside what was charged for it."""

from router.core.fleet.engine_work import EngineWork
from router.core.model.cost import Tokens
from router.core.model.events import WorkReport


def reported(*reports: WorkReport | None) -> tuple[float | None, float | None]:
    """The totals of input and output after these reports."""
    work = EngineWork()
    for report in reports:
        work.on_report(report)
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


def test_a_counter_that_is_shown_from_its_first_increment_on_began_at_zero() -> None:
    """SGLang shows none before it has computed something; a report without a counter shown before changes nothing."""
    assert reported(WorkReport(), WorkReport(1000.0)) == (1000.0, None)
    assert reported(WorkReport(), WorkReport(1000.0), WorkReport(), None, WorkReport(1300.0)) == (1300.0, None)


def test_no_more_is_claimed_than_was_counted_and_charged_to_nobody() -> None:
    """Neither what was charged by then, nor what requests that have not started will be, nor the same tokens twice."""
    work = EngineWork()
    work.on_report(WorkReport(1000.0), now=0.0)
    work.charge(Tokens(), Tokens(300, 0, 0))
    work.on_report(WorkReport(2000.0), unstarted=200, now=1.0)
    assert [work.claim_input(400), work.claim_input(400), work.claim_input(400)] == [400, 100, 0]
    work.charge(Tokens(300, 0, 0), Tokens(800, 0, 0))
    work.on_report(WorkReport(2500.0), unstarted=0, now=2.0)
    assert work.claim_input(1000) == 700


def test_what_was_computed_long_ago_is_claimed_no_more() -> None:
    """Whoever it was for has gone, and others do not pay for it."""
    work = EngineWork()
    work.on_report(WorkReport(0.0), now=0.0)
    for second in range(1, 100):
        work.on_report(WorkReport(5000.0), now=float(second))
    assert work.claim_input(1000) == 0


def test_an_engine_that_does_not_count_lets_the_whole_claim_pass() -> None:
    """There is nothing to hold it to."""
    work = EngineWork()
    work.on_report(WorkReport(), now=0.0)
    assert work.claim_input(1000) == 1000


def test_charges_are_added_up_and_put_right() -> None:
    """A bill that falls is given back."""
    work = EngineWork()
    work.charge(Tokens(), Tokens(100, 20, 0))
    work.charge(Tokens(100, 20, 0), Tokens(70, 50, 9))
    assert work.charged == Tokens(70, 50, 9)
