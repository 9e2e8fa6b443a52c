"""What the DLPM paper's experiments show and these do too, on quick runs; `slow_experiment_shapes.py` has the others.

Where a shape does not appear, `docs/results.md` says so, and nothing here asserts it.
"""

from collections.abc import Mapping

from quick_experiments import figure, quick_rows

OURS = ("d2lpm", "dlpm_home")
OTHERS = ("preble", "vtc")


def compared(labels: Mapping[str, str]) -> bool:
    return labels["policy"] in (*OURS, *OTHERS)


def test_beside_a_tenfold_prefix_ours_end_first_and_keep_their_bound() -> None:
    """Figure 9: all trees end sooner than under Preble and VTC, actual service within the bound, seen service not."""
    rows = quick_rows("fig9", compared)
    ends = {policy: figure(rows, "ends", policy=policy) for policy in (*OURS, *OTHERS)}
    assert max(ends[policy] for policy in OURS) < min(ends[policy] for policy in OTHERS)
    for policy in OURS:
        assert figure(rows, "gap/bound", policy=policy) <= 1.0
        assert figure(rows, "Jain", policy=policy) >= 0.99 > figure(rows, "Jain as seen", policy=policy)
