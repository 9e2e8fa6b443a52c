"""Every alert fires because of a fault in a running stack, and did not fire before."""

import re
import time
from pathlib import Path
from typing import Final

import httpx
import pytest
import yaml

from tests.cluster.replicas.environment import STORE, library_path, program
from tests.engine.processes import Server, wait_until
from tests.support.dockerfile import ROOT

from .callers import Body, completion
from .conftest import Start
from .prometheus import DURATION, FACTOR, SECONDS, shortened

RULES: Final = (ROOT / "deploy/prometheus/rules.yml").read_text("utf-8")
TIMEOUT: Final = 60.0
WORD: Final = "of what was said before, "


def test_every_alert_is_made_to_fire() -> None:
    """Each alert of the rules is in the mark `fires` of one test, and no mark names another."""
    known = [rule["alert"] for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"] if "alert" in rule]
    marks = [mark for each in globals().values() for mark in getattr(each, "pytestmark", []) if mark.name == "fires"]
    assert sorted(name for mark in marks for name in mark.args) == sorted(known)


def test_only_durations_are_shortened() -> None:
    """The shortened rules are the rules, but for windows and times of a thirtieth."""
    short = shortened(RULES)
    assert re.sub(r"\d+[smh]\b", "", short) == re.sub(r"\d+[smh]\b", "", RULES)
    before, after = ([int(many) * SECONDS[unit] for many, unit in DURATION.findall(text)] for text in (RULES, short))
    assert before == [FACTOR * each for each in after]


@pytest.mark.fires(
    "D2lpmWorkerSilent",
    "D2lpmFileFailing",
    "D2lpmLoopHeld",
    "D2lpmHeldBytesNearLimit",
    "D2lpmRouterAbsent",
    "D2lpmRouterDown",
)
def test_outages(start: Start, tmp_path: Path) -> None:
    """A worker dies; the state's folder is lost; the router's process gets no CPU time; clients leave large bodies with
    it; Prometheus loses its target; the router dies.
    """
    state = tmp_path / "state"
    settings = ["--state", str(state), "--state-interval", "0.5", "--max-held-bytes", "1000000"]
    with start([], [], settings=settings) as stand:
        wait_until(state.is_dir, TIMEOUT, "the state is saved")
        with stand.fires("D2lpmWorkerSilent"):
            stand.workers[1].kill()
        with stand.fires("D2lpmFileFailing"):
            state.rename(tmp_path / "lost")
            state.write_text("The volume is gone.")
        with stand.fires("D2lpmLoopHeld"):
            for _ in range(20):  # the sleeps are the fault: no CPU time for half of the time
                stand.router.stand_still()
                time.sleep(0.3)
                stand.router.go_on()
                time.sleep(0.3)
        with stand.fires("D2lpmHeldBytesNearLimit"):
            large = completion("Hello", 4_000, ignored="x" * 60_000)
            for number in range(2, 17):
                stand.callers.keep(stand.router.url, "ann", 1, lambda *_: large, f"127.0.0.{number}")
        with stand.fires("D2lpmRouterAbsent"):
            stand.prometheus.set_targets([])
            stand.prometheus.reload()
        stand.prometheus.set_targets([stand.router.url.removeprefix("http://")])
        stand.prometheus.reload()
        wait_until(stand.prometheus.scrapes, TIMEOUT, "Prometheus scrapes the router")
        with stand.fires("D2lpmRouterDown"):
            stand.router.kill()


@pytest.mark.fires("D2lpmWorkerLeftOut", "D2lpmRequestsFailing")
def test_an_engine_that_fails_calls(start: Start) -> None:
    """One of two workers answers every call with 500, and its breaker opens; then the other one does, too."""
    with start([], []) as stand:
        stand.callers.keep(stand.router.url, "ann", 4, lambda *_: completion("Hello"))
        wait_until(lambda: stand.callers.answered.get("ann", 0) > 20, TIMEOUT, "calls are answered")
        with stand.fires("D2lpmWorkerLeftOut"):
            _fail(stand.workers[0])
        with stand.fires("D2lpmRequestsFailing"):
            _fail(stand.workers[1])


@pytest.mark.fires("D2lpmLongQueue", "D2lpmSlowFirstToken", "D2lpmRefusing")
def test_more_load_than_the_fleet_can_serve(start: Start) -> None:
    """A worker serves two calls a second, and a hundred callers arrive; then more than the queue holds."""
    slow = ["--step-times", "100,0,0", "--max-running", "2"]
    settings = ["--window", "fixed", "--max-inflight", "2", "--max-queued", "120"]
    with start(slow, settings=settings) as stand:
        stand.callers.keep(stand.router.url, "ann", 1, lambda *_: completion("Hello", 10))
        wait_until(lambda: stand.callers.answered.get("ann", 0) > 3, TIMEOUT, "calls are answered")
        with stand.fires("D2lpmLongQueue", "D2lpmSlowFirstToken"):
            stand.callers.keep(stand.router.url, "ann", 99, lambda *_: completion("Hello", 10))
        with stand.fires("D2lpmRefusing"):
            stand.callers.keep(stand.router.url, "bob", 50, lambda *_: completion("Hello", 10))


@pytest.mark.fires("D2lpmClientStarving", "D2lpmClientUnserved", "D2lpmLongWaits")
def test_a_client_without_a_cached_prefix_starves(start: Start) -> None:
    """Under longest prefix match alone, a client whose prompts share a prefix fills the queue; the other one waits."""
    settings = ["--policy", "rr+lpm", "--lpm.cut-off", "0", "--window", "fixed", "--max-inflight", "4"]
    with start(["--step-times", "20,0,0", "--max-running", "4"], settings=settings) as stand:
        stand.callers.keep(stand.router.url, "ann", 1, _shared)
        stand.callers.keep(stand.router.url, "bob", 5, _own)
        wait_until(lambda: min(stand.callers.answered.get(one, 0) for one in ("ann", "bob")) > 20, TIMEOUT, "answers")
        with stand.fires("D2lpmClientStarving", "D2lpmClientUnserved", "D2lpmLongWaits"):
            stand.callers.keep(stand.router.url, "ann", 40, _shared)


@pytest.mark.fires("D2lpmGapNearBound")
def test_a_quantum_that_is_large_beside_the_calls(start: Start) -> None:
    """A client that joins when the other one's quantum is nearly spent, and has the longest matches, is served two
    quanta in a row: the worst case of the theorem, which calls much smaller than the quantum come near to.
    """
    quantum = 40_000
    settings = [*("--policy", "rr+dlpm", "--dlpm.quantum", str(quantum), "--no-dlpm.sparse-first"), "--dlpm.head-start"]
    settings += ["0", "--dlpm.oldest-every", "0", "--window", "fixed", "--max-inflight", "4"]
    with start(["--step-times", "10,0,0", "--max-running", "4"], settings=settings) as stand:

        def left() -> float:
            clients = stand.fairness()["clients"].values()
            return min((one["order"] for client in clients for one in client["deficit"].values()), default=quantum)

        stand.callers.keep(stand.router.url, "ann", 24, _own)
        wait_until(lambda: 0 < left() < 0.1 * quantum, TIMEOUT, "the quantum is nearly spent")
        with stand.fires("D2lpmGapNearBound"):
            stand.callers.keep(stand.router.url, "bob", 24, _prefixed)


@pytest.mark.fires("D2lpmHitRateFell", "D2lpmCalibrationOff", "D2lpmComputedUncharged", "D2lpmCacheUntold")
def test_calls_that_bypass_the_router(start: Start) -> None:
    """Others call one of two workers without the router, and their prompts displace what the router knows of; the other
    worker is started again without the flag that makes it report what was cached.
    """
    small = ["--kv-tokens", "4400"]
    with start(small, small, settings=["--policy", "round_robin"]) as stand:
        told, untold = stand.workers
        stand.callers.keep(stand.router.url, "ann", 1, _shared)
        hits = "d2lpm:cache_hits:ratio_rate5m[30s]"
        usual = f"min_over_time({hits}) > 0.7 and count_over_time({hits}) >= 29"
        wait_until(lambda: stand.prometheus.holds(usual), 2 * TIMEOUT, "half a minute of hits")
        with stand.fires("D2lpmHitRateFell", "D2lpmCalibrationOff", "D2lpmComputedUncharged", "D2lpmCacheUntold"):
            untold.kill()
            stand.start_another(untold, *small, "--hide-cached")
            stand.callers.keep(told.url, "stranger", 2, _long)


@pytest.mark.fires("D2lpmClusterAlone", "D2lpmClusterStoreUnreachable")
def test_a_cluster(start: Start, tmp_path: Path) -> None:
    """The only replica that waits to lead dies, and then the store."""
    command = [str(program(STORE)), "--port", "{port}", "--bind", "127.0.0.1", "--save", ""]
    store = Server("store", command, library_path(), tmp_path / "store.log")
    store.start()
    cluster = ["--cluster", f"redis://127.0.0.1:{store.port}/alerts"]
    try:
        with start([], settings=cluster) as stand:
            other = stand.start_replica(*cluster)
            with stand.fires("D2lpmClusterAlone"):
                other.kill()
            with stand.fires("D2lpmClusterStoreUnreachable"):
                store.kill()
    finally:
        store.stop()


def _fail(worker: Server) -> None:
    """Let a worker answer all further calls with 500."""
    httpx.post(f"{worker.url}/emulated/faults", json={"fail": 100_000}, trust_env=False).raise_for_status()


def _shared(number: int, turn: int) -> Body:
    """A call with a long prefix that all calls of its client have."""
    return completion(WORD * 100 + f"Caller {number} asks for the {turn}. time.", 20)


def _prefixed(number: int, turn: int) -> Body:
    """The same with a short prefix, which is long enough to count as a match."""
    return completion(WORD * 20 + f"Caller {number} asks for the {turn}. time.")


def _own(number: int, turn: int) -> Body:
    """A call whose prompt nobody has sent before."""
    return completion(f"Caller {number} asks for the {turn}. time, " + WORD * 5)


def _long(number: int, turn: int) -> Body:
    """A long call whose prompt nobody has sent before."""
    return completion(f"Stranger {number} asks for the {turn}. time, " + WORD * 300, 4)
