"""The DLPM paper's figure 4: the cost of a decision against the number of workers and the length of the queue.

Measured on the real scheduler in CPU time, as by `python -m bench decision-cost`. It is not a simulation and its
results differ from run to run, so it has a file of its own, `fig4-times.json`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from bench.lab.drawing.axes import counts, from_zero, legend, scale
from bench.lab.drawing.looks import policy_look
from bench.lab.frame.conditions import (
    A100,
    FIG4_BATCH,
    FIG4_CLIENTS,
    FIG4_CONTEXT,
    FIG4_FLEET,
    FIG4_POLICIES,
    FIG4_QUEUE,
    FIG4_QUICK_ROUNDS,
    FIG4_ROUNDS,
    FIG4_TURNS,
    FIG4_WAITING,
    FIG4_WORKERS,
)
from bench.lab.micro.decision_cost import Fleet, Setting
from workers.engine.hardware import HARDWARE, Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE: Final = "CPU time of an arrival and a dispatch (DLPM paper, figure 4)"
PUBLISHED: Final = (
    "Of a global scheduler that matches its whole queue against every worker for each decision, synchronisation and"
    " matching grow with both, to about 40 % of a decode step of 25 requests with 8 workers and a queue of 200."
)
FILE: Final = "fig4-times"


@dataclass(frozen=True, slots=True)
class Cost:
    """The measurement of one setting."""

    policy: str
    workers: int
    waiting: int
    microseconds: float
    """CPU microseconds, the median over the rounds."""
    decode_step: float
    """The same as a share of a decode step."""


def decode_step_seconds() -> float:
    """Return the time of a decode step of the figure's batch on an A100, by the emulated engine's own model."""
    batch = Batch(decodes=FIG4_BATCH, decode_context=FIG4_BATCH * FIG4_CONTEXT)
    return HARDWARE[A100.hardware].step_seconds(batch)


def settings() -> Sequence[Setting]:
    """Return each policy with several numbers of workers, and with several lengths of the queue."""
    sizes = [(FIG4_QUEUE, workers) for workers in FIG4_WORKERS]
    sizes += [(waiting, FIG4_FLEET) for waiting in FIG4_WAITING if waiting != FIG4_QUEUE]
    return [
        Setting(policy, waiting, FIG4_CLIENTS, workers, in_flight=FIG4_BATCH)
        for policy in FIG4_POLICIES
        for waiting, workers in sizes
    ]


def measure(measured: Sequence[Setting], rounds: int, turns: int) -> Sequence[Cost]:
    """Measure the settings in turn, so that other load on the machine affects them all."""
    fleets = [Fleet(setting) for setting in measured]
    spent = [[fleet.turns(turns) / turns / 1000 for fleet in fleets] for _ in range(rounds)]
    medians = [median(of_one) for of_one in zip(*spent, strict=True)]
    step = decode_step_seconds()
    return [
        Cost(setting.policy, setting.workers, setting.waiting, cost, cost / 1e6 / step)
        for setting, cost in zip(measured, medians, strict=True)
    ]


def run(folder: Path, *, quick: bool) -> None:
    """Measure, write the results into the folder, which must exist, and print the table."""
    costs = measure(settings(), FIG4_QUICK_ROUNDS if quick else FIG4_ROUNDS, FIG4_TURNS)
    write(costs, folder)
    print(f"fig4: {TITLE}", *table(costs), "", sep="\n", flush=True)


def write(costs: Sequence[Cost], folder: Path) -> None:
    """Write JSON, a table and a plot, which is drawn from the table."""
    document = {"title": TITLE, "costs": [asdict(cost) for cost in costs]}
    (folder / f"{FILE}.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    (folder / f"{FILE}.md").write_text("\n".join([f"# {TITLE}", "", PUBLISHED, "", *table(costs), ""]), "utf-8")
    redraw(folder)


def table(costs: Sequence[Cost]) -> Sequence[str]:
    """Return a Markdown table."""
    head = ["| policy | workers | waiting | CPU, µs | of a decode step |", "| --- | ---: | ---: | ---: | ---: |"]
    return head + [
        f"| {cost.policy} | {cost.workers} | {cost.waiting:,} | {cost.microseconds:.0f} | {cost.decode_step:.1%} |"
        for cost in costs
    ]


def redraw(folder: Path) -> None:
    """Draw the plot from the table in the folder. Raises OSError, and ValueError if it is not ours."""
    # Imported here because the command line imports this module and must start without matplotlib.
    from bench.lab.drawing.page import drawn, save  # noqa: PLC0415

    costs = parse((folder / f"{FILE}.md").read_text("utf-8"))
    note = "Medians over rounds that were measured in turn, on one machine; other machines differ."
    save(drawn(TITLE, note, lambda figure: draw(costs, figure)), folder / f"{FILE}.png")


def parse(text: str) -> Sequence[Cost]:
    """Return the costs of a table. Raises ValueError if it is not ours."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [
        Cost(policy, int(workers), int(waiting.replace(",", "")), float(cost), float(share.rstrip("%")) / 100)
        for policy, workers, waiting, cost, share in lines[2:]
    ]


def draw(costs: Sequence[Cost], figure: "Figure") -> None:
    """Draw a line for each policy, over the workers and over the queue."""
    figure.set_figheight(3.6)
    over_workers, over_queue = figure.subplots(1, 2, sharey=True)
    for policy in FIG4_POLICIES:
        look = policy_look(policy)
        own = [cost for cost in costs if cost.policy == policy]
        spread = [cost for cost in own if cost.waiting == FIG4_QUEUE]
        length = sorted([cost for cost in own if cost.workers == FIG4_FLEET], key=lambda cost: cost.waiting)
        style = look.mark + look.line
        over_workers.plot(
            [c.workers for c in spread], [c.microseconds for c in spread], style, color=look.colour, label=policy
        )
        over_queue.plot([c.waiting for c in length], [c.microseconds for c in length], style, color=look.colour)
    counts(over_workers, FIG4_WORKERS, f"workers (count), {FIG4_QUEUE} requests waiting", logarithmic=True)
    counts(over_queue, FIG4_WAITING, f"requests waiting (count), {FIG4_FLEET} workers", logarithmic=True)
    from_zero(over_queue, "y")
    scale(over_workers, "y", "CPU time (µs)")
    legend(figure)
