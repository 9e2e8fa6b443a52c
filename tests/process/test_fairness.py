"""Fairness over several fronts: one scheduler counts all service, so the bound holds whichever front a call uses."""

import asyncio
from hashlib import sha256
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp

from tests.support.running import COMPLETIONS
from tests.support.workers_http import eventually

from .test_processes import calls_by_process, client_of, get, two_fronts

WEIGHTS: Final = {"heavy": 2, "light": 1}
AT_ONCE: Final = 80
"""Calls that each client keeps open: so many that both have some waiting also if the test gets no core for seconds."""
WINDOW: Final = 2
PLACES: Final = 2 * WINDOW
"""Calls that both workers take at a time."""
INPUT, OUTPUT, QUANTUM = 200, 20, 300
BOUND: Final = 2 * (INPUT + 2 * PLACES * OUTPUT + QUANTUM) + 2 * PLACES * INPUT
"""Bound of the gap per weight (`router.core.clients.fairness`), for uncached prompts of known sizes and limits.

In cost units: one per input token, two per output token.
"""
STEPS: Final = ("--step-times", "4,0,0", "--speed", "1")
"""Flags of workers that take 4 ms for each token of an answer."""


async def ask_on(http: aiohttp.ClientSession, client: str, number: int, over: asyncio.Event) -> None:
    """Make calls in turn, each with a prompt of its own and a connection of its own, so at either front."""
    random = Random(f"{client} {number}")
    for _ in count():
        prompt = [random.randrange(30_000) for _ in range(INPUT)]
        body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True}
        async with http.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {client}"}) as response:
            assert response.status == 200, await response.text()
            await response.read()
        if over.is_set():
            return


def per_weight(clients: dict[str, Any]) -> dict[str, float]:
    """The service of each client divided by its weight."""
    return {name: clients[name]["service"]["cost"] / weight for name, weight in WEIGHTS.items()}


async def test_service_is_by_weight_over_all_fronts(tmp_path: Path) -> None:
    """While both clients wait, their service per weight differs at most by the theorem's bound."""
    lines = [
        f"  {name}: {{key: 'sha256:{sha256(name.encode()).hexdigest()}', weight: {weight}}}"
        for name, weight in WEIGHTS.items()
    ]
    (tmp_path / "clients.yaml").write_text("\n".join(["clients:", *lines]))
    flags = [f"--clients={tmp_path / 'clients.yaml'}", "--window=fixed", f"--max-inflight={WINDOW}"]
    flags += ["--policy=rr+dlpm", f"--dlpm.quantum={QUANTUM}"]
    over = asyncio.Event()
    with two_fronts(tmp_path, *flags, steps=STEPS) as router:
        async with client_of(router) as http:
            asking = [asyncio.create_task(ask_on(http, name, n, over)) for name in WEIGHTS for n in range(AT_ONCE)]
            seen: dict[str, Any] = {}

            async def both_wait() -> bool:
                seen.update((await get(http, "/fairness"))["clients"])
                return all(seen.get(name, {"queued": 0})["queued"] for name in WEIGHTS)

            await eventually(both_wait)
            before = per_weight(seen)

            async def enough_is_served() -> bool:
                assert await both_wait()
                return min(served - before[name] for name, served in per_weight(seen).items()) >= 3 * BOUND

            await eventually(enough_is_served)
            gains = {name: served - before[name] for name, served in per_weight(seen).items()}
            calls = await calls_by_process(http)
            over.set()
            await asyncio.gather(*asking)
    assert abs(gains["heavy"] - gains["light"]) <= BOUND
    assert calls["front-1"]
    assert calls["front-2"]
