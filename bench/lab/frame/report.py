"""An experiment's results as JSON, as a Markdown table and as a picture, which is drawn from the files."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.lab.drawing.page import drawn, save
from bench.lab.frame.experiment import Experiment, Row, Value

DIGITS: Final = 6
"""Significant digits of a figure in the JSON file."""
LINE_DIGITS: Final = 4
"""Those of a line over time."""


class Written(NamedTuple):
    """The figures that the files of an experiment hold."""

    rows: Sequence[Row]
    seeds: int
    """How many seeds were run; rows that come from a table hold their medians alone."""


def write(name: str, experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int], folder: Path) -> None:
    """Write NAME.json, NAME.md and NAME.png into the folder. Raises OSError."""
    (folder / f"{name}.json").write_text(as_json(experiment, rows, seeds), "utf-8")
    (folder / f"{name}.md").write_text(as_markdown(experiment, rows, seeds), "utf-8")
    draw(name, experiment, folder)


def draw(name: str, experiment: Experiment, folder: Path) -> None:
    """Draw NAME.png from the files of the folder; nothing is run.

    Raises OSError, and ValueError if the files do not hold what the picture needs.
    """
    written = read(name, folder)
    if not holds(name, experiment, folder):
        raise ValueError(f"{name}.md holds no lines over time, and there is no {name}.json")
    picture = drawn(experiment.title, note(experiment, written), lambda figure: experiment.draw(written.rows, figure))
    save(picture, folder / f"{name}.png")


def holds(name: str, experiment: Experiment, folder: Path) -> bool:
    """Return whether the folder has what the picture needs."""
    if (folder / f"{name}.json").exists():
        return True
    return (folder / f"{name}.md").exists() and not experiment.over_time


def note(experiment: Experiment, written: Written) -> str:
    """Return what the marks of the picture are."""
    return f"{_seeds(experiment, written)} {experiment.caption}".strip()


def _seeds(experiment: Experiment, written: Written) -> str:
    if written.seeds == 1:
        return "One seed."
    medians = f"Medians over {written.seeds} seeds"
    if not experiment.marks:
        return f"{medians}."
    ranged = any(len(values) > 1 for row in written.rows for values in row.values.values())
    return f"{medians}; {experiment.marks}." if ranged else f"{medians}; the table that is left holds no ranges."


def read(name: str, folder: Path) -> Written:
    """Return the figures of NAME.json or, if there is none, of the last table of NAME.md.

    Raises OSError, and ValueError if the table is not one that `as_markdown` wrote.
    """
    try:
        document = json.loads((folder / f"{name}.json").read_text("utf-8"))
    except FileNotFoundError:
        return from_markdown((folder / f"{name}.md").read_text("utf-8"))
    return Written([Row(row["labels"], row["values"]) for row in document["rows"]], len(document["seeds"]))


def as_json(experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Return all figures of all seeds, a line for each row; equal figures give equal bytes."""
    lines = [
        json.dumps(
            {"labels": row.labels, "values": {name: list(map(_rounded, each)) for name, each in row.values.items()}}
        )
        for row in rows
    ]
    head = f'"title": {json.dumps(experiment.title)},\n"seeds": {json.dumps(list(seeds))},\n'
    body = ",\n".join(lines)
    return f'{{\n{head}"rows": [\n{body}\n]\n}}\n'


def _rounded(value: Value) -> Value:
    if isinstance(value, Sequence):
        return [(_digits(x, DIGITS), _digits(y, LINE_DIGITS)) for x, y in value]
    return None if value is None else _digits(value, DIGITS)


def _digits(value: float, digits: int) -> float:
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def as_markdown(experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Return a document with the medians over the seeds."""
    lines = [f"# {experiment.title}", "", experiment.published, ""]
    if digest := experiment.digest(rows):
        lines += [*digest, ""]
    lines += table(experiment, rows)
    lines += ["", f"Medians over {len(seeds)} {'seeds' if len(seeds) > 1 else 'seed'}.", ""]
    return "\n".join(lines)


def from_markdown(text: str) -> Written:
    """Return the rows of the last table, with one value for each figure: its median.

    Raises ValueError if there is no table with labels on the left and figures on the right.
    """
    lines = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    rules = [number for number, cells in enumerate(lines) if set(cells) == {"---", "---:"}]
    count = re.findall(r"(?m)^Medians over (\d+) seeds?\.$", text)
    if not rules or not count:
        raise ValueError("no table of medians that an experiment wrote")
    head, rule = lines[rules[-1] - 1], lines[rules[-1]]
    labels = rule.count("---")
    rows = [
        Row(
            dict(zip(head[:labels], cells[:labels], strict=True)),
            {name: [_number(cell)] for name, cell in zip(head[labels:], cells[labels:], strict=True)},
        )
        for cells in lines[rules[-1] + 1 :]
    ]
    return Written(rows, int(count[-1]))


def _cells(line: str) -> Sequence[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _number(cell: str) -> float | None:
    return None if cell == "-" else float(cell.replace(",", ""))


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
