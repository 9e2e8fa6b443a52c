"""More results that the experiments must show. The tests take some minutes: `make shapes` runs them, `make test` does
not.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from bench.lab.frame.conditions import FIG7_SEEDS, FIG10_QUANTA, SEEDS
from bench.lab.frame.experiment import Row
from bench.lab.papers.fig7 import WORKLOADS as MAIN_WORKLOADS
from bench.lab.papers.fig10 import LEVELS, WORKLOADS
from tests.bench.lab.experiment_rows import figure, rows_of

OURS = ("d2lpm", "dlpm_home")
CACHE_OR_FAIRNESS = ("rr+lpm", "vtc")
"""The policies that consider only one of the two."""
DOCUMENTS = ("qa-s1", "qa-s2")


def service_at(fairness: float, curve: Sequence[Row]) -> float:
    """Return a curve's throughput at this Jain's index: linear between its points, constant beyond them."""
    points = sorted((figure([row], "Jain"), figure([row], "service/s")) for row in curve)
    for (less, service), (more, other) in pairwise(points):
        if less <= fairness <= more:
            return service + (other - service) * (fairness - less) / (more - less)
    return points[0][1] if fairness < points[0][0] else points[-1][1]


@pytest.mark.parametrize("policy", ["lpm", "vtc"])
def test_the_curve_of_dlpm_lies_above_vtc_and_lpm(policy: str) -> None:
    """In figure 1, DLPM with the Q^u that makes it as fair as the other policy serves more, and so it does at all
    points between both.
    """
    rows = rows_of("fig1")
    curve = [row for row in rows if row.labels["policy"] == "dlpm"]
    assert service_at(figure(rows, "Jain", policy=policy), curve) > figure(rows, "service/s", policy=policy)


def on_four(labels: Mapping[str, str]) -> bool:
    return labels["workers"] == "4" and labels["policy"] in (*OURS, *CACHE_OR_FAIRNESS, "preble")


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("workload", MAIN_WORKLOADS)
def test_on_four_workers_ours_serve_more_and_light_clients_wait_no_longer(workload: str, policy: str) -> None:
    """In figure 7, on every workload our policies serve more than VTC and RR+LPM, with no longer mean latency of light
    clients.
    """
    rows = [row for row in rows_of("fig7", on_four) if row.labels["workload"] == workload]
    for other in CACHE_OR_FAIRNESS:
        assert figure(rows, "service/s", policy=policy) > figure(rows, "service/s", policy=other)
        assert figure(rows, "light mean", policy=policy) <= figure(rows, "light mean", policy=other)


def documents_on_four(labels: Mapping[str, str]) -> bool:
    return labels["workload"] in DOCUMENTS and on_four(labels)


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("workload", DOCUMENTS)
def test_of_documents_ours_are_as_fair_as_vtc_and_fairer_than_the_others(workload: str, policy: str) -> None:
    """In figure 7, the median of Jain's index of actual service is within 0.02 of VTC's, and above RR+LPM's and
    Preble's.
    """
    rows = rows_of("fig7", documents_on_four, seeds=FIG7_SEEDS)
    rows = [row for row in rows if row.labels["workload"] == workload]
    ours = figure(rows, "Jain", policy=policy)
    assert ours >= figure(rows, "Jain", policy="vtc") - 0.02
    assert ours > max(figure(rows, "Jain", policy=other) for other in ("rr+lpm", "preble"))


def long_trees_in_turn(labels: Mapping[str, str]) -> bool:
    return (labels["workload"], labels["policy"]) == ("tot-s2", "rr+lpm") and labels["workers"] in ("4", "8")


def test_round_robin_loses_the_cache_as_the_fleet_grows() -> None:
    """In figure 7, with long trees, the hit rate of RR+LPM falls by at least 0.1 from four workers to eight."""
    rows = rows_of("fig7", long_trees_in_turn, quick=False)
    four, eight = (figure(rows, "hit rate", workers=workers) for workers in ("4", "8"))
    assert eight <= four - 0.1


@pytest.mark.parametrize("workload", WORKLOADS)
def test_throughput_rises_with_the_workers_quantum_above_all_others(workload: str) -> None:
    """In figure 10, D2LPM serves most with the largest Q^w, and then at least as much as any policy of others."""
    rows = rows_of("fig10")
    rising = [
        figure(rows, "service/s", **{"workload": workload, "policy": "d2lpm", "Q^w": f"{quantum}"})
        for quantum in FIG10_QUANTA
    ]
    others = [figure(rows, "service/s", workload=workload, policy=policy) for policy in LEVELS if policy not in OURS]
    assert rising[-1] >= max(*rising, *others)


@pytest.mark.parametrize("policy", OURS)
def test_light_clients_wait_less_than_under_lpm(policy: str) -> None:
    """In figure 8, the median light call begins sooner than under LPM, and after half of the time in a quarter of LPM's
    time; by then the reformed client waits at most half as long as the heavy one.
    """
    rows = rows_of("fig8")
    assert figure(rows, "light p50 1", policy=policy) < figure(rows, "light p50 1", policy="rr+lpm")
    assert figure(rows, "light p50 2", policy=policy) <= figure(rows, "light p50 2", policy="rr+lpm") / 4
    assert figure(rows, "reformed p50 2", policy=policy) <= figure(rows, "heavy p50 2", policy=policy) / 2


def few_or_many(labels: Mapping[str, str]) -> bool:
    return labels["clients"] in ("5", "50") and labels["policy"] in ("dlpm", "lpm", "vtc")


@pytest.mark.parametrize("clients", ["5", "50"])
def test_dlpm_serves_what_lpm_does_however_many_clients(clients: str) -> None:
    """In figure 11, DLPM has at least 0.95 of LPM's service, and VTC less than both; the full run is needed for its
    longer queues.
    """
    rows = rows_of("fig11", few_or_many, quick=False)
    dlpm, lpm, vtc = (figure(rows, "service/s", clients=clients, policy=each) for each in ("dlpm", "lpm", "vtc"))
    assert dlpm >= 0.95 * lpm
    assert vtc < min(dlpm, lpm)


def compared(labels: Mapping[str, str]) -> bool:
    return labels["policy"] in (*OURS, "preble", "vtc")


def test_beside_a_tenfold_prefix_ours_end_first_and_keep_their_bound() -> None:
    """In figure 9, all trees end sooner than under Preble and VTC; actual service is within the bound, the service as
    clients see it is not even.
    """
    rows = rows_of("fig9", compared)
    ends = {policy: figure(rows, "ends", policy=policy) for policy in (*OURS, "preble", "vtc")}
    assert max(ends[policy] for policy in OURS) < min(ends["preble"], ends["vtc"])
    for policy in OURS:
        assert figure(rows, "gap/bound", policy=policy) <= 1.0
        assert figure(rows, "Jain", policy=policy) >= 0.99 > figure(rows, "Jain as seen", policy=policy)


def first_parts(labels: Mapping[str, str]) -> bool:
    return labels["policy"] in ("rr+lpm", "+ E2")


def test_e2_answers_sooner_than_round_robin() -> None:
    """In figure 5 of the Preble paper, placing each request by E2 improves the average latency and saves prefill.

    The figures are medians of all seeds, because these decide how far round robin is beyond its capacity.
    """
    rows = rows_of("preble-ablation", first_parts, seeds=SEEDS)
    assert figure(rows, "latency avg", policy="+ E2") < 0.8 * figure(rows, "latency avg", policy="rr+lpm")
    assert figure(rows, "hit rate", policy="+ E2") > 0.08 + figure(rows, "hit rate", policy="rr+lpm")


def over_fcfs(labels: Mapping[str, str]) -> bool:
    return labels["engines"] == "fcfs"


def test_a_gap_grows_with_placement_alone_and_is_bounded_in_our_queues() -> None:
    """Two clients that always wait drift apart over unmodified engines, but not while both wait in the router's queue.

    With one queue for all workers, both always wait in it.
    """
    rows = rows_of("unmodified", over_fcfs)
    alone, queues, pooled = (
        [row for row in rows if row.labels["fairness by"] == by]
        for by in ("placement alone", "queues in the proxy", "one queue in the proxy")
    )
    assert figure(alone, "gap") > 1.5 * figure(alone, "gap by half time")
    for each in (queues, pooled):
        assert figure(each, "queue's gap") <= figure(each, "bound")
    assert figure(pooled, "gap") <= figure(pooled, "bound") < figure(alone, "gap")
