"""What the DLPM paper's experiments show and these do too, on quick runs; `slow_experiment_shapes.py` has the others.

Where a shape does not appear, `docs/results.md` says so, and nothing here asserts it.
"""

from collections.abc import Mapping

import pytest
from experiment_rows import figure, rows_of

OURS = ("d2lpm", "dlpm_home")
OTHERS = ("preble", "vtc")


def compared(labels: Mapping[str, str]) -> bool:
    return labels["policy"] in (*OURS, *OTHERS)


def test_beside_a_tenfold_prefix_ours_end_first_and_keep_their_bound() -> None:
    """Figure 9: all trees end sooner than under Preble and VTC, actual service within the bound, seen service not."""
    rows = rows_of("fig9", compared)
    ends = {policy: figure(rows, "ends", policy=policy) for policy in (*OURS, *OTHERS)}
    assert max(ends[policy] for policy in OURS) < min(ends[policy] for policy in OTHERS)
    for policy in OURS:
        assert figure(rows, "gap/bound", policy=policy) <= 1.0
        assert figure(rows, "Jain", policy=policy) >= 0.99 > figure(rows, "Jain as seen", policy=policy)


def documents_on_four(labels: Mapping[str, str]) -> bool:
    wanted = (*OURS, "rr+lpm", *OTHERS)
    return (labels["workload"], labels["workers"]) == ("qa-s2", "4") and labels["policy"] in wanted


@pytest.mark.parametrize(("policy", "times"), [("d2lpm", 1.3), ("dlpm_home", 2.0)])
def test_of_documents_ours_serve_most_and_light_clients_wait_least(policy: str, times: float) -> None:
    """Figure 7, long prefixes: at least twice VTC's throughput, and more than the others'; of the well-behaved the mean
    latency under each other policy is so many times as long at least.
    """
    rows = rows_of("fig7", documents_on_four)
    service = figure(rows, "service/s", policy=policy)
    assert service >= 2 * figure(rows, "service/s", policy="vtc")
    for other in ("rr+lpm", *OTHERS):
        assert service > figure(rows, "service/s", policy=other)
        assert figure(rows, "light mean", policy=other) >= times * figure(rows, "light mean", policy=policy)
