"""How fast one worker is, as its answers show."""

import pytest

from router.core.fleet.service_rate import FIRST_SECONDS_PER_TOKEN, LEAST_STEP_TOKENS, ServiceRate, Turnover


def learned(seconds_per_token: float, starts: int = 200, *, telling: bool = True) -> ServiceRate:
    """A pace after so many starts of 1000 tokens, each computed right after the one before."""
    pace = ServiceRate()
    now = 0.0
    for _ in range(starts):
        dispatched, now = now, now + 1000 * seconds_per_token
        pace.advance(now, streams=0, busy=True, full=True)
        pace.observe_start(now, dispatched, 1000, telling=telling)
        pace.count_start(1000)
    return pace


def test_prefill_is_guessed_until_it_is_seen() -> None:
    """In proportion to the tokens."""
    assert ServiceRate().prefill_seconds(500) == 500 * FIRST_SECONDS_PER_TOKEN


@pytest.mark.parametrize("seconds_per_token", [1e-5, 1e-4, 2e-3])
def test_prefill_is_learned_from_what_starts(seconds_per_token: float) -> None:
    """Within a few per cent, however far the first guess was off."""
    assert learned(seconds_per_token).prefill_seconds(1000) == pytest.approx(1000 * seconds_per_token, rel=0.1)


@pytest.mark.parametrize(("telling", "slower"), [(False, False), (True, True)])
def test_only_what_had_a_place_shows_that_prefill_is_slow(telling: bool, slower: bool) -> None:
    """Any other may have waited for something else."""
    pace = learned(1e-4)
    known = []
    for number in range(10):
        now = 100.0 + 5.0 * number
        pace.advance(now, streams=0, busy=True, full=True)
        pace.observe_start(now, now - 5.0, 1000, telling=telling)
        known.append(pace.prefill_seconds(1000))
    assert (known[-1] > known[0]) == slower


def test_a_first_start_that_waited_for_a_cold_engine_is_soon_forgotten() -> None:
    """What comes sooner after it is believed at once."""
    pace = ServiceRate()
    pace.observe_start(30.0, 0.0, 300, telling=True)
    for number in range(1, 4):
        pace.observe_start(40.0 + number, 40.0 + number - 0.1, 1000, telling=True)
    assert pace.prefill_seconds(1000) == pytest.approx(0.1, rel=0.05)


def test_an_answer_that_comes_all_at_once_does_not_show_how_fast_answers_grow() -> None:
    """It was computed before; a second of streaming is needed to tell."""
    pace = ServiceRate()
    first = pace.seconds_per_output_token
    pace.advance(0.1, streams=1, busy=True, full=False, shown=1)
    pace.add_output(1000)
    assert pace.seconds_per_output_token == first


def test_small_prompts_show_the_cost_of_a_step_and_not_of_tokens() -> None:
    """A start of a few tokens says nothing of prefill."""
    pace = ServiceRate()
    for number in range(1, 50):
        pace.observe_start(float(number), number - 0.9, 10, telling=True)
    assert pace.prefill_seconds(1) == FIRST_SECONDS_PER_TOKEN


def test_turnover_is_what_starts_while_every_stream_gains_a_token() -> None:
    """Eight streams gain a token a step of 0.1 s, and two requests of 50 tokens start in each."""
    pace = ServiceRate()
    for step in range(1, 200):
        pace.advance(0.1 * step, streams=8, busy=True, full=True)
        pace.add_service(16.0, 8, full=True)
        for _ in range(2):
            pace.observe_start(0.1 * step, 0.1 * step - 0.1, 50, telling=True)
            pace.count_start(50)
            pace.add_service(0.0, 1, full=True)
    assert pace.streams == pytest.approx(8.0)
    turnover = pace.turnover
    assert (turnover.requests, turnover.tokens) == pytest.approx((2.0, 100.0), rel=0.05)
    assert turnover.burst_tokens == 50


def test_nothing_is_told_before_it_worked_for_a_while() -> None:
    """A single answer is no average."""
    assert ServiceRate().turnover == Turnover()
    assert (ServiceRate().rate, ServiceRate().least_rate, ServiceRate().streams) == (None, None, 1.0)


def test_the_rate_is_of_the_time_without_room_for_more() -> None:
    """One that has little to do serves little, however fast it is; that it serves at least so much is known."""
    pace = ServiceRate()
    for second in range(1, 30):
        pace.advance(float(second), streams=1, busy=True, full=False)
        pace.add_service(100.0, 50, full=False)
    assert pace.rate is None
    assert pace.least_rate == pytest.approx(100.0, rel=0.05)
    for second in range(30, 60):
        pace.advance(float(second), streams=9, busy=True, full=True)
        pace.add_service(700.0, 350, full=True)
    assert pace.rate == pytest.approx(700.0, rel=0.05)


def test_rest_wears_nothing_away() -> None:
    """After a night without work it is known to be as fast as in the evening."""
    pace = learned(1e-4)
    pace.add_service(500.0, 0, full=True)
    rate = pace.rate
    pace.advance(pace._now + 40_000.0, streams=0, busy=False, full=False)
    assert rate is not None
    assert pace.rate == rate


def test_whole_answers_show_that_prefill_is_at_least_so_fast() -> None:
    """What ended in a while was computed in no more time, though none of it showed its start."""
    pace = ServiceRate()
    for second in range(1, 400):
        pace.advance(float(second), streams=0, busy=True, full=False)
        pace.observe_unseen_end(50_000)
    assert pace.prefill_seconds(50_000) == pytest.approx(1.0, rel=0.1)


def test_one_long_prompt_does_not_show_what_a_step_takes() -> None:
    """It may have been computed in several; only what started together with another was computed in one."""
    pace = ServiceRate()
    pace.advance(2.0, streams=0, busy=True, full=True)
    pace.observe_start(2.0, 0.0, 20_000, telling=True)
    pace.count_start(20_000)
    assert pace.turnover.tokens == 0
    assert pace.turnover.burst_tokens == 0


def test_a_long_prefill_is_no_rate_of_nothing() -> None:
    """A worker that is full for seconds before it has served anything is not infinitely slow."""
    pace = ServiceRate()
    pace.advance(5.0, streams=0, busy=True, full=True)
    assert (pace.rate, pace.least_rate) == (None, None)


def test_what_is_taken_back_makes_no_rate_below_zero() -> None:
    """An engine's usage may take back more than was charged of late."""
    pace = ServiceRate()
    pace.advance(5.0, streams=1, busy=True, full=True)
    pace.add_service(-10.0, -5, full=True)
    assert (pace.rate, pace.least_rate) == (None, None)


def test_a_decode_step_is_learned_while_nothing_is_prefilled() -> None:
    """Steps that share their time with prefill count for nothing, and none is taken for shorter than it can be."""
    pace = ServiceRate()
    least = pace.prefill_seconds(LEAST_STEP_TOKENS)
    assert pace.decode_seconds == least
    for number in range(100):  # ten steps a second
        pace.advance(0.1 * number, streams=4, busy=True, full=False, prefills=True)
        pace.add_service(8.0, 4, full=False)
    assert pace.decode_seconds == least
    for number in range(100, 400):  # twenty, of which the last hundred prefill
        pace.advance(10.0 + 0.05 * (number - 100), streams=4, busy=True, full=False, prefills=number >= 300)
        pace.add_service(8.0, 4, full=False)
    assert pace.decode_seconds == pytest.approx(0.05, rel=0.05)
