"""Weights of clients with a real engine: while both clients wait, twice the weight gets twice the service."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event

import pytest

from . import prompts
from .conftest import StartRouter
from .fleet import NARROW, Engine, Router
from .processes import wait_until
from .wire import COMPLETIONS, Json, call, mapped

pytestmark = pytest.mark.engine

WEIGHTS = {"heavy": 2, "light": 1}
AT_ONCE = 10
"""Calls that each client keeps open: more than the window, so that both always have some waiting."""
INPUT, OUTPUT = 200, 20
QUANTUM = 300
RESERVED = NARROW * OUTPUT
"""The most output tokens reserved for one client, which may have all places."""
BOUND = 2 * (INPUT + 2 * RESERVED + QUANTUM) + 2 * NARROW * INPUT
"""Bound of the gap per weight (`router.core.clients.fairness`), for uncached prompts of known sizes and limits.

In cost units: one per input token, two per output token.
"""
BODY: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": OUTPUT}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Write the clients file and return the clients' keys."""
    add = [str(Path(sys.executable).with_name("d2lpm")), "keys", "add", "--file", str(tmp_path / "clients.yaml")]
    return {
        name: subprocess.run(
            [*add, name, "--weight", str(weight)], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name, weight in WEIGHTS.items()
    }


@pytest.fixture
def weighing(
    start_router: StartRouter, engines: tuple[Engine, ...], keys: dict[str, str], tmp_path: Path
) -> Iterator[Router]:
    """Start a router with a narrow window to the first engine, whose order is that of the paper's deficit counters."""
    assert keys
    flags = (f"--clients={tmp_path / 'clients.yaml'}", f"--max-inflight={NARROW}", f"--dlpm.quantum={QUANTUM}")
    router = start_router("weighing router", engines[:1], "--policy=rr+dlpm", *flags)
    yield router
    router.stop()


def test_service_is_by_weight(weighing: Router, keys: dict[str, str]) -> None:
    """Over an interval in which both clients wait, their service per weight differs at most by the theorem's bound."""
    over = Event()
    with ThreadPoolExecutor(AT_ONCE * len(keys)) as pool:
        clients = [pool.submit(ask_on, weighing, name, keys[name], over) for name in keys for _ in range(AT_ONCE)]
        try:
            wait_until(lambda: both_wait(weighing), 30, "calls of both wait")
            before = per_weight(weighing)
            wait_until(lambda: min(gained(weighing, before).values()) >= 5 * BOUND, 120, "enough is served")
            gains = gained(weighing, before)
            assert both_wait(weighing)
        finally:
            over.set()
        assert all(client.result() for client in clients)
    assert abs(gains["heavy"] - gains["light"]) <= BOUND


def ask_on(router: Router, name: str, key: str, over: Event) -> bool:
    """Make calls in turn, each with a prompt of its own; return whether all were answered."""
    thread = object()
    for number in count():
        prompt = prompts.tokens(f"{name} {id(thread)} {number}", INPUT)
        if call(router.url, COMPLETIONS, {**BODY, "prompt": prompt}, key).status != 200:
            return False
        if over.is_set():
            return True
    raise AssertionError


def both_wait(router: Router) -> bool:
    clients = mapped(router.get("/fairness")["clients"])
    return all(int(str(mapped(clients.get(name, {})).get("queued", 0))) > 0 for name in WEIGHTS)


def per_weight(router: Router) -> dict[str, float]:
    return {name: float(str(router.service(name)["cost"])) / weight for name, weight in WEIGHTS.items()}


def gained(router: Router, before: dict[str, float]) -> dict[str, float]:
    return {name: service - before[name] for name, service in per_weight(router).items()}
