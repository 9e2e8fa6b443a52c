"""Lines, points and bars through the figures of rows, with their ranges over the seeds."""

from collections.abc import Callable, Sequence
from math import nan
from typing import TYPE_CHECKING, Final

from bench.lab.drawing.axes import from_zero, legend, outer, scale
from bench.lab.drawing.looks import CLIENTS, POLICIES, Look, policy_look
from bench.lab.frame.experiment import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS: Final = {
    "service/s": "service seen (cost units/s)",
    "actual": "service (cost units/s)",
    "as seen": "service seen (cost units/s)",
    "Jain": "Jain's index (ratio)",
    "Jain as seen": "Jain's index as seen (ratio)",
    "hit rate": "hit rate (ratio)",
    "error": "mean error (ratio)",
    "TTFT": "time to first token (s)",
    "light p99": "light p99 (s)",
    "latency avg": "mean latency (s)",
    "latency p99": "latency p99 (s)",
    "light TTFT p50": "light TTFT, median (s)",
    "light TTFT p95": "light TTFT, p95 (s)",
    "light share": "light share of service (ratio)",
    "tokens/s": "prompts and answers (tokens/s)",
    "difference avg": "mean difference (cost units/s)",
    "light TTFT mean": "light TTFT, mean (s)",
    "output tokens/s": "output (tokens/s)",
    "calls/s": "throughput (calls/s)",
    "light longest": "light clients' longest wait (s)",
    "imbalance": "imbalance (tokens)",
    "longest wait": "longest wait (s)",
    "idle": "idle share of attention time (ratio)",
    "tok/s": "output of the whole run (tokens/s)",
    "bound": "gap of service (cost units)",
    "gap": "gap of service (cost units)",
    "seconds a session": "time of a worker (s/session)",
}
"""The axis labels of figures, with their units."""
OVER_TIME: Final = "bands from the least to the greatest seed, until most have ended"
BAND: Final = 0.14
"""How opaque the range of a line over time is."""


def policies(rows: Sequence[Row]) -> Sequence[str]:
    """Return the policies in these rows, in the order of the legends; those that it does not name come last."""
    names, order = list(dict.fromkeys(row.labels["policy"] for row in rows)), list(POLICIES)
    return sorted(names, key=lambda name: order.index(name) if name in POLICIES else len(order))


def draw_points(
    axes: "Axes", rows: Sequence[Row], x: Callable[[Row], float], figure: str, name: str, look: Look
) -> None:
    """Draw a line through the medians of a figure, with bars over the seeds; rows without it are left out."""
    points = [(x(row), median, row.spread(figure)) for row in rows if (median := row.median(figure)) is not None]
    if points:
        axes.errorbar(
            [at for at, _, _ in points],
            [median for _, median, _ in points],
            _arms([median for _, median, _ in points], [spread for _, _, spread in points]),
            fmt=f"{look.mark}{look.line}",
            color=look.colour,
            elinewidth=0.9,
            label=name,
        )


def draw_policies(axes: "Axes", rows: Sequence[Row], x: Callable[[Row], float], figure: str) -> None:
    """Draw a line for each policy through the medians of a figure."""
    for policy in policies(rows):
        own = [row for row in rows if row.labels["policy"] == policy]
        draw_points(axes, own, x, figure, policy, policy_look(policy))
    scale(axes, "y", LABELS[figure])


def draw_levels(axes: "Axes", rows: Sequence[Row], figure: str) -> None:
    """Draw a dotted line from side to side for each row, with a bar over the seeds at either end: policies that do not
    depend on the other axis.
    """
    sides = axes.get_yaxis_transform()  # x from 0 at the left to 1 at the right
    for place, row in enumerate(rows):
        median, spread, look = row.median(figure), row.spread(figure), policy_look(row.labels["policy"])
        if median is not None:
            ends = [0.02 + 0.015 * place, 0.98 - 0.015 * place]
            style = look.mark + ":"
            axes.plot(ends, [median, median], style, color=look.colour, transform=sides, label=row.labels["policy"])
            if spread is not None:
                axes.vlines(ends, *spread, color=look.colour, linewidth=0.9, transform=sides)
    scale(axes, "y", LABELS[figure])


def draw_bars(axes: "Axes", rows: Sequence[Row], names: Sequence[str], figure: str, colours: Sequence[str]) -> None:
    """Draw a bar from 0 for each row, the first at the top, with its range over the seeds; none without a figure."""
    medians = [nan if (median := row.median(figure)) is None else median for row in rows]
    arms = _arms(medians, [row.spread(figure) for row in rows])
    axes.barh(list(names), medians, xerr=arms, color=list(colours), error_kw={"elinewidth": 0.9})
    axes.set_ylim(len(rows) - 0.5, -0.5)
    from_zero(axes, "x")
    axes.grid(visible=False, axis="y")
    scale(axes, "x", LABELS[figure])


def _arms(
    medians: Sequence[float], spreads: Sequence[tuple[float, float] | None]
) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return how far ranges reach below and above the medians; None if no row has one."""
    if not any(spreads):
        return None
    whole = [spread or (median, median) for median, spread in zip(medians, spreads, strict=True)]
    return (
        [median - least for median, (least, _) in zip(medians, whole, strict=True)],
        [most - median for median, (_, most) in zip(medians, whole, strict=True)],
    )


def draw_marks(axes: "Axes", rows: Sequence[Row], by: str, figure: str) -> None:
    """Draw a hollow mark for each policy in the line of each value of the label `by`; none without a figure."""
    lines = list(dict.fromkeys(row.labels[by] for row in rows))
    there = {line: [row.labels["policy"] for row in rows if row.labels[by] == line] for line in lines}
    for policy in policies(rows):
        look, points = policy_look(policy), []
        for row in rows:
            median, line = row.median(figure), row.labels[by]
            if row.labels["policy"] == policy and median is not None:
                # A little apart, so that no mark hides another.
                aside = 0.09 * (there[line].index(policy) - (len(there[line]) - 1) / 2)
                points.append((median, lines.index(line) + aside))
        if points:
            axes.plot(*zip(*points, strict=True), look.mark, color=look.colour, fillstyle="none", label=policy)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    from_zero(axes, "x")
    scale(axes, "x", LABELS[figure])


def draw_clients(axes: "Axes", row: Row, kind: str, clients: Sequence[str]) -> None:
    """Draw a line over time for each client, the points named `kind client`, in a band over the seeds."""
    for client in clients:
        draw_line(axes, row, f"{kind} {client}", client, CLIENTS[client])


def draw_line(axes: "Axes", row: Row, figure: str, name: str, look: Look) -> None:
    """Draw a line over time through the medians of the seeds, in a band over them."""
    points = row.line(figure)
    times = [point.x for point in points]
    least, most = [point.least for point in points], [point.most for point in points]
    axes.fill_between(times, least, most, color=look.colour, alpha=BAND, linewidth=0)
    axes.plot(times, [point.median for point in points], look.line, color=look.colour, linewidth=1.2, label=name)


def draw_over_time(figure: "Figure", rows: Sequence[Row], kinds: Sequence[str], clients: Sequence[str]) -> None:
    """Draw a column for each row and a line of plots for each kind of points, all of a kind on one scale."""
    figure.set_figheight(1.4 + 1.7 * len(kinds))
    grid = figure.subplots(len(kinds), len(rows), sharex=True, sharey="row", squeeze=False)
    for column, row in enumerate(rows):
        grid[0][column].set_title(row.labels["policy"])
        for line, kind in enumerate(kinds):
            draw_clients(grid[line][column], row, kind, clients)
    for line, kind in enumerate(kinds):
        for axes in grid[line]:
            from_zero(axes, "x")
            from_zero(axes, "y")
            scale(axes, "y", LABELS[kind])
            axes.set_xlabel("time (s)")
    outer(figure)
    legend(figure, clients)
