"""A worker's own counters bound what may be claimed beyond the charges for its work."""

from router.core.fleet.engine_work import EngineWork
from router.core.model.cost import Tokens
from router.core.model.events import WorkReport


def totals_after(*reports: WorkReport | None) -> tuple[float | None, float | None]:
    """Return the totals of input and output after these reports."""
    work = EngineWork()
    for report in reports:
        work.on_report(report)
    return work.input_tokens, work.output_tokens


def test_counters_are_added_up_from_the_first_report_on() -> None:
    """Work before the first report does not count."""
    assert totals_after(WorkReport(1000.0, 50.0)) == (0.0, 0.0)
    assert totals_after(WorkReport(1000.0, 50.0), WorkReport(1300.0, 80.0), WorkReport(1400.0, 80.0)) == (400.0, 30.0)


def test_a_counter_that_decreased_was_reset() -> None:
    """After a restart of the engine, its whole count is new work."""
    assert totals_after(WorkReport(1000.0, 50.0), WorkReport(20.0, 5.0)) == (20.0, 5.0)


def test_an_engine_that_does_not_count_is_not_taken_to_compute_nothing() -> None:
    """A missing counter gives None, not 0."""
    assert totals_after(None, WorkReport()) == (None, None)
    assert totals_after(WorkReport(1.0), WorkReport(4.0)) == (3.0, None)


def test_a_counter_that_appears_later_began_at_zero() -> None:
    """SGLang exports a counter only after its first increment. A report without a known counter changes nothing."""
    assert totals_after(WorkReport(), WorkReport(1000.0)) == (1000.0, None)
    assert totals_after(WorkReport(), WorkReport(1000.0), WorkReport(), None, WorkReport(1300.0)) == (1300.0, None)


def test_claims_are_limited_to_uncharged_tokens() -> None:
    """Tokens charged already, tokens of unstarted requests, and tokens claimed before are not claimed."""
    work = EngineWork()
    work.on_report(WorkReport(1000.0), now=0.0)
    work.on_report(WorkReport(2000.0), Tokens(300), unstarted=200, now=1.0)
    assert [work.claim_input(400), work.claim_input(400), work.claim_input(400)] == [400, 100, 0]
    work.on_report(WorkReport(2500.0), Tokens(800), unstarted=0, now=2.0)
    assert work.claim_input(1000) == 700


def test_old_uncharged_tokens_are_not_claimed() -> None:
    """Old uncharged tokens belong to clients that are gone, and other clients do not pay for them."""
    work = EngineWork()
    work.on_report(WorkReport(0.0), now=0.0)
    for second in range(1, 100):
        work.on_report(WorkReport(5000.0), now=float(second))
    assert work.claim_input(1000) == 0


def test_an_engine_that_does_not_count_lets_the_whole_claim_pass() -> None:
    """Without counters there is no limit to a claim."""
    work = EngineWork()
    work.on_report(WorkReport(), now=0.0)
    assert work.claim_input(1000) == 1000
