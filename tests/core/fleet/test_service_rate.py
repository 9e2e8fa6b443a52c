"""How fast one worker is, as its answers show."""

import pytest

from router.core.fleet.service_rate import FIRST_SECONDS_PER_TOKEN, LEAST_STEP_TOKENS, ServiceRate, Turnover


def learned(seconds_per_token: float, starts: int = 200, *, had_place: bool = True) -> ServiceRate:
    """A pace after so many starts of 1000 tokens, each computed right after the one before."""
    service_rate = ServiceRate()
    now = 0.0
    for _ in range(starts):
        dispatched, now = now, now + 1000 * seconds_per_token
        service_rate.advance(now, streams=0, busy=True, full=True)
        service_rate.observe_start(now, dispatched, 1000, had_place=had_place)
        service_rate.count_start(1000)
    return service_rate


def test_prefill_is_guessed_until_it_is_seen() -> None:
    """In proportion to the tokens."""
    assert ServiceRate().prefill_seconds(500) == 500 * FIRST_SECONDS_PER_TOKEN


@pytest.mark.parametrize("seconds_per_token", [1e-5, 1e-4, 2e-3])
def test_prefill_is_learned_from_what_starts(seconds_per_token: float) -> None:
    """Within a few per cent, however far the first guess was off."""
    assert learned(seconds_per_token).prefill_seconds(1000) == pytest.approx(1000 * seconds_per_token, rel=0.1)


@pytest.mark.parametrize(("had_place", "slower"), [(False, False), (True, True)])
def test_only_what_had_a_place_shows_that_prefill_is_slow(had_place: bool, slower: bool) -> None:
    """Any other may have waited for something else."""
    service_rate = learned(1e-4)
    known = []
    for number in range(10):
        now = 100.0 + 5.0 * number
        service_rate.advance(now, streams=0, busy=True, full=True)
        service_rate.observe_start(now, now - 5.0, 1000, had_place=had_place)
        known.append(service_rate.prefill_seconds(1000))
    assert (known[-1] > known[0]) == slower


def test_a_first_start_that_waited_for_a_cold_engine_is_soon_forgotten() -> None:
    """What comes sooner after it is believed at once."""
    service_rate = ServiceRate()
    service_rate.observe_start(30.0, 0.0, 300, had_place=True)
    for number in range(1, 4):
        service_rate.observe_start(40.0 + number, 40.0 + number - 0.1, 1000, had_place=True)
    assert service_rate.prefill_seconds(1000) == pytest.approx(0.1, rel=0.05)


def test_an_answer_that_comes_all_at_once_does_not_show_how_fast_answers_grow() -> None:
    """It was computed before; a second of streaming is needed to tell."""
    service_rate = ServiceRate()
    first = service_rate.seconds_per_output_token
    service_rate.advance(0.1, streams=1, busy=True, full=False, seen_answers=1)
    service_rate.add_output(1000)
    assert service_rate.seconds_per_output_token == first


def test_small_prompts_show_the_cost_of_a_step_and_not_of_tokens() -> None:
    """A start of a few tokens says nothing of prefill."""
    service_rate = ServiceRate()
    for number in range(1, 50):
        service_rate.observe_start(float(number), number - 0.9, 10, had_place=True)
    assert service_rate.prefill_seconds(1) == FIRST_SECONDS_PER_TOKEN


def test_turnover_is_what_starts_while_every_stream_gains_a_token() -> None:
    """Eight streams gain a token a step of 0.1 s, and two requests of 50 tokens start in each."""
    service_rate = ServiceRate()
    for step in range(1, 200):
        service_rate.advance(0.1 * step, streams=8, busy=True, full=True)
        service_rate.add_service(16.0, 8, full=True)
        for _ in range(2):
            service_rate.observe_start(0.1 * step, 0.1 * step - 0.1, 50, had_place=True)
            service_rate.count_start(50)
            service_rate.add_service(0.0, 1, full=True)
    assert service_rate.streams == pytest.approx(8.0)
    turnover = service_rate.turnover
    assert (turnover.requests, turnover.tokens) == pytest.approx((2.0, 100.0), rel=0.05)
    assert turnover.burst_tokens == 50


def test_nothing_is_told_before_it_worked_for_a_while() -> None:
    """A single answer is no average."""
    assert ServiceRate().turnover == Turnover()
    assert (ServiceRate().rate, ServiceRate().least_rate, ServiceRate().streams) == (None, None, 1.0)


def test_the_rate_is_of_the_time_without_room_for_more() -> None:
    """One that has little to do serves little, however fast it is; that it serves at least so much is known."""
    service_rate = ServiceRate()
    for second in range(1, 30):
        service_rate.advance(float(second), streams=1, busy=True, full=False)
        service_rate.add_service(100.0, 50, full=False)
    assert service_rate.rate is None
    assert service_rate.least_rate == pytest.approx(100.0, rel=0.05)
    for second in range(30, 60):
        service_rate.advance(float(second), streams=9, busy=True, full=True)
        service_rate.add_service(700.0, 350, full=True)
    assert service_rate.rate == pytest.approx(700.0, rel=0.05)


def test_rest_wears_nothing_away() -> None:
    """After a night without work it is known to be as fast as in the evening."""
    service_rate = learned(1e-4)
    service_rate.add_service(500.0, 0, full=True)
    rate = service_rate.rate
    service_rate.advance(service_rate._now + 40_000.0, streams=0, busy=False, full=False)
    assert rate is not None
    assert service_rate.rate == rate


def test_whole_answers_show_that_prefill_is_at_least_so_fast() -> None:
    """What ended in a while was computed in no more time, though none of it showed its start."""
    service_rate = ServiceRate()
    for second in range(1, 400):
        service_rate.advance(float(second), streams=0, busy=True, full=False)
        service_rate.observe_unseen_end(50_000)
    assert service_rate.prefill_seconds(50_000) == pytest.approx(1.0, rel=0.1)


def test_one_long_prompt_does_not_show_what_a_step_takes() -> None:
    """It may have been computed in several; only what started together with another was computed in one."""
    service_rate = ServiceRate()
    service_rate.advance(2.0, streams=0, busy=True, full=True)
    service_rate.observe_start(2.0, 0.0, 20_000, had_place=True)
    service_rate.count_start(20_000)
    assert service_rate.turnover.tokens == 0
    assert service_rate.turnover.burst_tokens == 0


def test_a_long_prefill_is_no_rate_of_nothing() -> None:
    """A worker that is full for seconds before it has served anything is not infinitely slow."""
    service_rate = ServiceRate()
    service_rate.advance(5.0, streams=0, busy=True, full=True)
    assert (service_rate.rate, service_rate.least_rate) == (None, None)


def test_what_is_taken_back_makes_no_rate_below_zero() -> None:
    """An engine's usage may take back more than was charged of late."""
    service_rate = ServiceRate()
    service_rate.advance(5.0, streams=1, busy=True, full=True)
    service_rate.add_service(-10.0, -5, full=True)
    assert (service_rate.rate, service_rate.least_rate) == (None, None)


def test_a_decode_step_is_learned_while_nothing_is_prefilled() -> None:
    """Steps that share their time with prefill count for nothing, and none is taken for shorter than it can be."""
    service_rate = ServiceRate()
    least = service_rate.prefill_seconds(LEAST_STEP_TOKENS)
    assert service_rate.decode_seconds == least
    for number in range(100):  # ten steps a second
        service_rate.advance(0.1 * number, streams=4, busy=True, full=False, prefills=True)
        service_rate.add_service(8.0, 4, full=False)
    assert service_rate.decode_seconds == least
    for number in range(100, 400):  # twenty, of which the last hundred prefill
        service_rate.advance(10.0 + 0.05 * (number - 100), streams=4, busy=True, full=False, prefills=number >= 300)
        service_rate.add_service(8.0, 4, full=False)
    assert service_rate.decode_seconds == pytest.approx(0.05, rel=0.05)
