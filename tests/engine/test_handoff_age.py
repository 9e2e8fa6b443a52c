"""Prompts that a real prefill engine has let go of before a decode engine could fetch them.

vLLM answers a late read with status 200 and other text than the model's.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from time import monotonic

import httpx
import pytest

from . import prompts
from .fleet import BLOCK_TOKENS, BLOCKS, Router, VllmEngine
from .nixl_pair import Pair, kept, read_late, router_before, running_pair
from .processes import Server, wait_until
from .wire import COMPLETIONS, Json, call, get, listed, mapped

pytestmark = pytest.mark.engine

LEASE_SECONDS = 5
FLAGS = "--window=fixed", "--max-inflight=1", "--token-timeout=120"
"""With them, one request at a time is at the decode engine."""
ENDLESS = {"model": "tiny", "prompt": "busy", "n": 2, "ignore_eos": True, "stream": True, "max_tokens": 8000}
"""For the decode engine alone, as it has two answers."""
LONG = 6000
ROOM_FOR = BLOCKS * BLOCK_TOKENS // LONG + 2
"""Prompts of this length that an engine's cache has no room for at once."""
FILLING = count()


@pytest.fixture(scope="module")
def pair(servers: list[Server], model: Path, logs: Path) -> Iterator[Pair]:
    yield from running_pair(servers, model, logs, LEASE_SECONDS)


@contextmanager
def taken(url: str) -> Iterator[None]:
    """Keep the only place at the decode engine taken by a stream."""
    with (
        httpx.Client(trust_env=False, timeout=60.0) as http,
        http.stream("POST", url + COMPLETIONS, json=ENDLESS) as response,
    ):
        blocks = response.iter_raw()  # the stream is closed when nothing refers to it
        next(blocks)
        yield


@contextmanager
def standing_still(engine: Server) -> Iterator[None]:
    """Stop an engine: it takes what it is sent, and answers nothing."""
    engine.stand_still()
    try:
        yield
    finally:
        engine.go_on()


def outlast_lease(engine: VllmEngine, since: float) -> None:
    """Wait until the lease of a prompt is over, and let the engine use its whole cache for others."""
    wait_until(lambda: fill(engine) and monotonic() > since + LEASE_SECONDS, 60, "the lease is over")
    for _ in range(ROOM_FOR):
        fill(engine)


def fill(engine: VllmEngine) -> bool:
    """Let an engine compute a long prompt that nobody has sent before."""
    body: Json = {"model": "tiny", "prompt": prompts.tokens(f"filling {next(FILLING)}", LONG), "max_tokens": 1}
    return call(engine.url, COMPLETIONS, body).status == 200


def fetched_late(engine: VllmEngine) -> int:
    """Return how many prompts of an engine were fetched after their lease. It takes note of them in its next step."""
    fill(engine)
    return read_late(engine)


def prompt(name: str) -> Json:
    """Return a call with a prompt of this name, which neither engine has in its cache."""
    return {"model": "tiny", "prompt": prompts.tokens(name, 3000), "max_tokens": 12, "temperature": 0}


def acquaint(router: Router) -> None:
    """Have a prompt handed over. Before its first one, a pair of engines shakes hands, which delays a release."""
    assert call(router.url, COMPLETIONS, prompt(f"acquainted {next(FILLING)}")).status == 200


def pooled(url: str) -> int:
    """Return how many prefilled requests wait in a router for a decode engine."""
    found = re.search(r"^d2lpm_handoff_pool_requests (\S+)$", get(f"{url}/metrics").body.decode(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def at(router: Router, engine: VllmEngine) -> int:
    """Return how many requests a router has sent to an engine that have not ended."""
    return int(str(mapped(mapped(router.get("/fairness")["workers"])[engine.url.removeprefix("http://")])["running"]))


def answer_after_the_lease(pair: Pair, logs: Path, late: Json, oldest: int) -> str:
    """Return the answer to a call whose prompt is prefilled, but for which the decode engine has no room until the
    lease of the prompt is over.

    `oldest`: the greatest age in seconds at which the router lets a prompt be fetched.
    """
    router = router_before(pair, logs, *FLAGS, f"--handoff-seconds={oldest}")
    try:
        acquaint(router)
        with ThreadPoolExecutor(1) as thread, ExitStack() as prefill:
            prefill.enter_context(standing_still(pair.prefill))
            asked = thread.submit(httpx.post, router.url + COMPLETIONS, json=late, trust_env=False, timeout=120.0)
            wait_until(lambda: router.in_flight() == 1, 20, "the prompt is at the prefill engine")
            with taken(router.url):
                prefill.close()
                wait_until(lambda: pooled(router.url) == 1, 20, "the prompt is prefilled")
                since = monotonic()
                if oldest < LEASE_SECONDS:
                    wait_until(lambda: not pooled(router.url), 20, "the prompt is too old")
                    wait_until(lambda: fill(pair.prefill) and not kept(pair.prefill), 20, "the prompt is released")
                with standing_still(pair.decode):  # so that the stream lasts
                    outlast_lease(pair.prefill, since)
            answer = asked.result()
        router.wait_settled()
    finally:
        router.stop()
    return text_of(answer.json())


def truth(pair: Pair, body: Json) -> str:
    """Return the answer of one engine that computes all of the call."""
    return text_of(call(pair.prefill.url, COMPLETIONS, body).json)


def text_of(answer: Json) -> str:
    """Return the text of a completion."""
    return str(listed(answer["choices"])[0]["text"])


def test_no_prompt_is_fetched_after_its_lease(pair: Pair, logs: Path) -> None:
    """A prompt that waits for too long is prefilled again, and the answer is that of one engine."""
    before, late = fetched_late(pair.prefill), prompt("too old")
    assert answer_after_the_lease(pair, logs, late, oldest=2) == truth(pair, late)
    assert fetched_late(pair.prefill) == before


def test_without_a_limit_of_age_a_prompt_is_fetched_late(pair: Pair, logs: Path) -> None:
    """The test above can fail: a router that keeps prompts for longer than their lease passes a wrong answer on."""
    before, late = fetched_late(pair.prefill), prompt("of no age")
    assert answer_after_the_lease(pair, logs, late, oldest=600) != truth(pair, late)
    assert fetched_late(pair.prefill) == before + 1


def test_a_decode_engine_that_stood_still_answers_as_one_engine(pair: Pair, logs: Path) -> None:
    """It was sent a prompt in time, and could read that only after the lease: the client gets no such answer."""
    late = prompt("sent in time")
    router = router_before(pair, logs, *FLAGS, "--handoff-seconds=2")
    try:
        acquaint(router)
        with ThreadPoolExecutor(1) as thread:
            with standing_still(pair.decode):
                asked = thread.submit(httpx.post, router.url + COMPLETIONS, json=late, trust_env=False, timeout=120.0)
                wait_until(lambda: at(router, pair.decode) == 1, 20, "the prompt is at the decode engine")
                outlast_lease(pair.prefill, monotonic())
            answer = asked.result()
        router.wait_settled()
    finally:
        router.stop()
    assert text_of(answer.json()) == truth(pair, late)
