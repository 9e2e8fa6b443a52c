"""A learned window finds out what an engine can take."""

from math import inf

import pytest

from router.core.fleet.service_rate import Turnover
from router.core.fleet.window import (
    FEWEST_REQUESTS,
    FEWEST_TOKENS,
    EngineReport,
    KvLimit,
    RequestLimit,
    TokenLimit,
    UnstartedLimit,
)


def report(
    running: int = 0,
    waiting: int = 0,
    *,
    requests: int | None = None,
    unstarted: int = 0,
    new: int = 0,
    guessed: int = 0,
    kv_tokens: int = 0,
    places: int | None = None,
) -> EngineReport:
    """Build a report. By default all requests of the engine are from this router."""
    here = running + waiting if requests is None else requests
    return EngineReport(running, waiting, here, unstarted, new, guessed, kv_tokens, kv_tokens, places)


def admits(limit: RequestLimit, requests: int, unstarted: int, guessed: int) -> bool:
    """Whether one more request may go, as a window decides it."""
    return requests < limit.limit or limit.admits_more(unstarted, guessed)


def test_reported_places_limit_requests_from_the_first_report() -> None:
    """The limit is a few requests above the places, even if no report shows running and waiting requests together."""
    limit = RequestLimit()
    limit.on_report(report(places=4))
    spare = limit.limit - 4
    assert spare <= 2
    for waiting in (2, 9, 0):
        limit.on_report(report(0, waiting, requests=waiting + 4, places=4))
        assert limit.limit - 4 == spare


def test_a_share_of_the_places_stays_a_share() -> None:
    """If another router's requests run there, this router has fewer places than the engine reports."""
    limit = RequestLimit()
    limit.on_report(report(4, 4, requests=4, places=4))
    assert limit.places == 2


def test_until_something_is_learned_two_steps_of_prefill_may_wait() -> None:
    """At first two steps of prefill may wait, and with half of that ahead a request of any size may go."""
    limit = TokenLimit(16_384)
    assert (limit.limit, limit.low) == (FEWEST_TOKENS, FEWEST_TOKENS / 2)


def test_the_budget_follows_what_an_engine_starts_in_a_step() -> None:
    """The limit is the larger of 2.5 average steps and 2 of the largest bursts, up to the operator's limit."""
    for turnover, expected in (
        (Turnover(4.0, 3000.0), 7500),
        (Turnover(4.0, 1000.0, burst_tokens=5000), 10_000),
        (Turnover(4.0, 90_000.0), 16_384),
    ):
        limit = TokenLimit(16_384)
        limit.learn(turnover)
        assert limit.limit == expected


def test_a_lull_does_not_make_a_fast_engine_slow() -> None:
    """Observed maxima decay slowly."""
    limit = TokenLimit(16_384)
    limit.learn(Turnover(4.0, 4000.0))
    for _ in range(20):
        limit.learn(Turnover(1.0, 10.0))
    assert limit.limit > 0.9 * 10_000


def test_the_unstarted_limit_follows_starts_per_step() -> None:
    """The limit begins low, grows to the requests of a few steps, and decays slowly."""
    limit = UnstartedLimit()
    assert limit.limit == FEWEST_REQUESTS
    limit.learn(Turnover(1.0, 3000.0))
    assert limit.limit == FEWEST_REQUESTS
    limit.learn(Turnover(40.0, 3000.0))
    assert limit.limit == 160
    for _ in range(20):
        limit.learn(Turnover(1.0, 10.0))
    assert 144 < limit.limit < 160


def test_running_requests_are_the_places_while_others_wait() -> None:
    """The limit is the running requests and one more that waits for the next place."""
    limit = RequestLimit()
    assert (limit.places, limit.limit) == (inf, inf)
    limit.on_report(report(8, 12))
    assert (limit.places, limit.limit) == (8.0, 9.0)


def test_an_old_report_is_read_as_a_proportion() -> None:
    """If half of the requests known to the engine run, half of those in flight now are assumed to run."""
    limit = RequestLimit()
    limit.on_report(report(10, 10, requests=40))
    assert limit.places == 20.0


def test_a_limit_that_was_reached_with_nothing_waiting_is_raised() -> None:
    """Only a limit that is reached is raised."""
    limit = RequestLimit()
    limit.on_report(report(4, 4))
    limit.on_report(report(2, 0))
    assert limit.places == 4.0
    limit.on_report(report(5, 0))
    assert limit.places == 6.0


def test_requests_waiting_for_the_next_step_show_nothing() -> None:
    """Such requests show neither that the engine is full nor that it has room."""
    limit = RequestLimit()
    limit.on_report(report(1, 79, unstarted=79, new=79))
    assert limit.places == inf
    limit.on_report(report(8, 4))
    limit.on_report(report(5, 4, unstarted=4, new=4))
    assert limit.places == 8.0


def test_a_limit_falls_slowly() -> None:
    """One report of a few waiting requests does not close the window."""
    limit = RequestLimit()
    limit.on_report(report(80, 20))
    limit.on_report(report(40, 40))
    assert limit.places == 80 - 0.25 * (80 - 40)


def test_as_many_may_wait_as_start_in_a_step() -> None:
    """As many requests may wait, so that a place that becomes free is taken at once."""
    limit = RequestLimit()
    limit.on_report(report(20, 10))
    limit.learn(Turnover(10.0, 500.0))
    assert limit.limit == 20 + 1 + 15
    assert admits(limit, 35, 5, 0)
    assert not admits(limit, 36, 16, 0)


def test_an_idle_engine_has_no_limit_of_places() -> None:
    """A limit learned under load does not persist."""
    limit = RequestLimit()
    limit.on_report(report(4, 4))
    limit.on_report(report(0, 0))
    assert limit.places == inf


def test_the_limit_may_be_exceeded_while_too_few_wait() -> None:
    """More requests may go than the limit while few wait in the engine; those of other routers count as
    waiting, too.
    """
    limit = RequestLimit()
    limit.on_report(report(8, 1, unstarted=1))
    assert admits(limit, 20, 0, 0)
    assert not admits(limit, 20, 1, 0)
    limit.on_report(report(8, 3, unstarted=1))
    assert not admits(limit, 20, 0, 0)


def test_a_guessed_start_counts_as_waiting_until_a_report() -> None:
    """A request whose start is only guessed still counts as waiting, or unstreamed answers would fill the engine's
    queue.
    """
    limit = RequestLimit()
    limit.on_report(report(8, 1, unstarted=1))
    assert not admits(limit, 20, 0, 1)
    limit.on_report(report(9, 0, guessed=1))
    assert admits(limit, 20, 0, 1)


def test_a_reported_capacity_is_not_learned() -> None:
    """Preemptions do not change a reported capacity."""
    limit = KvLimit()
    limit.set_capacity(1000)
    for _ in range(3):
        limit.on_report(report(5, 5, kv_tokens=800), held_back=True)
    assert limit.limit == 1000


def test_a_capacity_is_learned_from_preempted_requests() -> None:
    """Two reports in a row are needed, since a single one may be outdated."""
    limit = KvLimit()
    limit.on_report(report(8, 2, kv_tokens=5000), held_back=False)
    assert limit.limit == inf
    limit.on_report(report(8, 2, kv_tokens=5000), held_back=False)
    assert limit.limit == 5000


def test_unstarted_and_foreign_requests_are_not_preempted() -> None:
    """Requests that wait for their start, or belong to another router, do not lower the limit."""
    limit = KvLimit()
    for _ in range(3):
        limit.on_report(report(8, 2, unstarted=2, kv_tokens=5000), held_back=False)
        limit.on_report(report(8, 9, requests=4, kv_tokens=5000), held_back=False)
    assert limit.limit == inf


@pytest.mark.parametrize(
    ("held_back", "kv_tokens", "grows"), [(True, 4900, True), (False, 4900, False), (True, 900, False)]
)
def test_a_learned_capacity_grows_while_it_holds_requests_back(held_back: bool, kv_tokens: int, grows: bool) -> None:
    """The capacity grows only while it is nearly used up, since otherwise nothing would show whether there is more."""
    limit = KvLimit()
    for _ in range(2):
        limit.on_report(report(8, 2, kv_tokens=5000), held_back=False)
    for _ in range(5):
        limit.on_report(report(8, 0, kv_tokens=kv_tokens), held_back=held_back)
    assert (limit.limit > 5000) == grows


def test_the_capacity_is_at_least_what_ran_without_waiting() -> None:
    """Tokens held while nothing waited are a lower bound of the capacity."""
    limit = KvLimit()
    for _ in range(2):
        limit.on_report(report(8, 2, kv_tokens=5000), held_back=False)
    limit.on_report(report(9, 0, kv_tokens=6000), held_back=False)
    assert limit.limit == 6000
