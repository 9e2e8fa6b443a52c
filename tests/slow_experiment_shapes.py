"""What more of the DLPM paper's experiments show: some minutes, so `make shapes` runs them and `make test` does not."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from experiment_rows import figure, rows_of

from bench.experiments.conditions import FIG10_QUANTA
from bench.experiments.fig7 import WORKLOADS as MAIN_WORKLOADS
from bench.experiments.fig10 import LEVELS, WORKLOADS

OURS = ("d2lpm", "dlpm_home")
CACHE_OR_FAIRNESS = ("rr+lpm", "vtc")
"""The policies that look at one of the two alone."""


def on_four(labels: Mapping[str, str]) -> bool:
    return labels["workers"] == "4" and labels["policy"] in (*OURS, *CACHE_OR_FAIRNESS)


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("workload", MAIN_WORKLOADS)
def test_on_four_workers_ours_serve_more_and_light_clients_wait_less(workload: str, policy: str) -> None:
    """Figure 7: more than VTC and RR+LPM, and a shorter mean latency of the well-behaved, on every workload."""
    rows = [row for row in rows_of("fig7", on_four) if row.labels["workload"] == workload]
    for other in CACHE_OR_FAIRNESS:
        assert figure(rows, "service/s", policy=policy) > figure(rows, "service/s", policy=other)
        assert figure(rows, "light mean", policy=policy) < figure(rows, "light mean", policy=other)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_throughput_rises_with_the_workers_quantum_above_all_others(workload: str) -> None:
    """Figure 10: each larger Q^w serves more, and the largest more than any other policy."""
    rows = rows_of("fig10")
    rising = [
        figure(rows, "service/s", **{"workload": workload, "policy": "d2lpm", "Q^w": f"{quantum}"})
        for quantum in FIG10_QUANTA
    ]
    assert all(less <= more for less, more in pairwise(rising))
    others = [figure(rows, "service/s", workload=workload, policy=policy) for policy in LEVELS]
    assert rising[-1] > max(others)


@pytest.mark.parametrize("policy", OURS)
def test_light_clients_wait_less_than_under_lpm(policy: str) -> None:
    """Figure 8: half of the light clients' calls begin sooner, after half of the time in a quarter of LPM's; by then
    the reformed client waits less than half as long as the one that did not reform.
    """
    rows = rows_of("fig8")
    assert figure(rows, "light p50 1", policy=policy) < figure(rows, "light p50 1", policy="rr+lpm")
    assert figure(rows, "light p50 2", policy=policy) <= figure(rows, "light p50 2", policy="rr+lpm") / 4
    assert figure(rows, "reformed p50 2", policy=policy) <= figure(rows, "heavy p50 2", policy=policy) / 2


def few_or_many(labels: Mapping[str, str]) -> bool:
    return labels["clients"] in ("5", "50") and labels["policy"] in ("dlpm", "lpm", "vtc")


@pytest.mark.parametrize("clients", ["5", "50"])
def test_dlpm_serves_what_lpm_does_however_many_clients(clients: str) -> None:
    """Figure 11: at least 0.95 of LPM's service, and VTC less than both; on the whole run, whose queues are longer."""
    rows = rows_of("fig11", few_or_many, quick=False)
    dlpm, lpm, vtc = (figure(rows, "service/s", clients=clients, policy=each) for each in ("dlpm", "lpm", "vtc"))
    assert dlpm >= 0.95 * lpm
    assert vtc < min(dlpm, lpm)


def test_a_mix_ends_first_under_dlpm_and_lpm_makes_conversations_wait() -> None:
    """Figure 12: the shortest makespan, and half of the conversations' calls begin sooner than under LPM; whole run."""
    rows = rows_of("fig12", quick=False)
    ends = {row.labels["policy"]: figure([row], "ends") for row in rows}
    assert min(ends, key=lambda policy: ends[policy]) == "dlpm"
    assert figure(rows, "chat p50", policy="dlpm") <= figure(rows, "chat p50", policy="lpm") / 2
