"""Tests that a worker that dies costs the other worker no request, and is used again when it is back."""

import httpx
import pytest

from . import prompts
from .fleet import Engine, Router
from .processes import wait_until
from .wire import COMPLETIONS, Answer, Json, call, event_data, loads, mapped

pytestmark = pytest.mark.engine

BODY: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 4}
SEEN_SECONDS = 60.0
"""Timeout for the router to see that a worker is gone, or back."""


def ask(router: Router, name: str) -> Answer:
    return call(router.url, COMPLETIONS, {**BODY, "prompt": prompts.text(name)}, "survivor")


def wait_healthy(router: Router, engine: Engine, healthy: bool) -> None:
    what = f"the {engine.name} counts as {'healthy' if healthy else 'dead'}"
    wait_until(lambda: router.worker(engine)["healthy"] is healthy, SEEN_SECONDS, what)


def test_a_worker_that_died_is_used_again_when_it_is_back(router: Router, engines: tuple[Engine, ...]) -> None:
    """After an idle worker has died all requests go to the other one, and to both once it is back."""
    victim, survivor = engines
    ids = {engine: router.worker(engine)["id"] for engine in engines}
    before = [ask(router, f"before {number}") for number in range(4)]
    assert {answer.headers["x-d2lpm-worker"] for answer in before} == set(ids.values())

    victim.kill()
    wait_healthy(router, victim, healthy=False)
    after = [ask(router, f"{when} {number}") for when in ("before", "after") for number in range(4)]
    assert [answer.status for answer in after] == [200] * 8, [answer.body for answer in after]
    assert {answer.headers["x-d2lpm-worker"] for answer in after} == {ids[survivor]}

    victim.start_and_wait()
    wait_healthy(router, victim, healthy=True)
    again = [ask(router, f"again {number}") for number in range(8)]
    assert [answer.status for answer in again] == [200] * 8
    assert {answer.headers["x-d2lpm-worker"] for answer in again} == set(ids.values())


def test_a_stream_that_cannot_be_continued_ends_with_an_error(router: Router, engines: tuple[Engine, ...]) -> None:
    """A stream with logprobs, which no other worker can continue, ends with an error event when its worker dies."""
    body = {**BODY, "prompt": prompts.text("doomed"), "max_tokens": 8000, "stream": True, "logprobs": 1}
    with httpx.stream("POST", router.url + COMPLETIONS, json=body, timeout=60) as stream:
        blocks = stream.iter_bytes()
        received = next(blocks)
        home = stream.headers["x-d2lpm-worker"]
        next(engine for engine in engines if router.worker(engine)["id"] == home).kill()
        received += b"".join(blocks)
    *_, last, done = event_data(received)
    assert mapped(loads(last)["error"])["code"] == "worker_broke"
    assert done == b"[DONE]"


def test_a_death_that_no_poll_has_seen_costs_no_request(unpolled_router: Router, engines: tuple[Engine, ...]) -> None:
    """When a worker refuses connections, the other one serves each request."""
    victim, survivor = engines
    ids = {engine: unpolled_router.worker(engine)["id"] for engine in engines}
    before = [ask(unpolled_router, f"before {number}") for number in range(4)]
    assert {answer.headers["x-d2lpm-worker"] for answer in before} == set(ids.values())
    victim.kill()
    after = [ask(unpolled_router, f"{when} {number}") for when in ("before", "after") for number in range(4)]
    assert [answer.status for answer in after] == [200] * 8, [answer.body for answer in after]
    assert {answer.headers["x-d2lpm-worker"] for answer in after} == {ids[survivor]}
