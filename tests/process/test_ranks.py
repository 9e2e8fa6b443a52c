"""Several fronts before an engine with ranks: each pins its calls, and all learn when the engine is gone."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tests.cli.test_main import Router, serving
from tests.process.test_processes import get, processes_of
from tests.support.running import CHAT, COMPLETIONS, TIMEOUT_S
from tests.support.workers_http import eventually
from tests.upstream.ranks.test_live_ranks import RANKS, generated, running_engine, short_chat, text

CALLS: Final = 24


@asynccontextmanager
async def client_of(router: Router) -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose calls have a connection each, so that they come to all fronts, once the ranks are up."""
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(router.url, connector=connector, timeout=timeout) as http:

        async def ready() -> bool:
            return bool((await get(http, "/ready")).get("workers") == RANKS)

        await eventually(ready)
        yield http


async def ask(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str, str]:
    """Return the status, worker and policy of an answer."""
    async with http.post(path, json=body) as response:
        await response.read()
        worker, policy = (response.headers.get(f"x-d2lpm-{name}", "") for name in ("worker", "policy"))
        return response.status, worker, policy


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_all_fronts_pin_their_calls_and_learn_of_the_engines_death(dialect: str, tmp_path: Path) -> None:
    """Each rank generates what the headers say, a path without ranks comes to the URL; once it is gone, calls fail.

    The policy is the one that balances, because the ranks step together and none is set. A new run of the scheduler
    goes on with the ranks.
    """
    with running_engine(dialect) as (url, stop):
        address = url.removeprefix("http://")
        flags = ("--processes", "3", "--poll-interval", "0.05", "--worker", url)
        with serving(tmp_path, *flags) as router:
            async with client_of(router) as http:
                bodies = [(CHAT, short_chat(f"number {number}")) for number in range(CALLS // 2)]
                bodies += [(COMPLETIONS, text(f"number {number}")) for number in range(CALLS // 2)]
                before = await generated(dialect, url)
                seen = await asyncio.gather(*(ask(http, path, body) for path, body in bodies))
                gained = [new - old for old, new in zip(before, await generated(dialect, url), strict=True)]
                assert {(status, policy) for status, _, policy in seen} == {(200, "dlpm_balance")}
                calls = Counter(worker for _, worker, _ in seen)
                each = sum(gained) / CALLS  # SGLang does not count the token of the prefill
                assert [gained[rank] / each for rank in range(RANKS)] == [
                    calls[f"{address}@{rank}"] for rank in range(RANKS)
                ]
                unpinned = await ask(http, "/v1/embeddings", {"model": "m", "input": "Hi"})
                assert unpinned[:2] == (200, address)
                os.kill(processes_of(router)["scheduler"], signal.SIGKILL)

                async def all_serve() -> bool:  # calls are refused if the next run comes late
                    again = await asyncio.gather(*(ask(http, CHAT, short_chat(f"again {n}")) for n in range(2 * RANKS)))
                    return {worker for _, worker, _ in again} == {f"{address}@{rank}" for rank in range(RANKS)}

                await eventually(all_serve)
                stop()
                assert {
                    status for status, *_ in await asyncio.gather(*(ask(http, CHAT, short_chat()) for _ in range(8)))
                } <= {
                    502,
                    503,
                }

                async def down() -> bool:
                    workers = (await get(http, "/workers")).get("workers", ())  # none while no scheduler answers
                    return len(workers) == RANKS + 1 and not any(worker["healthy"] for worker in workers)

                await eventually(down)
                report = await get(http, "/fairness")
                assert {(each["running"], each["queued"]) for each in report["workers"].values()} == {(0, 0)}
