"""Labels with units, ticks where something was measured, and legends beside the plots."""

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDEST: Final = 5
"""The most names in a line of a legend."""


def scale(axes: "Axes", which: Literal["x", "y"], unit: str) -> None:
    """Put thousands in the label if the numbers of an axis are large, so that its ticks are short.

    `unit` is the label with its unit in brackets, such as `service (cost units/s)`.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    reach = max(abs(end) for end in axis.get_view_interval())
    thousands = reach >= 10_000
    label = unit.replace("(", "(1,000 ", 1) if thousands else unit
    axis.set_label_text(label.replace(" (", "\n(") if which == "y" else label)
    if thousands:
        axis.set_major_formatter(lambda value, _place: f"{value / 1000:,g}")
    else:
        axis.set_major_formatter(lambda value, _place: f"{value:,g}")


def from_zero(axes: "Axes", which: Literal["x", "y"]) -> None:
    """Let an axis begin at 0 and end a little beyond what was drawn there and on the axes that share it."""
    shared = axes.get_shared_x_axes() if which == "x" else axes.get_shared_y_axes()
    ends = [each.dataLim.x1 if which == "x" else each.dataLim.y1 for each in shared.get_siblings(axes)]
    most = max([end for end in ends if isfinite(end) and end > 0], default=1.0)
    straight = (axes.get_xscale() if which == "x" else axes.get_yscale()) == "linear"
    axes.set(**{f"{which}lim": (0.0, most * (1.06 if straight else 1.6))})


def counts(axes: "Axes", values: Sequence[float], label: str, *, logarithmic: bool = False) -> None:
    """Put a tick, written as a whole number, at each of these counts of an x axis."""
    at(axes, values, [f"{value:,.0f}" for value in values], label, logarithmic=logarithmic)


def at(axes: "Axes", values: Sequence[float], names: Sequence[str], label: str, *, logarithmic: bool = False) -> None:
    """Put a tick with a name at each of these places of an x axis, and none between them."""
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xticks(values, names)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(label)


def outer(figure: "Figure", *, columns_alike: bool = True) -> None:
    """Keep the labels of the lowest row alone, and if columns are alike those of the left column: these stand for the
    others of their column and row.
    """
    for axes in figure.axes:
        place = axes.get_subplotspec()
        if place is not None and columns_alike and not place.is_first_col():
            axes.set_ylabel("")
        if place is not None and not place.is_last_row():
            axes.set_xlabel("")


def legend(figure: "Figure", order: Sequence[str] = ()) -> None:
    """Draw one legend for all plots of the figure, below them: first the names of `order`, then all others."""
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = sorted(handles, key=lambda label: order.index(label) if label in order else len(order))
    rows = -(-len(labels) // WIDEST)
    figure.legend(
        [handles[label] for label in labels], labels, loc="outside lower center", ncols=-(-len(labels) // max(1, rows))
    )
