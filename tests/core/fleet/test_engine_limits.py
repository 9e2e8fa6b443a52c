"""What a learned window finds out of an engine."""

from math import inf

import pytest

from router.core.fleet.engine_limits import (
    FEWEST_REQUESTS,
    FEWEST_TOKENS,
    EngineReport,
    KvLimit,
    RequestLimit,
    TokenLimit,
    UnstartedLimit,
)
from router.core.fleet.service_rate import Turnover


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
    """Unless told otherwise, all that the engine has is from here."""
    here = running + waiting if requests is None else requests
    return EngineReport(running, waiting, here, unstarted, new, guessed, kv_tokens, kv_tokens, places)


def test_an_engine_that_tells_its_places_is_sent_a_few_requests_more() -> None:
    """From its first report on, though none of its reports shows a request that runs beside those that wait."""
    limit = RequestLimit()
    limit.on_report(report(places=4))
    spare = limit.limit - 4
    assert spare <= 2
    for waiting in (2, 9, 0):
        limit.on_report(report(0, waiting, requests=waiting + 4, places=4))
        assert limit.limit - 4 == spare


def test_a_share_of_the_places_stays_a_share() -> None:
    """Where another router's requests run too, there are fewer than the engine tells."""
    limit = RequestLimit()
    limit.on_report(report(4, 4, requests=4, places=4))
    assert limit.places == 2


def test_until_something_is_learned_two_steps_of_prefill_may_wait() -> None:
    """And with half of that ahead, one of any size."""
    limit = TokenLimit(16_384)
    assert (limit.limit, limit.low) == (FEWEST_TOKENS, FEWEST_TOKENS / 2)


def test_the_budget_follows_what_an_engine_starts_in_a_step() -> None:
    """The more of an average of two and a half steps and of two such as the largest, within the operator's limit."""
    for turnover, expected in (
        (Turnover(4.0, 3000.0), 7500),
        (Turnover(4.0, 1000.0, burst_tokens=5000), 10_000),
        (Turnover(4.0, 90_000.0), 16_384),
    ):
        limit = TokenLimit(16_384)
        limit.learn(turnover)
        assert limit.limit == expected


def test_a_lull_does_not_make_a_fast_engine_slow() -> None:
    """What was seen once wears away slowly."""
    limit = TokenLimit(16_384)
    limit.learn(Turnover(4.0, 4000.0))
    for _ in range(20):
        limit.learn(Turnover(1.0, 10.0))
    assert limit.limit > 0.9 * 10_000


def test_what_was_not_seen_to_start_follows_what_an_engine_starts_in_a_step() -> None:
    """A few at first, then those of a few steps, and a lull changes little."""
    limit = UnstartedLimit()
    assert limit.limit == FEWEST_REQUESTS
    limit.learn(Turnover(1.0, 3000.0))
    assert limit.limit == FEWEST_REQUESTS
    limit.learn(Turnover(40.0, 3000.0))
    assert limit.limit == 160
    for _ in range(20):
        limit.learn(Turnover(1.0, 10.0))
    assert 144 < limit.limit < 160


def test_an_engine_with_requests_waiting_inside_it_runs_all_that_it_can() -> None:
    """The limit is there, and one more that waits for the next place."""
    limit = RequestLimit()
    assert (limit.places, limit.limit) == (inf, inf)
    limit.on_report(report(8, 12))
    assert (limit.places, limit.limit) == (8.0, 9.0)


def test_a_report_that_is_older_than_what_was_sent_since_is_read_as_a_proportion() -> None:
    """Half of what the engine knew of ran, so half of what is in flight now is taken to run."""
    limit = RequestLimit()
    limit.on_report(report(10, 10, requests=40))
    assert limit.places == 20.0


def test_a_limit_that_was_reached_with_nothing_waiting_is_raised() -> None:
    """While it is not reached nothing is learned."""
    limit = RequestLimit()
    limit.on_report(report(4, 4))
    limit.on_report(report(2, 0))
    assert limit.places == 4.0
    limit.on_report(report(5, 0))
    assert limit.places == 6.0


def test_what_waits_for_the_next_step_to_begin_shows_nothing() -> None:
    """Neither that the engine is full, nor that it has room."""
    limit = RequestLimit()
    limit.on_report(report(1, 79, unstarted=79, new=79))
    assert limit.places == inf
    limit.on_report(report(8, 4))
    limit.on_report(report(5, 4, unstarted=4, new=4))
    assert limit.places == 8.0


def test_a_limit_falls_slowly() -> None:
    """One report of a few that wait does not close the window."""
    limit = RequestLimit()
    limit.on_report(report(80, 20))
    limit.on_report(report(40, 40))
    assert limit.places == 80 - 0.25 * (80 - 40)


def test_where_many_start_in_a_step_as_many_may_wait() -> None:
    """So that a place that falls free is taken at once."""
    limit = RequestLimit()
    limit.on_report(report(20, 10))
    limit.learn(Turnover(10.0, 500.0))
    assert limit.limit == 20 + 1 + 15
    assert limit.admit(35, 5, 0)
    assert not limit.admit(36, 16, 0)


def test_an_idle_engine_has_every_place() -> None:
    """What was learned of a crowded one is not kept for ever."""
    limit = RequestLimit()
    limit.on_report(report(4, 4))
    limit.on_report(report(0, 0))
    assert limit.places == inf


def test_beyond_the_limit_one_may_go_while_fewer_wait_than_are_to() -> None:
    """Those that wait in the engine and are not known to be from here count too."""
    limit = RequestLimit()
    limit.on_report(report(8, 1, unstarted=1))
    assert limit.admit(20, 0, 0)
    assert not limit.admit(20, 1, 0)
    limit.on_report(report(8, 3, unstarted=1))
    assert not limit.admit(20, 0, 0)


def test_a_start_that_is_only_guessed_is_taken_to_wait_until_a_report() -> None:
    """Else whole answers would fill the engine's queue without end."""
    limit = RequestLimit()
    limit.on_report(report(8, 1, unstarted=1))
    assert not limit.admit(20, 0, 1)
    limit.on_report(report(9, 0, guessed=1))
    assert limit.admit(20, 0, 1)


def test_a_capacity_that_was_told_is_not_sought() -> None:
    """Whatever is thrown out."""
    limit = KvLimit()
    limit.set_capacity(1000)
    for _ in range(3):
        limit.on_report(report(5, 5, kv_tokens=800), held_back=True)
    assert limit.limit == 1000


def test_a_capacity_is_found_when_what_had_started_waits_again() -> None:
    """At two reports in a row, since one alone may be older than what is known here."""
    limit = KvLimit()
    limit.on_report(report(8, 2, kv_tokens=5000), held_back=False)
    assert limit.limit == inf
    limit.on_report(report(8, 2, kv_tokens=5000), held_back=False)
    assert limit.limit == 5000


def test_what_waits_for_its_start_was_not_thrown_out() -> None:
    """Nor what another router sent."""
    limit = KvLimit()
    for _ in range(3):
        limit.on_report(report(8, 2, unstarted=2, kv_tokens=5000), held_back=False)
        limit.on_report(report(8, 9, requests=4, kv_tokens=5000), held_back=False)
    assert limit.limit == inf


@pytest.mark.parametrize(
    ("held_back", "kv_tokens", "grows"), [(True, 4900, True), (False, 4900, False), (True, 900, False)]
)
def test_a_capacity_that_was_found_grows_while_it_holds_requests_back(
    held_back: bool, kv_tokens: int, grows: bool
) -> None:
    """And while it is nearly reached; else nothing would show whether there is more."""
    limit = KvLimit()
    for _ in range(2):
        limit.on_report(report(8, 2, kv_tokens=5000), held_back=False)
    for _ in range(5):
        limit.on_report(report(8, 0, kv_tokens=kv_tokens), held_back=held_back)
    assert (limit.limit > 5000) == grows


def test_what_was_held_and_ran_was_not_too_much() -> None:
    """The capacity is at least what was held while nothing waited."""
    limit = KvLimit()
    for _ in range(2):
        limit.on_report(report(8, 2, kv_tokens=5000), held_back=False)
    limit.on_report(report(9, 0, kv_tokens=6000), held_back=False)
    assert limit.limit == 6000
