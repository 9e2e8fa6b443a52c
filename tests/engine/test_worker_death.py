"""A vLLM killed amid its streams: another one goes on with them, and no client can tell from its answer."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import httpx
import pytest

from . import prompts
from .conftest import StartRouter, started
from .fleet import Engine, Router, SglangEngine, VllmEngine
from .processes import Server, wait_until
from .wire import CHAT, COMPLETIONS, Json, event_data, joined, loads, mapped

pytestmark = pytest.mark.engine

STREAMS = 8
"""On the worker that is killed; as many run on the other."""
TOKENS = 300
KILLED_AFTER = 60
"""Events that each stream of the victim has by then, at least."""
WIDE = {"vllm": ("--max-num-seqs=16",), "sglang": ("--max-running-requests=16",)}
"""Room for the streams of both."""


@dataclass
class Stream:
    """One call, as its client sees it."""

    path: str
    body: Json
    worker: str = ""
    received: bytes = b""
    events: int = 0
    begun: Event = field(default_factory=Event)
    """Enough came for its worker to be killed."""

    def run(self, url: str) -> None:
        """Read it to its end."""
        with httpx.stream("POST", url + self.path, json=self.body, timeout=120) as response:
            self.worker = response.headers["x-d2lpm-worker"]
            for block in response.iter_bytes():
                self.received += block
                self.events += block.count(b"data: ")
                if self.events >= KILLED_AFTER:
                    self.begun.set()
        self.begun.set()

    @property
    def answer(self) -> list[Json]:
        """Its events. AssertionError unless the stream is complete."""
        *events, done = event_data(self.received)
        assert done == b"[DONE]"
        return [loads(each) for each in events]


@pytest.fixture(scope="module")
def wide_pair(
    servers: list[Server], kind: type[VllmEngine | SglangEngine], model: Path, logs: Path
) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that run all streams at once."""
    first, second = (
        kind(f"{which} wide {kind.dialect}", model, logs / f"wide-{which}-{kind.dialect}", WIDE[kind.dialect])
        for which in ("first", "second")
    )
    yield from started(servers, first, second)


@pytest.fixture
def wide_engines(wide_pair: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Both, started again where a test has killed one."""
    for engine in wide_pair:
        if not engine.alive:
            engine.start_and_wait()
    return wide_pair


def chats() -> list[Stream]:
    """Twice as many as the victim has."""
    common: Json = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    messages = [[{"role": "user", "content": prompts.text(f"chat {number}", 40)}] for number in range(2 * STREAMS)]
    usage: Json = {"stream_options": {"include_usage": True}}
    return [Stream(CHAT, {**common, **usage, "messages": each}) for each in messages]


def texts() -> list[Stream]:
    """The same as completions."""
    return [
        Stream(
            COMPLETIONS,
            {
                **stream.body,
                "prompt": prompts.text(f"text {number}", 40),
            },
        )
        for number, stream in enumerate(chats())
    ]


def run_all(router: Router, streams: list[Stream], victim: Engine | None) -> None:
    """Run them at once, and kill the victim when all that it runs are under way."""
    with ThreadPoolExecutor(len(streams)) as pool:
        runs = [pool.submit(stream.run, router.url) for stream in streams]
        if victim is not None:
            for stream in streams:
                assert stream.begun.wait(60)
            victim.kill()
        for run in runs:
            run.result()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_stream_of_a_killed_worker_goes_on(
    start_router: StartRouter, wide_engines: tuple[Engine, Engine], path: str
) -> None:
    """Eight answers equal those of an undisturbed run, with one role, one end and the same usage."""
    made = chats if path == CHAT else texts
    router = start_router(f"router of {made.__name__}", wide_engines, "--policy=rr+fcfs")
    undisturbed, killed = made(), made()
    run_all(router, undisturbed, None)
    victim = wide_engines[0]
    name = router.worker(victim)["id"]
    run_all(router, killed, victim)

    lost = [index for index, stream in enumerate(killed) if stream.worker == name]
    assert len(lost) == STREAMS
    equal = 0
    for index in lost:
        before, after = joined_with_usage(undisturbed[index]), joined_with_usage(killed[index])
        assert after[1:] == before[1:], "roles, ending or usage differ"
        equal += after[0] == before[0]
    print(json.dumps({"path": path, "streams": len(lost), "equal": equal, "tokens": TOKENS}))
    assert equal == STREAMS
    wait_until(lambda: router.unfinished() == 0, 5, "the router counts nothing as queued or running")


def joined_with_usage(stream: Stream) -> tuple[str, list[object], list[object], object]:
    """The text of an answer, its roles, its endings and the token counts of its usage."""
    *chunks, last = stream.answer
    (choice,) = joined(chunks).values()
    usage = mapped(last["usage"])
    counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return choice.text, choice.roles, [reason for reason, _ in choice.endings], counts
