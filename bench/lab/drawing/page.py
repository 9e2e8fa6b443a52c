"""The page of a picture: its width, its fonts, its title, and what its marks are."""

from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import Final

from matplotlib.figure import Figure
from matplotlib.style import context

WIDTH: Final = 9.0
"""Inches: a hundred pixels of a page each, so that the smallest letters are 11 pixels high where a page has 900."""
HEIGHT: Final = 5.0
"""Inches, of a picture that does not set its own."""
DOTS_PER_INCH: Final = 150
LETTERS: Final = 105
"""In a line of the title."""
RULES: Final[dict[str, str | float | bool]] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that pictures are the same everywhere
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "figure.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2.0,
    "axes.formatter.useoffset": False,
}
"""For all pictures of the lab. No legend stands in a plot: it could hide what is drawn there."""


def drawn(title: str, note: str, draw: Callable[[Figure], None]) -> Figure:
    """Return a figure with this title, with `note` below it, which says what its marks are."""
    with context(RULES):
        figure = Figure((WIDTH, HEIGHT), DOTS_PER_INCH, layout="constrained")
        draw(figure)
        lines = [line for text in (title, note) for line in wrap(text, LETTERS)]
        figure.suptitle("\n".join(lines), x=0.01, ha="left")
        return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG; equal figures give equal bytes. Raises OSError."""
    with context(RULES):
        # Without the version of matplotlib, which would make pictures differ.
        figure.savefig(path, metadata={"Software": None})
