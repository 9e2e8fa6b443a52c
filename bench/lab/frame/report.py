"""An experiment's results as JSON, as a Markdown table and as a plot."""

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.lab.frame.experiment import Experiment, Row

INCHES = (10.0, 6.0)
DOTS_PER_INCH = 110


def write(name: str, experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int], folder: Path) -> None:
    """Write NAME.json, NAME.md and NAME.png into the folder. Raises OSError."""
    (folder / f"{name}.json").write_text(as_json(experiment, rows, seeds), "utf-8")
    (folder / f"{name}.md").write_text(as_markdown(experiment, rows, seeds), "utf-8")
    figure = Figure(INCHES, DOTS_PER_INCH, layout="constrained")
    experiment.draw(rows, figure)
    figure.suptitle(experiment.title)
    # Without the version of matplotlib, which would make plots differ.
    figure.savefig(folder / f"{name}.png", metadata={"Software": None})


def as_json(experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Return all figures of all seeds; equal figures give equal bytes."""
    document = {
        "title": experiment.title,
        "seeds": list(seeds),
        "rows": [{"labels": row.labels, "values": row.values} for row in rows],
    }
    return json.dumps(document, indent=1) + "\n"


def as_markdown(experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Return a document with the medians over the seeds."""
    lines = [f"# {experiment.title}", "", experiment.published, ""]
    if digest := experiment.digest(rows):
        lines += [*digest, ""]
    lines += table(experiment, rows)
    lines += ["", f"Medians over {len(seeds)} {'seeds' if len(seeds) > 1 else 'seed'}.", ""]
    return "\n".join(lines)


def table(experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table with a line for each row, the labels first."""
    labels = list(rows[0].labels)
    head = [*labels, *experiment.decimals]
    lines = [_line(head), _line(["---"] * len(labels) + ["---:"] * len(experiment.decimals))]
    return lines + [_line([*row.labels.values(), *_shown(experiment, row)]) for row in rows]


def _shown(experiment: Experiment, row: Row) -> list[str]:
    medians = [(row.median(figure), decimals) for figure, decimals in experiment.decimals.items()]
    return ["-" if median is None else f"{median:,.{decimals}f}" for median, decimals in medians]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
