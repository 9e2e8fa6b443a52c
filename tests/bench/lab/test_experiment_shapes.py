"""Results of the DLPM paper's experiments that quick runs show, too; `slow_experiment_shapes.py` has the others.

Where a result does not appear, `docs/results.md` says so, and no test asserts it.
"""

from collections.abc import Mapping

import pytest

from bench.lab.frame.conditions import FIG7_SEEDS
from tests.bench.lab.experiment_rows import figure, rows_of

OURS = ("d2lpm", "dlpm_home")
OTHERS = ("preble", "vtc")


def documents_on_four(labels: Mapping[str, str]) -> bool:
    wanted = (*OURS, "rr+lpm", *OTHERS)
    return (labels["workload"], labels["workers"]) == ("qa-s2", "4") and labels["policy"] in wanted


@pytest.mark.parametrize(("policy", "times"), [("d2lpm", 1.3), ("dlpm_home", 2.0)])
def test_of_documents_ours_serve_most_and_light_clients_wait_least(policy: str, times: float) -> None:
    """In figure 7 with long prefixes, our policies serve at least twice as much as VTC, and more than the others, under
    which the mean latency of light clients is at least `times` as long. The figures are medians, because the mean of
    one seed is of forty answers.
    """
    rows = rows_of("fig7", documents_on_four, seeds=FIG7_SEEDS)
    service = figure(rows, "service/s", policy=policy)
    assert service >= 2 * figure(rows, "service/s", policy="vtc")
    for other in ("rr+lpm", *OTHERS):
        assert service > figure(rows, "service/s", policy=other)
        assert figure(rows, "light mean", policy=other) >= times * figure(rows, "light mean", policy=policy)
