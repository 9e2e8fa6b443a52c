"""A worker that dies takes none of the other's requests with it, and is used again when it is back."""

import json

import httpx
import pytest

from . import prompts
from .fleet import Engine, Router
from .processes import wait_until
from .wire import COMPLETIONS, WORKER_KEY, Answer, Json, call, event_data

pytestmark = pytest.mark.engine

BODY: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 4}
SEEN_SECONDS = 15.0
"""In which the router has to see that a worker is gone, or back."""


def ask(router: Router, name: str) -> Answer:
    return call(router.url, COMPLETIONS, {**BODY, "prompt": prompts.text(name)}, "survivor")


def wait_healthy(router: Router, engine: Engine, healthy: bool) -> None:
    what = f"the {engine.name} counts as {'healthy' if healthy else 'dead'}"
    wait_until(lambda: router.worker(engine)["healthy"] is healthy, SEEN_SECONDS, what)


def test_idle_worker_dies_and_returns(router: Router, engines: tuple[Engine, Engine]) -> None:
    """Every request after a worker's death succeeds on the other; the dead one is seen, and used once it is back."""
    victim, survivor = engines
    ids = {engine: router.worker(engine)["id"] for engine in engines}
    before = [ask(router, f"before {number}") for number in range(4)]
    assert {answer.headers["x-d2lpm-worker"] for answer in before} == set(ids.values())

    victim.kill()
    after = [ask(router, f"{when} {number}") for when in ("before", "after") for number in range(4)]
    assert [answer.status for answer in after] == [200] * 8, [answer.body for answer in after]
    assert {answer.headers["x-d2lpm-worker"] for answer in after} == {ids[survivor]}
    wait_healthy(router, victim, healthy=False)

    victim.start()
    victim.wait_ready("/health", 180)
    wait_healthy(router, victim, healthy=True)
    again = [ask(router, f"again {number}") for number in range(8)]
    assert [answer.status for answer in again] == [200] * 8
    assert ids[victim] in {answer.headers["x-d2lpm-worker"] for answer in again}


def test_worker_dies_in_a_stream(router: Router, engines: tuple[Engine, Engine]) -> None:
    """A stream whose worker dies ends at once with an error in it; the next request goes to the other worker."""
    body = {**BODY, "prompt": prompts.text("doomed"), "max_tokens": 8000, "stream": True}
    headers = {"authorization": f"Bearer {WORKER_KEY}"}
    with httpx.stream("POST", router.url + COMPLETIONS, json=body, headers=headers, timeout=10) as stream:
        blocks = stream.iter_bytes()
        received = next(blocks)
        home = stream.headers["x-d2lpm-worker"]
        victim = next(engine for engine in engines if router.worker(engine)["id"] == home)
        victim.kill()
        received += b"".join(blocks)
    *_, last, done = event_data(received)
    assert json.loads(last)["error"]["code"] == "worker_broke"
    assert done == b"[DONE]"
    answer = ask(router, "after the stream")
    assert answer.status == 200, answer.body
    assert answer.headers["x-d2lpm-worker"] != home
