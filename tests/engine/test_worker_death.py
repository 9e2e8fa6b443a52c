"""Tests a server killed during its streams: another one continues them, and no client can tell from its answer."""

import json
from collections.abc import Iterator

import pytest

from .conftest import StartRouter
from .fleet import Engine, Router
from .streams import TOKENS, Said, Stream, chats, run_all, texts
from .wire import CHAT, COMPLETIONS

pytestmark = pytest.mark.engine

ON_THE_VICTIM = {CHAT: 12, COMPLETIONS: 8}
"""Streams at the worker that is killed; as many run at the other one."""
ATTEMPTS = 4
"""Attempts to kill a worker while all of its streams run."""


@pytest.fixture
def routers(start_router: StartRouter, fleet: str, engines: tuple[Engine, ...]) -> Iterator[dict[str, Router]]:
    """Start a router for chats and one for completions, each of which gives its calls to the engines in turn."""
    started = {
        path: start_router(f"router of the {fleet} for {path.replace('/', ' ')}", engines, "--policy=rr+fcfs")
        for path in ON_THE_VICTIM
    }
    yield started
    for router in started.values():
        router.stop()


def streams(routers: dict[str, Router]) -> list[tuple[Router, Stream]]:
    made = {CHAT: chats(2 * ON_THE_VICTIM[CHAT]), COMPLETIONS: texts(2 * ON_THE_VICTIM[COMPLETIONS])}
    return [(routers[path], stream) for path, each in made.items() for stream in each]


@pytest.mark.fleets("wide vllm", "wide sglang")
def test_every_stream_of_a_killed_worker_is_continued(
    routers: dict[str, Router], fleet: str, engines: tuple[Engine, ...]
) -> None:
    """Each of twenty streams has the role, end and usage of an undisturbed run, and its text if continued by ids.

    Completions and vLLM's chats are continued by token ids. SGLang's chats are continued by their text, which may be
    split into other tokens. Even with ids, the text of one stream of each kind may differ: a server that prefills what
    another has decoded rounds differently, and may choose the other of two tokens that are equally likely.
    """
    undisturbed = streams(routers)
    run_all(undisturbed)
    victim = engines[0]
    name = routers[CHAT].worker(victim)["id"]
    for _ in range(ATTEMPTS):
        killed = streams(routers)
        if run_all(killed, victim):
            break
    else:
        pytest.fail("each time a stream was over before the last had begun")

    pairs: dict[str, list[tuple[Said, Said]]] = {path: [] for path in ON_THE_VICTIM}
    for (_, before), (_, after) in zip(undisturbed, killed, strict=True):
        if after.worker == name:
            pairs[after.path].append((before.said, after.said))
    assert {path: len(each) for path, each in pairs.items()} == ON_THE_VICTIM
    exact = {path: sum(after == before for before, after in each) for path, each in pairs.items()}
    print(json.dumps({"fleet": fleet, "killed amid": ON_THE_VICTIM, "exact": exact, "tokens": TOKENS}))
    for each in pairs.values():
        assert [after[1:] for _, after in each] == [before[1:] for before, _ in each]
    assert exact[COMPLETIONS] >= ON_THE_VICTIM[COMPLETIONS] - 1
    if fleet == "wide vllm":
        assert exact[CHAT] >= ON_THE_VICTIM[CHAT] - 1
    for router in routers.values():
        router.wait_settled()
