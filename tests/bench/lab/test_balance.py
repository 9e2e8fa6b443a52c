"""The experiments of decode ranks in step: their loads saturate a tier, and their figures compare policies."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.lab.balance.contenders import FEW, REFERENCE
from bench.lab.balance.fair import Fair
from bench.lab.balance.measures import DECIMALS, compared, figures
from bench.lab.balance.table1 import Table1
from bench.lab.balance.tiers import CLIENTS, MOONCAKE, OVERLOAD, TIERS, balanced, loads, saturated
from bench.lab.frame.conditions import Span
from bench.lab.frame.experiment import Row
from bench.report.summary import summarise
from bench.sim.simulation import Simulation
from bench.workloads.papers.balance import BALANCE, BfIo, LongContexts
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.traffic import Outcome
from bench.workloads.recorded.traces import Trace, Traced

NAMED = {"long": BALANCE["long-contexts"], "bf-io": BALANCE["bf-io"]}
TRACE = Trace(tuple(Traced(0.0, 10_000 + number, 300) for number in range(50)))


def test_a_balanced_tier_serves_its_slots_in_each_step() -> None:
    """With equal calls, a rank steps in C + t·B·(p + o/2), and each of its slots gets a token in each step."""
    step_seconds = (20.0 + 0.07e-3 * 16 * (10_000 + 150)) / 1000
    assert MOONCAKE.balanced_rate([(10_000, 300)] * 5, ranks=4) == pytest.approx(4 * 16 / step_seconds / 300)


def test_long_answers_hold_a_slot_longer() -> None:
    """A call counts as often as it has steps in the mean of what a slot holds."""
    held = (900 * (1000 + 450) + 100 * (5000 + 50)) / 1000
    step_seconds = (20.0 + 0.07e-3 * 16 * held) / 1000
    assert MOONCAKE.balanced_rate([(1000, 900), (5000, 100)], ranks=1) == pytest.approx(16 / step_seconds / 500)


def test_a_load_asks_for_more_than_the_tier_can_do() -> None:
    """Equal clients share 1.2 times the balanced rate, that of a trace included, and more ranks get more."""
    trace = saturated("mooncake", {"mooncake": TRACE})
    assert isinstance(trace, Trace)
    sizes = [(each.input, each.output) for each in TRACE.requests]
    assert trace.play.rate == pytest.approx(OVERLOAD * MOONCAKE.balanced_rate(sizes))
    assert trace.play.client_count == CLIENTS
    few, many = (saturated("long", {}, ranks) for ranks in (4, 8))
    assert isinstance(few, RatedWorkload)
    assert isinstance(many, RatedWorkload)
    assert many.rate == pytest.approx(2 * few.rate)


@pytest.mark.parametrize("load", NAMED)
def test_the_named_workloads_have_the_rate_of_eight_ranks(load: str) -> None:
    """`bench simulate --workload` saturates the tier that the experiments have."""
    named, lab = NAMED[load], saturated(load, {})
    assert isinstance(named, RatedWorkload)
    assert isinstance(lab, RatedWorkload)
    assert named.rate == pytest.approx(lab.rate, rel=0.05)


@pytest.mark.parametrize(("load", "longest"), [("long", 8192), ("bf-io", 1200 + 3 * 700)])
def test_measuring_begins_once_the_longest_answers_could_have_ended(load: str, longest: int) -> None:
    """The warm-up lasts as long as the longest answers at the steps of balanced ranks, and measuring twice as long."""
    tier, random, workload = TIERS[load], Random(0), NAMED[load]
    assert isinstance(workload, LongContexts | BfIo)
    sizes = [workload.sizes(random) for _ in range(5000)]
    slots = tier.slots / tier.balanced_rate(sizes, ranks=1)
    step_seconds = slots / (sum(output for _, output in sizes) / len(sizes))
    span = tier.span(quick=False)
    assert span.warmup == pytest.approx(longest * step_seconds, rel=0.1)
    assert span.seconds == pytest.approx(3 * span.warmup)


def test_a_load_needs_its_trace() -> None:
    """Without traces only the synthetic loads are run."""
    assert loads({}) == ["long", "bf-io"]
    assert set(loads({"mooncake": TRACE, "azure": TRACE})) == set(TIERS)
    assert {dict(cell.labels)["load"] for cell in Table1().cells(quick=True)} == {"long", "bf-io"}
    traced = replace(Table1(), traces={"mooncake": TRACE})
    assert {dict(cell.labels)["load"] for cell in traced.cells(quick=True)} == {"long", "bf-io", "mooncake"}


@pytest.mark.parametrize("policy", FEW)
def test_every_call_is_served_and_measured(policy: str) -> None:
    """A saturated tier runs its calls to their ends, rejects none, and has all figures of the table."""
    load = saturated("mooncake", {"mooncake": TRACE}, ranks=2)
    scenario = balanced(MOONCAKE, FEW[policy], load, Span(12.0, 2.0), ranks=2)
    result = Simulation(scenario).run()
    measured = figures(result, summarise(result))
    assert {record.outcome for record in result.records} == {Outcome.DONE}
    assert measured.keys() == DECIMALS.keys()
    assert None not in measured.values()
    last, end = (
        max(filter(None, times)) for times in zip(*[(r.dispatched, r.finished) for r in result.records], strict=True)
    )
    assert measured["drain"] == pytest.approx(1 - last / end)


def row(load: str, policy: str, values: Mapping[str, list[float]]) -> Row:
    """Return a row whose other figures are 1."""
    return Row({"load": load, "policy": policy}, {**{name: [1.0] * 3 for name in DECIMALS}, **values})


def test_policies_are_compared_seed_by_seed() -> None:
    """The digest has the median of the ratios with equal seeds, not the ratio of the medians."""
    rows = [
        row("long", REFERENCE, {"imbalance": [10.0, 20.0, 40.0], "tok/s": [1.0, 2.0, 4.0]}),
        row("long", "other", {"imbalance": [5.0, 2.0, 30.0], "tok/s": [1.1, 2.4, 2.0]}),
    ]
    assert compared(rows, "load")[4:] == [
        f"| long | {REFERENCE} | 1.00 | +0.0% | +0.0% | 1.00 |",
        "| long | other | 0.50 | +10.0% | +0.0% | 1.00 |",
    ]
    assert compared(rows, "load", "other")[4:][0] == f"| long | {REFERENCE} | 2.00 | -9.1% | +0.0% | 1.00 |"


def test_without_the_reference_nothing_is_compared() -> None:
    """A load that the reference did not run has no ratios."""
    assert len(compared([row("long", "other", {})], "load")) == 4


def test_the_plot_shows_each_load_from_zero() -> None:
    """Imbalance and throughput have a bar for each policy on each load, on axes with units that begin at 0."""
    rows = [
        row(load, policy, {"imbalance": [factor * imbalance], "tok/s": [factor * served]})
        for load, factor in (("long", 1.0), ("mooncake", 3.0))
        for policy, imbalance, served in ((REFERENCE, 400.0, 50.0), ("dlpm_balance", 100.0, 60.0))
    ]
    figure = Figure()
    Fair().draw(rows, figure)
    bars = [[bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] for axes in figure.axes]
    assert bars == [[400, 100], [1200, 300], [50, 60], [150, 180]]
    assert [axes.get_title() for axes in figure.axes[:2]] == ["long", "mooncake"]
    assert all(axes.get_xlim()[0] == 0 and "tokens" in axes.get_xlabel() for axes in figure.axes)
