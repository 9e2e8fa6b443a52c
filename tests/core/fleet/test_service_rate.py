"""A worker's speed is measured from its answers, and the rates of a fleet equal those of a look at each worker."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.service_rate import (
    FIRST_SECONDS_PER_OUTPUT_TOKEN,
    FIRST_SECONDS_PER_TOKEN,
    LEAST_STEP_TOKENS,
    SPEED_TOLERANCE,
    FleetRates,
    ServiceRate,
    Turnover,
)
from router.core.fleet.window import NoWindow
from router.core.fleet.worker_index import WorkerIndex
from router.core.fleet.worker_state import WorkerState
from router.core.model.request import Worker, WorkerId


def learned(seconds_per_token: float, starts: int = 200, *, had_place: bool = True) -> ServiceRate:
    """Return the rate after a number of starts of 1000 tokens, each computed right after the one before."""
    service_rate = ServiceRate()
    now = 0.0
    for _ in range(starts):
        dispatched, now = now, now + 1000 * seconds_per_token
        service_rate.advance(now, streams=0, full=True)
        service_rate.observe_start(now, dispatched, 1000, had_place=had_place)
        service_rate.count_start(1000)
    return service_rate


def test_prefill_is_guessed_until_it_is_seen() -> None:
    """The guessed prefill time is proportional to the tokens."""
    assert ServiceRate().prefill_seconds(500) == 500 * FIRST_SECONDS_PER_TOKEN


@pytest.mark.parametrize("seconds_per_token", [1e-5, 1e-4, 2e-3])
def test_prefill_is_learned_from_what_starts(seconds_per_token: float) -> None:
    """The learned time is within a few per cent, however wrong the first guess was."""
    assert learned(seconds_per_token).prefill_seconds(1000) == pytest.approx(1000 * seconds_per_token, rel=0.1)


@pytest.mark.parametrize(("had_place", "slower"), [(False, False), (True, True)])
def test_only_requests_with_a_place_show_slow_prefill(had_place: bool, slower: bool) -> None:
    """A request without a place may have waited for something else, so its late start shows nothing."""
    service_rate = learned(1e-4)
    known = []
    for number in range(10):
        now = 100.0 + 5.0 * number
        service_rate.advance(now, streams=0, full=True)
        service_rate.observe_start(now, now - 5.0, 1000, had_place=had_place)
        known.append(service_rate.prefill_seconds(1000))
    assert (known[-1] > known[0]) == slower


def test_a_first_start_that_waited_for_a_cold_engine_is_soon_forgotten() -> None:
    """Faster starts after the first one are believed at once."""
    service_rate = ServiceRate()
    service_rate.observe_start(30.0, 0.0, 300, had_place=True)
    for number in range(1, 4):
        service_rate.observe_start(40.0 + number, 40.0 + number - 0.1, 1000, had_place=True)
    assert service_rate.prefill_seconds(1000) == pytest.approx(0.1, rel=0.05)


def test_an_answer_at_once_does_not_show_the_output_rate() -> None:
    """An answer that comes at once was computed before; only a second of streaming shows the rate."""
    service_rate = ServiceRate()
    first = service_rate.seconds_per_output_token
    service_rate.advance(0.1, streams=1, full=False, seen_answers=1)
    service_rate.add_output(1000)
    assert service_rate.seconds_per_output_token == first


def test_small_prompts_show_the_cost_of_a_step_and_not_of_tokens() -> None:
    """A start of few tokens does not change the prefill time."""
    service_rate = ServiceRate()
    for number in range(1, 50):
        service_rate.observe_start(float(number), number - 0.9, 10, had_place=True)
    assert service_rate.prefill_seconds(1) == FIRST_SECONDS_PER_TOKEN


def test_turnover_is_what_starts_while_every_stream_gains_a_token() -> None:
    """Eight streams gain a token per step of 0.1 s, and two requests of 50 tokens start in each step."""
    service_rate = ServiceRate()
    for step in range(1, 200):
        service_rate.advance(0.1 * step, streams=8, full=True)
        service_rate.add_service(16.0, 8, full=True)
        for _ in range(2):
            service_rate.observe_start(0.1 * step, 0.1 * step - 0.1, 50, had_place=True)
            service_rate.count_start(50)
            service_rate.add_service(0.0, 1, full=True)
    assert service_rate.streams == pytest.approx(8.0)
    turnover = service_rate.turnover
    assert (turnover.requests, turnover.tokens) == pytest.approx((2.0, 100.0), rel=0.05)
    assert turnover.burst_tokens == 50


def test_there_are_no_averages_before_enough_work() -> None:
    """A single answer is no average."""
    assert ServiceRate().turnover == Turnover()
    assert (ServiceRate().rate, ServiceRate().least_rate, ServiceRate().streams) == (None, None, 1.0)


def test_the_rate_covers_only_the_time_when_full() -> None:
    """The rate counts only time when the worker is full, since what it serves with little to do is only
    a lower bound.
    """
    service_rate = ServiceRate()
    for second in range(1, 30):
        service_rate.advance(float(second), streams=1, full=False)
        service_rate.add_service(100.0, 50, full=False)
    assert service_rate.rate is None
    assert service_rate.least_rate == pytest.approx(100.0, rel=0.05)
    for second in range(30, 60):
        service_rate.advance(float(second), streams=9, full=True)
        service_rate.add_service(700.0, 350, full=True)
    assert service_rate.rate == pytest.approx(700.0, rel=0.05)


def test_idle_time_decays_nothing() -> None:
    """The rate is the same after a night without work."""
    state = WorkerState(Worker(WorkerId("w"), frozenset(["llama"])), NoWindow(), WorkerIndex())
    rate = state.service_rate = learned(1e-4)
    rate.add_service(500.0, 0, full=True)
    before = rate.rate, rate.least_rate
    assert None not in before
    state.refresh(rate.now + 40_000.0)
    rate.advance(rate.now + 1e-9, streams=0, full=True)
    assert (rate.rate, rate.least_rate) == pytest.approx(before)


def test_answers_without_streaming_bound_the_prefill_time() -> None:
    """An unstreamed answer shows that its prompt was computed in at most its time, although no start was seen."""
    service_rate = ServiceRate()
    for second in range(1, 400):
        service_rate.advance(float(second), streams=0, full=False)
        service_rate.observe_unseen_end(50_000)
    assert service_rate.prefill_seconds(50_000) == pytest.approx(1.0, rel=0.1)


def test_one_long_prompt_does_not_show_what_a_step_takes() -> None:
    """One prompt may have been computed in several steps; only requests that start together share one step."""
    service_rate = ServiceRate()
    service_rate.advance(2.0, streams=0, full=True)
    service_rate.observe_start(2.0, 0.0, 20_000, had_place=True)
    service_rate.count_start(20_000)
    assert service_rate.turnover.tokens == 0
    assert service_rate.turnover.burst_tokens == 0


def test_a_long_prefill_is_not_a_rate_of_zero() -> None:
    """A worker that is full for seconds before it has served anything does not count as infinitely slow."""
    service_rate = ServiceRate()
    service_rate.advance(5.0, streams=0, full=True)
    assert (service_rate.rate, service_rate.least_rate) == (None, None)


def test_refunds_make_no_negative_rate() -> None:
    """An engine's usage may refund more than was charged recently."""
    service_rate = ServiceRate()
    service_rate.advance(5.0, streams=1, full=True)
    service_rate.add_service(-10.0, -5, full=True)
    assert (service_rate.rate, service_rate.least_rate) == (None, None)


def test_a_decode_step_is_learned_while_nothing_is_prefilled() -> None:
    """Steps with prefill do not count, and the learned time is never below the minimum."""
    service_rate = ServiceRate()
    least = service_rate.prefill_seconds(LEAST_STEP_TOKENS)
    assert service_rate.decode_seconds == least
    for number in range(100):  # ten steps a second
        service_rate.advance(0.1 * number, streams=4, full=False, prefills=True)
        service_rate.add_service(8.0, 4, full=False)
    assert service_rate.decode_seconds == least
    for number in range(100, 400):  # twenty, of which the last hundred prefill
        service_rate.advance(10.0 + 0.05 * (number - 100), streams=4, full=False, prefills=number >= 300)
        service_rate.add_service(8.0, 4, full=False)
    assert service_rate.decode_seconds == pytest.approx(0.05, rel=0.05)


def test_output_that_took_no_time_is_no_rate() -> None:
    """Answers that begin and end between two reports of the engine do not make its decode time zero."""
    service_rate = ServiceRate()
    service_rate.add_engine_output(1000.0, 0.0)
    assert service_rate.seconds_per_output_token == FIRST_SECONDS_PER_OUTPUT_TOKEN


# The rates of a fleet


Rate = float | None
rates = st.none() | st.floats(0.5, 8.0)
changes = st.lists(st.tuples(st.sampled_from([WorkerId(name) for name in "abcde"]), rates, rates), max_size=12)


def speed(of: WorkerId, full: dict[WorkerId, Rate], least: dict[WorkerId, Rate]) -> float:
    """Compute the speed by visiting all workers."""
    counting = {worker: rate for worker, rate in full.items() if rate is not None}
    if not counting:
        return 1.0
    mean_of_full = sum(counting.values()) / len(counting)
    for worker, rate in least.items():
        if worker not in counting and rate is not None and rate > mean_of_full:
            counting[worker] = rate
    if of not in counting:
        return 1.0
    found = counting[of] / (sum(counting.values()) / len(counting))
    return 1.0 if 1 / SPEED_TOLERANCE < found < SPEED_TOLERANCE else found


def together(workers: Collection[WorkerId], full: dict[WorkerId, Rate], least: dict[WorkerId, Rate]) -> Rate:
    """Compute the rate of several workers by visiting them."""
    known = [rate for worker in workers if (rate := full[worker] or least[worker]) is not None]
    return sum(known) * len(workers) / len(known) if known else None


@given(changes)
def test_speeds_and_sums_equal_those_of_a_scan(changes: list[tuple[WorkerId, Rate, Rate]]) -> None:
    """To the last bit, after every change."""
    fleet = FleetRates()
    full: dict[WorkerId, Rate] = {}
    least: dict[WorkerId, Rate] = {}
    for worker, while_full, at_least in changes:
        fleet.set(worker, while_full, at_least)
        full[worker], least[worker] = while_full, at_least
        assert [fleet.speed(each) for each in full] == [speed(each, full, least) for each in full]
        assert fleet.together(full) == together(full, full, least)


def test_a_worker_that_is_gone_counts_no_more() -> None:
    """Neither for the mean nor for the sum."""
    fleet = FleetRates()
    fast, slow = WorkerId("fast"), WorkerId("slow")
    fleet.set(fast, 3.0, None)
    fleet.set(slow, 1.0, None)
    assert (fleet.speed(slow), fleet.together([fast, slow])) == (0.5, 4.0)
    fleet.remove(fast)
    assert (fleet.speed(slow), fleet.together([slow])) == (1.0, 1.0)
    with pytest.raises(KeyError):
        fleet.together([fast])
