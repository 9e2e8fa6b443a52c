"""The data-parallel ranks behind the URL of one real vLLM server."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from . import prompts
from .fleet import ENGINE_START_SECONDS, Router, VllmEngine
from .processes import Server, wait_until
from .wire import CHAT, COMPLETIONS, Answer, Json, call, get, listed

pytestmark = pytest.mark.engine

RANKS = 2
CALLS = 60
AT_ONCE = 6
FLAGS = f"--data-parallel-size={RANKS}", f"--data-parallel-size-local={RANKS}", "--api-server-count=1"


@pytest.fixture(scope="module")
def engine(servers: list[Server], model: Path, logs: Path) -> Iterator[VllmEngine]:
    """Start a server with two ranks, each of which is a process of its own."""
    started = VllmEngine("engine with ranks", model, logs / "ranks", FLAGS, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    servers.append(started)
    try:
        started.start()
        started.wait_ready(started.ready_path, 2 * ENGINE_START_SECONDS)
        yield started
    finally:
        started.stop()
        servers.remove(started)


@pytest.fixture
def router(servers: list[Server], engine: VllmEngine, logs: Path) -> Iterator[Router]:
    router = Router("router before ranks", [engine], ["--poll-interval=0.5"], logs / "router-before-ranks")
    servers.append(router)
    router.start()
    router.wait_ready("/ready", 30.0)
    yield router
    router.stop()
    servers.remove(router)


def ids(engine: VllmEngine) -> list[str]:
    """Return the names of the ranks at a router."""
    return [f"{engine.url.removeprefix('http://')}@{rank}" for rank in range(RANKS)]


def by_rank(engine: VllmEngine, counter: str) -> list[int]:
    """Return a counter of each rank, of all labels together."""
    return [summed(engine.url, f"vllm:{counter}", engine=str(rank)) for rank in range(RANKS)]


def by_worker(router: Router, engine: VllmEngine, metric: str, **labels: str) -> list[int]:
    """Return a metric of the router for each rank."""
    return [summed(router.url, metric, worker=name, **labels) for name in ids(engine)]


def summed(url: str, metric: str, **labels: str) -> int:
    """Return the sum of the samples of a metric with these labels. AssertionError if there are none."""
    families = text_string_to_metric_families(get(f"{url}/metrics").body.decode())
    samples = [sample for family in families for sample in family.samples if sample.name == metric]
    found = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    assert found, f"no {metric} with {labels}"
    return int(sum(found))


def known(router: Router) -> set[str]:
    """Return the names of the router's workers."""
    return {str(worker["id"]) for worker in listed(router.get("/workers")["workers"])}


def ask(url: str, number: int) -> Answer:
    """Send one of the calls: chats and completions, streamed or not."""
    text = prompts.text(f"rank {number}", 60)
    usual: Json = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "stream": number % 2 == 1,
        "user": f"{number % 3}",
    }
    if number % 4 < 2:
        return call(url, CHAT, {**usual, "messages": [{"role": "user", "content": text}]})
    return call(url, COMPLETIONS, {**usual, "prompt": text})


def test_each_rank_is_a_worker(engine: VllmEngine, router: Router) -> None:
    """The router finds as many as the server has."""
    wait_until(lambda: set(ids(engine)) <= known(router), 20, "both ranks are known")
    assert not any(f"@{RANKS}" in name for name in known(router))


def test_calls_are_computed_by_the_rank_that_the_router_names(engine: VllmEngine, router: Router) -> None:
    """The server's counters of each rank grow by the calls whose header names it, and by the tokens charged there."""
    wait_until(lambda: set(ids(engine)) <= known(router), 20, "both ranks are known")
    ended, generated = by_rank(engine, "request_success_total"), by_rank(engine, "generation_tokens_total")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda number: ask(router.url, number), range(CALLS)))
    assert {answer.status for answer in answers} == {200}
    router.wait_settled()
    named = Counter(answer.headers["x-d2lpm-worker"] for answer in answers)
    assert set(named) == set(ids(engine)), "both ranks are used"
    assert grown(ended, by_rank(engine, "request_success_total")) == [named[name] for name in ids(engine)]
    charged = by_worker(router, engine, "d2lpm_worker_charged_tokens_total", kind="output")
    assert grown(generated, by_rank(engine, "generation_tokens_total")) == charged
    assert by_worker(router, engine, "d2lpm_worker_running_requests") == [0] * RANKS
    assert by_worker(router, engine, "d2lpm_worker_context_tokens") == [0] * RANKS


def grown(before: list[int], after: list[int]) -> list[int]:
    """Return by how much a counter of each rank has grown."""
    return [now - then for then, now in zip(before, after, strict=True)]
