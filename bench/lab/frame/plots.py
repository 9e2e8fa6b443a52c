"""Lines and points that look the same in the plots of all experiments."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from bench.lab.frame.experiment import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = {
    "d2lpm printed": "tab:cyan",
    "d2lpm": "tab:blue",
    "dlpm": "tab:blue",
    "dlpm_home": "tab:green",
    "lpm": "tab:orange",
    "lpm 128": "tab:brown",
    "rr+lpm": "tab:orange",
    "preble": "tab:red",
    "vtc": "tab:purple",
}
"""Colours of the policies, in the order of the legends."""
CLIENT_COLOURS: Final = ("tab:red", "tab:blue", "tab:green", "tab:orange")
"""Colours of the clients in plots over time, in the order of the workload's parts."""


def policies(rows: Sequence[Row]) -> Sequence[str]:
    """Return the policies in these rows, in the order of the legends."""
    return [policy for policy in COLOURS if any(row.labels["policy"] == policy for row in rows)]


def draw_policies(axes: "Axes", rows: Sequence[Row], x: Callable[[Row], float], figure: str) -> None:
    """Draw a line for each policy through the medians of a figure; rows without it are left out."""
    for policy in policies(rows):
        measured = [(x(row), row.median(figure)) for row in rows if row.labels["policy"] == policy]
        points = [(at, median) for at, median in measured if median is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=COLOURS[policy], label=policy)
    axes.set_ylabel(figure)


def draw_levels(axes: "Axes", rows: Sequence[Row], figure: str) -> None:
    """Draw a dotted horizontal line for each row: policies that do not depend on the other axis."""
    for row in rows:
        median, policy = row.median(figure), row.labels["policy"]
        if median is not None:
            axes.axhline(median, linestyle=":", color=COLOURS[policy], label=policy)


def draw_clients(axes: "Axes", row: Row, kind: str, clients: Sequence[str]) -> None:
    """Draw a line over time for each client: the points named `kind client`."""
    for client, colour in zip(clients, CLIENT_COLOURS, strict=False):
        points = row.points(f"{kind} {client}")
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1, label=client)


def draw_over_time(figure: "Figure", rows: Sequence[Row], kinds: Sequence[str], clients: Sequence[str]) -> None:
    """Draw a column for each row and a line of plots for each kind of points, all of a kind on one scale."""
    axes = figure.subplots(len(kinds), len(rows), sharey="row", squeeze=False)
    for column, row in enumerate(rows):
        axes[0][column].set_title(row.labels["policy"])
        axes[-1][column].set_xlabel("seconds")
        for line, kind in enumerate(kinds):
            draw_clients(axes[line][column], row, kind, clients)
            if not column:
                axes[line][0].set_ylabel(kind)
    draw_legend(figure, clients)


def draw_legend(figure: "Figure", order: Sequence[str] = tuple(COLOURS)) -> None:
    """Draw one legend for all plots of the figure."""
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = [label for label in order if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=len(labels))
