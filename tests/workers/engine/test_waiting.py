"""The measurements of an emulated engine's own queue, in its loop and over HTTP."""

import aiohttp
import pytest

from tests.support.workers_http import worker
from workers.engine.engine import Engine, create_engine, default_config
from workers.engine.hardware import HARDWARE
from workers.engine.model import Dialect, Request
from workers.engine.waiting import DEEP_SECONDS, SHALLOW, QueueMeter, TimeWeighted
from workers.server.loop import EngineLoop, Mailbox

QUEUE = "/emulated/queue"


def test_a_value_counts_for_as_long_as_it_held() -> None:
    """Percentiles are taken over time, not over changes."""
    meter = TimeWeighted()
    meter.change(1.0, 5.0)  # 0 for 1 s, 5 for 8 s, 9 for 1 s
    meter.change(9.0, 9.0)
    assert [meter.percentile(10.0, share) for share in (0.1, 0.11, 0.9, 0.91, 1.0)] == [0.0, 5.0, 5.0, 9.0, 9.0]


def test_a_reset_forgets_the_past_and_keeps_the_value() -> None:
    """After a warm-up only later values count, beginning with the current one."""
    meter = TimeWeighted()
    meter.change(0.0, 100.0)
    meter.change(5.0, 7.0)
    meter.reset(6.0)
    assert meter.percentile(8.0, 1.0) == pytest.approx(7.0)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_the_queue_is_counted_in_requests_and_uncached_tokens(dialect: Dialect) -> None:
    """While one request runs, the two that wait count until they are admitted."""
    engine = create_engine(default_config(dialect, max_running=1), HARDWARE["instant"])
    waiting = QueueMeter()
    for number in range(3):
        engine.submit(Request(str(number), [1000 * number + each for each in range(100)], 2, True))
    engine.step()
    waiting.observe(1.0, engine)
    waiting.reset(1.0)
    assert (waiting.requests.percentile(2.0, 0.95), waiting.tokens.percentile(2.0, 0.95)) == (2, 200)
    while engine.has_work:
        engine.step()
    waiting.observe(3.0, engine)
    waiting.reset(3.0)
    assert (waiting.requests.percentile(4.0, 0.95), waiting.tokens.percentile(4.0, 0.95)) == (0, 0)


def _queue(waiting: QueueMeter, engine: Engine, requests: int, now: float) -> None:
    """Submit requests of 100 tokens until so many wait."""
    while engine.waiting < requests:
        engine.submit(Request(str(engine.waiting), [1000 * engine.waiting + each for each in range(100)], 2, True))
        waiting.observe(now, engine)


def test_tokens_of_a_deep_queue_are_counted_at_intervals() -> None:
    """Requests are counted at every change, tokens of many only at intervals, because counting them takes time."""
    engine = create_engine(default_config("vllm", max_running=1), HARDWARE["instant"])
    waiting = QueueMeter()
    _queue(waiting, engine, SHALLOW + 1, 0.001)
    _queue(waiting, engine, SHALLOW + 4, 0.001)
    waiting.reset(0.001)
    assert waiting.requests.percentile(0.1, 1.0) == SHALLOW + 4
    assert waiting.tokens.percentile(0.1, 1.0) < 100 * (SHALLOW + 4)
    waiting.observe(0.001 + DEEP_SECONDS, engine)
    waiting.reset(1.0)
    assert waiting.tokens.percentile(2.0, 1.0) == 100 * (SHALLOW + 4)


def test_tokens_of_a_queue_that_grows_fast_are_counted_before_the_interval_ends() -> None:
    """However many requests come between two intervals, their tokens are known to within a fifth."""
    engine = create_engine(default_config("vllm", max_running=1), HARDWARE["instant"])
    waiting = QueueMeter()
    _queue(waiting, engine, 10 * SHALLOW, 0.001)
    waiting.reset(0.001)
    assert waiting.tokens.percentile(0.1, 1.0) >= 0.8 * 100 * 10 * SHALLOW


async def test_an_engine_loop_measures_only_if_configured() -> None:
    """Requests submitted or aborted between steps are measured, too."""
    engine = create_engine(default_config("vllm"), HARDWARE["instant"])
    assert EngineLoop([engine], 1.0).queue is None
    loop = EngineLoop([engine], 1.0, measure=True)
    mailbox = Mailbox()
    loop.open(mailbox, [([1, 2, 3], 4, 0)], ignore_eos=True, rank=lambda: 0)
    loop.measure()
    seen = loop.queue
    assert seen is not None
    assert (seen.requests_p95, seen.tokens_p95, seen.lost_seconds) == (1, 3, 0)
    loop.close(mailbox)
    loop.measure()
    seen = loop.queue
    assert seen is not None
    assert (seen.requests_p95, seen.tokens_p95) == (0, 0)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_worker_reports_its_queue_only_with_measure(dialect: Dialect) -> None:
    """The report over HTTP is of the time since the start or the last POST; without the flag the path does not
    exist.
    """
    async with aiohttp.ClientSession() as http:
        with worker(dialect=dialect, measure=True) as url:
            async with http.get(url + QUEUE) as response:
                before = await response.json()
            async with http.post(url + QUEUE) as response:
                assert response.status == 200
            async with http.get(url + QUEUE) as response:
                after = await response.json()
        assert before.keys() == {"seconds", "requests_p95", "tokens_p95", "lost_seconds"}
        assert (after["requests_p95"], after["tokens_p95"]) == (0, 0)
        with worker(dialect=dialect) as url:
            async with http.get(url + QUEUE) as response:
                assert response.status == 404
