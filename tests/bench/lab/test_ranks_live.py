"""The live comparison before ranks in step: its table, its verdicts, and one short run."""

from argparse import ArgumentParser

import pytest

from bench.lab.balance.live import Row, Run, Seen, compare_all, configure, figures, points, read_run, table
from bench.report.records import GroupTotals

REFERENCE = Row("least_requests", Seen(1000.0, 0.4, 500.0), Seen(2000.0, 0.4, 600.0), 0.01, 0.0)


def row(live: Seen, virtual: Seen) -> Row:
    return Row("dlpm_balance", live, virtual, None, 0.0)


@pytest.mark.parametrize(
    ("live", "virtual", "verdict"),
    [
        (Seen(400.0, 0.2, 600.0), Seen(860.0, 0.2, 730.0), ""),
        (Seen(400.0, 0.2, 600.0), Seen(920.0, 0.2, 730.0), "MISSED"),
        (Seen(400.0, 0.2, 600.0), Seen(860.0, 0.2, 760.0), "MISSED"),
    ],
)
def test_live_and_virtual_time_may_differ_by_five_points(live: Seen, virtual: Seen, verdict: str) -> None:
    """Both figures count over those of the reference in the same time."""
    seen = row(live, virtual)
    assert (max(points(seen, REFERENCE)) > 5) == bool(verdict)
    assert table([REFERENCE, seen])[2].endswith(verdict)
    assert "MISSED" not in table([REFERENCE, seen])[1]


def test_without_the_reference_nothing_is_relative() -> None:
    """The table still has the figures themselves."""
    (_, line) = table([row(Seen(400.0, 0.25, 600.0), Seen(860.0, 0.2, 730.0))])
    assert line.split()[:7] == ["dlpm_balance", "400", "860", "0.250", "0.200", "600", "730"]


def test_output_counts_by_the_time_of_the_engines_steps() -> None:
    """What a slow machine loses is no output of the policy, and is shown by itself."""
    group = GroupTotals(
        2, 1000, step_seconds=75.0, attention_seconds=50.0, spread_tokens=400_000, idle_tokens=1, room_tokens=4
    )
    seen, late, lost = figures(group, seconds=100.0, output=300.0, late=2.0)
    assert seen == Seen(400.0, 0.25, 400.0)
    assert (late, lost) == (2.0, 0.25)


def parsed(*arguments: str) -> Run:
    parser = ArgumentParser()
    configure(parser)
    return read_run(parser.parse_args(arguments))


@pytest.mark.parametrize(
    "arguments", [("--seconds", "5", "--warmup", "5"), ("--trace", "arena:nothing"), ("--trace", "nothing")]
)
def test_an_impossible_run_is_refused(arguments: tuple[str, ...]) -> None:
    """A load that ends in its warm-up, and traces of other kinds."""
    with pytest.raises((ValueError, OSError)):
        parsed(*arguments)


def test_no_job_at_a_time_is_refused() -> None:
    """It would never end."""
    with pytest.raises(ValueError, match="--jobs"):
        compare_all(["dlpm_home"], parsed(), jobs=0)


def test_a_short_run_has_figures_of_both_times() -> None:
    """Before two ranks, the engine's sums and what clients received are those of the measured time, in order also when
    two policies run at a time.
    """
    given = parsed("--ranks", "2", "--seconds", "6", "--warmup", "2", "--speed", "2")
    rows = compare_all(["dlpm_balance", "least_requests"], given, jobs=2)
    assert [row.policy for row in rows] == ["dlpm_balance", "least_requests"]
    for seen in rows:
        assert min(seen.live.output, seen.virtual.output) > 0
        assert seen.live.imbalance > 0
        assert 0 < seen.live.idle < 1
        assert min(seen.virtual_runs).imbalance <= seen.virtual.imbalance <= max(seen.virtual_runs).imbalance
