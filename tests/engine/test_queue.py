"""Tests that requests queue in the router: a real engine gets what its window has room for, in the policy's order."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

import pytest

from router.core.fleet.window import LEAST_REACH

from . import prompts
from .conftest import StartRouter
from .fleet import NARROW, SEQUENCES, Engine, Load, Router
from .processes import wait_until
from .wire import COMPLETIONS, Answer, Json, call

pytestmark = pytest.mark.engine

BODY: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 250}
HEAVY_CALLS = 12
BACKLOG = 90
LEARNED_SECONDS = 120.0
"""A bound: some seconds are usual on two idle cores."""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(HEAVY_CALLS + 1) as pool:
        yield pool


def ask(router: Router, name: str, key: str, finished: list[str]) -> Answer:
    answer = call(router.url, COMPLETIONS, {**BODY, "prompt": prompts.text(name)}, key)
    finished.append(key)
    return answer


def backlog(threads: ThreadPoolExecutor, router: Router, finished: list[str]) -> list[Future[Answer]]:
    """Submit calls of one client, of which `NARROW` are at the engine and the others in the router's queue."""
    calls = [threads.submit(ask, router, f"heavy {number}", "heavy", finished) for number in range(HEAVY_CALLS)]
    wait_until(lambda: router.queued() + len(finished) >= HEAVY_CALLS - NARROW, 30, "the calls are queued")
    return calls


def ended(calls: list[Future[int]]) -> int:
    return sum(one.done() for one in calls)


def test_the_engine_never_has_more_than_its_window(
    narrow_router: Router, engines: tuple[Engine, ...], threads: ThreadPoolExecutor
) -> None:
    """However many calls wait, the engine never has more in flight than the window allows."""
    calls = backlog(threads, narrow_router, [])
    seen = []
    while not all(one.done() for one in calls):
        load = engines[0].load()
        seen.append(load.running + load.waiting)
    assert max(seen) == NARROW
    assert [one.result().status for one in calls] == [200] * HEAVY_CALLS


def test_a_learned_window_keeps_the_engine_full(start_router: StartRouter, engines: tuple[Engine, ...]) -> None:
    """With the default window, the engine's places are all taken, and few calls wait in the engine.

    The calls are streams, whose starts show: before the engine's first report, the window bounds what has not started.
    The starts of whole answers are guessed, so as many would go to the engine as there is time until that report.
    """
    router = start_router("learning router", engines[:1])
    in_flight: list[int] = []
    seen: list[Load] = []

    def ask_number(number: int) -> int:
        body = {**BODY, "stream": True, "prompt": prompts.text(f"learned {number}")}
        return call(router.url, COMPLETIONS, body, "learner").status

    with ThreadPoolExecutor(BACKLOG) as pool:
        calls = [pool.submit(ask_number, number) for number in range(BACKLOG)]
        wait_until(lambda: router.window(engines[0]) < BACKLOG, LEARNED_SECONDS, "the window has learned")
        sent = ended(calls) + router.in_flight()
        wait_until(lambda: ended(calls) >= sent, LEARNED_SECONDS, "what was sent before has ended")
        while router.queued():
            in_flight.append(router.in_flight())
            seen.append(engines[0].load())
        assert [one.result() for one in calls] == [200] * BACKLOG
    router.stop()
    assert len(seen) > SEQUENCES, "the window has learned too late"
    assert median(in_flight) >= SEQUENCES, "places were empty while calls waited in the router"
    # The window lets one request wait, and those that start within a step and a half: here as many as there are places.
    assert max(load.waiting for load in seen) <= 1 + LEAST_REACH * SEQUENCES, "too many wait in the engine"


def test_a_new_client_does_not_wait_for_a_backlog(narrow_router: Router, threads: ThreadPoolExecutor) -> None:
    """A request of a client with nothing in flight passes at least half of another client's backlog."""
    finished: list[str] = []
    calls = backlog(threads, narrow_router, finished)
    left = HEAVY_CALLS - len(finished)
    light = threads.submit(ask, narrow_router, "light", "light", finished)
    assert [one.result().status for one in (light, *calls)] == [200] * (HEAVY_CALLS + 1)
    passed = len(finished) - 1 - finished.index("light")
    assert passed >= left / 2
    assert left > HEAVY_CALLS / 2
