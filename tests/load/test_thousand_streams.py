"""A thousand streams run at once: none is lost, and none contains a word of another."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import aiohttp
import orjson
import pytest

from tests.support.running import COMPLETIONS, RunningRouter, running_router

STREAMS = 1000
TOKENS = 64
DESCRIPTORS = 8192
"""A stream takes three here: the client's end, the router's, and the router's to the worker."""


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Allow enough open files, where the hard limit permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Worker:
    """An emulated worker as a process that can be stopped."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.url = process.stdout.readline().split()[-1]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the worker meanwhile; its socket still accepts connections."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


@pytest.fixture
def workers(descriptors: None) -> Iterator[list[Worker]]:  # noqa: ARG001 - they inherit the limit
    command = [sys.executable, "-m", "workers", "--port", "0", "--model", "m", "--speed", "0", "--exit-with-parent"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        for process in processes:
            stack.callback(process.terminate)
        yield [Worker(process) for process in processes]


def prompt(number: int) -> str:
    return f"Stream {number} is about " + "the sea and " * (number % 7)


def body(prompts: object, **more: object) -> dict[str, object]:
    return {"model": "m", "prompt": prompts, "max_tokens": TOKENS, "ignore_eos": True, **more}


async def direct_answers(url: str) -> list[str]:
    """Return one worker's answer to each prompt: emulated workers answer alike."""
    answers: list[str] = []
    async with aiohttp.ClientSession() as http:
        for start in range(0, STREAMS, 100):
            prompts = [prompt(number) for number in range(start, start + 100)]
            async with http.post(url + COMPLETIONS, json=body(prompts)) as response:
                choices = (await response.json())["choices"]
            answers += [choice["text"] for choice in sorted(choices, key=lambda choice: int(choice["index"]))]
    return answers


async def answer(router: RunningRouter, number: int) -> str:
    """Return one stream's text; raises AssertionError unless it is complete and of one request alone."""
    async with router.post(body(prompt(number), stream=True, user=f"{number % 20}"), COMPLETIONS) as post:
        *events, done, nothing = (await post.read()).split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def test_a_thousand_streams_at_once(workers: list[Worker]) -> None:
    """All requests are at the workers before the first has a token, each gets the answer of a direct call, and
    nothing is left.
    """
    expected = await direct_answers(workers[0].url)
    assert len(set(expected)) == STREAMS
    room = {"window": "fixed", "max_inflight": STREAMS, "max_unstarted_tokens": 10**6, "poll_interval": 3600}
    silent = {"silence_timeout": 0}  # they show no life while they are stopped, however long all of that takes
    async with running_router(*(worker.url for worker in workers), **room, **silent) as router:
        with workers[0].held(), workers[1].held():
            streams = [asyncio.ensure_future(answer(router, number)) for number in range(STREAMS)]
            await router.until_running(STREAMS)
        assert await asyncio.gather(*streams) == expected
        await router.until_all_ended()
        report = await router.fairness()
        assert sum(entry["service"]["output"] for entry in report["clients"].values()) == STREAMS * TOKENS
