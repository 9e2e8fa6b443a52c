"""Many polite clients with one call open each, in virtual time: all are served, and light ones wait about one fair
round.
"""

from dataclasses import replace

import pytest

from bench.lab.frame.felt_loads import SMALL, WORKERS
from bench.lab.sweeps.felt import figures
from bench.report.summary import summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.crowds import LIGHT, POLITE, Crowd
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters, DlpmParameters

WITHOUT_END = DlpmHomeParameters(round_seconds=0.0, overdue_after=0.0, head_start=0.0)
IN_ORDER = DlpmHomeParameters(cached_first=False)


def felt(
    clients: int,
    *parameters: DlpmHomeParameters | DlpmParameters,
    policy: str = "dlpm_home",
    spec: WorkerSpec = SMALL,
    calls_each: int = 1,
    seconds: float = 80.0,
) -> dict[str, float]:
    """Serve a crowd, each client of which has so many calls open, and return what its clients feel."""
    workload = Crowd(crowd=replace(POLITE, client_count=clients, concurrency=calls_each), light=LIGHT)
    result = Simulation(Scenario(policy, workload, (spec,) * WORKERS, seconds, 40.0, parameters=parameters)).run()
    measured = figures(result, summarise(result))
    return {name: value for name, value in measured.items() if isinstance(value, float | int)}


def test_a_crowd_is_served_whole() -> None:
    """Of 120 clients for 32 slots all are served, and light clients wait at most one and a half fair rounds.

    By longest match alone some stay unserved, and hardly more calls are served.
    """
    ours, theirs, by_match = felt(120), felt(120, policy="cache_aware"), felt(120, WITHOUT_END)
    assert (ours["unserved"], by_match["unserved"] > 0) == (0, True)
    assert ours["light longest"] <= 1.5 * max(ours["fair round"], theirs["light longest"])
    assert ours["calls/s"] >= 0.97 * by_match["calls/s"]


def test_nobody_waits_for_clients_that_came_early_with_two_calls_each() -> None:
    """The first of 60 clients begin to wait while hardly anybody else is active. The others, and light clients, need
    not wait until the first have spent a whole quantum each: nobody goes unserved for longer than three fair rounds.
    """
    ours = felt(60, calls_each=2, seconds=140.0)
    assert ours["unserved rounds"] <= 3
    assert ours["light longest"] <= 1.5 * ours["fair round"]


def test_queues_per_worker_serve_a_crowd_if_the_overdue_go_first() -> None:
    """By default D2LPM leaves most of 120 clients unserved and lets light ones wait many rounds; with `overdue_after`
    it does not.
    """
    by_turns, by_match = felt(120, DlpmParameters(overdue_after=1.0), policy="d2lpm"), felt(120, policy="d2lpm")
    assert by_match["unserved"] > 60
    assert by_match["light longest"] > 5 * by_match["fair round"]
    assert by_turns["unserved"] == 0
    assert by_turns["light longest"] <= 1.5 * by_turns["fair round"]
    assert by_turns["calls/s"] >= by_match["calls/s"]


def test_nobody_with_two_calls_open_misses_rounds() -> None:
    """Of 120 clients with two calls open, nobody is unserved for more than three fair rounds, although a client in debt
    that always has a call waiting never begins to wait anew.
    """
    ours = felt(120, calls_each=2, seconds=200.0)
    assert ours["unserved rounds"] <= 3
    assert ours["light longest"] <= 1.5 * ours["fair round"]


@pytest.mark.parametrize("calls_each", [1, 2])
def test_rounds_keep_part_of_a_crowd_beyond_the_caches_cached(calls_each: int) -> None:
    """Where caches hold two thirds of the prefixes of 90 clients, rounds serve more calls than turns in a fixed order,
    which find few prefixes cached, and nobody waits for more than two rounds per call.
    """
    small = replace(SMALL, kv_tokens=30 * 3200)
    in_rounds, in_order = (felt(90, *each, spec=small, calls_each=calls_each) for each in ((), (IN_ORDER,)))
    assert in_order["hit rate"] < 0.5 * in_rounds["hit rate"]
    assert in_rounds["hit rate"] > 0.4
    assert in_rounds["calls/s"] > 1.3 * in_order["calls/s"]
    assert in_rounds["unserved"] == 0
    assert in_rounds["others longest"] <= 2 * calls_each * in_rounds["fair round"]
