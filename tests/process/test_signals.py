"""Which process of `d2lpm serve --processes` is sent a signal, and how often: what becomes of the calls."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp

from tests.chaos.processes import runs
from tests.cli.test_main import streamed_call
from tests.support.running import CHAT
from tests.support.scripted_engine import DONE
from tests.support.workers_http import eventually

from .test_processes import (
    SLOW,
    all_processes,
    answer_all,
    begun,
    client_of,
    end,
    get,
    processes_of,
    status,
    stream,
    two_fronts,
    two_fronts_of_one_engine,
)


async def drains(http: aiohttp.ClientSession) -> bool:
    """Whether the fronts that get these calls drain: both, most likely."""
    return {await status(http, "/ready") for _ in range(20)} == {503}


def is_whole(answer: bytes) -> bool:
    """Whether a streamed answer came to its end, and not to an error."""
    return answer.endswith(DONE) and b'"error"' not in answer


async def test_a_signal_to_every_process_cuts_no_stream(tmp_path: Path) -> None:
    """As systemd sends it to all processes of a service: it is the same drain as by a signal to the supervisor."""
    async with two_fronts_of_one_engine(tmp_path) as (router, engine):
        async with client_of(router, workers=1) as http:
            running = [asyncio.create_task(stream(http, 150)) for _ in range(4)]
            calls = await begun(engine, 4)
            for process in (*(await all_processes(router)).values(), router.process.pid):
                os.kill(process, signal.SIGTERM)
            await eventually(lambda: drains(http))
            answering = asyncio.create_task(answer_all(engine))
            assert await status(http, CHAT, streamed_call(model="m")) == 503
            assert not any(each.done() for each in running)
            await asyncio.gather(*map(end, calls))
            for each in running:
                assert is_whole(await each)
            answering.cancel()
        code, log = router.end()
    assert code == 0
    assert "Traceback" not in log


async def test_a_front_that_is_ended_alone_is_started_again(tmp_path: Path) -> None:
    """It finishes its streams first. Nobody but the operator who has ended it would let it end otherwise."""
    async with two_fronts_of_one_engine(tmp_path) as (router, engine):
        async with client_of(router, workers=1) as http:
            running = [asyncio.create_task(stream(http, 150)) for _ in range(8)]
            calls = await begun(engine, 8)
            before = processes_of(router)["front-1"]
            os.kill(before, signal.SIGTERM)
            await asyncio.gather(*map(end, calls))
            for each in running:
                assert is_whole(await each)

            async def is_back() -> bool:
                return not runs(before) and {await status(http, "/ready") for _ in range(20)} == {200}

            await eventually(is_back)
            assert "front-1" in processes_of(router)
        router.signal(signal.SIGTERM)
        code, log = router.end()
    assert code == 0
    assert "front-1 ended with code 0" in log
    assert "Traceback" not in log


async def test_two_signals_at_once_cut_calls(tmp_path: Path) -> None:
    """No process is killed for that: each says what it has to say, and the state is saved."""
    async with two_fronts_of_one_engine(tmp_path) as (router, engine):
        async with client_of(router, workers=1) as http:
            running = asyncio.create_task(stream(http, 150))
            await begun(engine, 1)
            router.process.send_signal(signal.SIGTERM)
            router.process.send_signal(signal.SIGINT)
            assert b"shutting down" in await running
        code, log = router.end()
    assert code == 130
    assert "Traceback" not in log


async def test_a_scheduler_that_dies_during_a_drain_is_started_again(tmp_path: Path) -> None:
    """Calls that wait when the router is told to end are answered, though nothing could send them to a worker."""
    with two_fronts(tmp_path, "--max-inflight", "1", "--window", "fixed", steps=SLOW) as router:
        async with client_of(router) as http:
            calls = [asyncio.create_task(stream(http, 60)) for _ in range(8)]

            async def others_wait() -> bool:
                clients = (await get(http, "/fairness"))["clients"].values()
                return [sum(each[kind] for each in clients) for kind in ("running", "queued")] == [2, 6]

            await eventually(others_wait)
            router.process.send_signal(signal.SIGTERM)
            await eventually(lambda: drains(http))
            os.kill(processes_of(router)["scheduler"], signal.SIGKILL)
            for call in calls:
                assert is_whole(await call)
        code, log = router.end()
    assert code == 0
    assert "scheduler ended with code -9" in log
    assert "Traceback" not in log
