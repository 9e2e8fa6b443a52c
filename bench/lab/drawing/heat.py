"""Tables in colours, with a bar that says what the colours mean."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL: Final = 6.5
"""Points, of the numbers in cells that are beyond the scale."""


class Scale(NamedTuple):
    """What the colours of a table mean."""

    label: str
    """With its unit."""
    least: float
    most: float
    colours: str
    """A colour map that can be read without telling red from green."""


def draw_table(
    figure: "Figure", axes: "Axes", values: Sequence[Sequence[float | None]], columns: Sequence[str], scale: Scale
) -> None:
    """Draw a cell for each value, line by line, and a colour bar above; what is beyond the scale is written out.

    A value that is missing leaves its cell white.
    """
    cells = [[float("nan") if value is None else value for value in line] for line in values]
    image = axes.imshow(cells, aspect="auto", vmin=scale.least, vmax=scale.most, cmap=scale.colours)
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.tick_params(length=0)
    below = any(value < scale.least for line in cells for value in line)
    above = any(value > scale.most for line in cells for value in line)
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((below, above), "neither")
    bar = figure.colorbar(
        image, ax=axes, location="top", label=scale.label, extend=extend, shrink=0.9, aspect=30, pad=0.02
    )
    bar.ax.locator_params(nbins=5)
    for line, row in enumerate(cells):
        for column, value in enumerate(row):
            if not scale.least <= value <= scale.most and value == value:  # noqa: PLR0124 - not a number, if unequal
                axes.text(
                    column,
                    line,
                    f"{value:.2f}".replace("0.", ".", 1),
                    ha="center",
                    va="center",
                    fontsize=SMALL,
                    color="white",
                )
