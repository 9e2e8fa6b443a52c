"""The main panels of the dashboard (`deploy/grafana`) as one picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.lab.drawing.looks import BLACK, BLUE, GREEN, ORANGE, PALETTE, RED, Look
from bench.lab.picture.scrapes import Curves, Scrape, levels, ratios, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOW: Final = 10.0
"""Seconds over which shares and hit rates are taken; the dashboard's are longer, as it covers a day."""
SHARE: Final = "Share of service"
WAIT: Final = "Waiting time by client, p95"
HITS: Final = "Hit rate"
GAP: Final = "Service gap and its bound"
NOTE: Final = f"One run. Shares and hit rates over the {WINDOW:g} s before."
CLIENT_LOOKS: Final = (
    Look(RED, ""),
    *(Look(colour, "", line) for colour, line in ((BLUE, "--"), (GREEN, "-."), (ORANGE, ":"), (BLACK, ".-"))),
)
"""The heavy client is the first by name; then the light ones."""


def draw(scrapes: Sequence[Scrape], title: str, path: Path) -> None:
    """Write a PNG. Raises OSError."""
    # Imported here because the other commands, and the demo of an installed router, do not need matplotlib.
    from bench.lab.drawing.page import drawn, save  # noqa: PLC0415

    save(drawn(title, NOTE, lambda figure: draw_panels(figure, scrapes)), path)


def draw_panels(figure: "Figure", scrapes: Sequence[Scrape]) -> None:
    """Draw the panels, each with its own legend below it."""
    figure.set_figheight(6.8)
    for axes, (name, panel) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        axes.set_title(name, loc="left")
        axes.set_xlabel("time (s)")
        panel(axes, scrapes)
        if axes.has_data():
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8)


def _share(axes: "Axes", scrapes: Sequence[Scrape]) -> None:
    _clients(axes, shares(scrapes, "d2lpm_service_cost_units_total", "client", WINDOW))
    axes.set(ylim=(0, 1.02), ylabel="share of service (ratio)")


def _wait(axes: "Axes", scrapes: Sequence[Scrape]) -> None:
    _clients(axes, levels(scrapes, "d2lpm_client_wait_seconds", "client", {"percentile": "95"}))
    axes.set(ylim=(0, None), ylabel="time in the queue (s)")


def _hits(axes: "Axes", scrapes: Sequence[Scrape]) -> None:
    cached, asked = "d2lpm_cache_actual_tokens_total", "d2lpm_cache_prompt_tokens_total"
    _workers(axes, ratios(scrapes, cached, asked, "worker", WINDOW), "{}")
    axes.set(ylim=(0, 1.02), ylabel="hit rate (ratio)")


def _gap(axes: "Axes", scrapes: Sequence[Scrape]) -> None:
    _workers(axes, levels(scrapes, "d2lpm_service_gap_cost_units", "worker"), "gap, {}")
    _workers(axes, levels(scrapes, "d2lpm_service_gap_bound_cost_units", "worker"), "bound, {}", "--")
    axes.set_yscale("symlog", linthresh=100)
    axes.set(ylim=(0, None), ylabel="gap of service (cost units)")


def _clients(axes: "Axes", curves: Curves) -> None:
    """Draw a curve for each client, by its name without its kind of identity."""
    for (name, points), look in zip(sorted(curves.items()), CLIENT_LOOKS, strict=False):
        if points:
            axes.plot(*zip(*points, strict=True), look.line, color=look.colour, label=name.removeprefix("user-"))


def _workers(axes: "Axes", curves: Curves, label: str, style: str = "") -> None:
    """Draw a curve for each worker, numbered in the order of their names: ports differ from run to run.

    The second lies dotted over the first, which shows where they are equal.
    """
    for number, (_, points) in enumerate(sorted(curves.items()), 1):
        if points:
            line, width = style or ("-", ":")[number % 2 == 0], (2.4, 1.2)[number % 2 == 0]
            colour = PALETTE[number % len(PALETTE)]
            axes.plot(
                *zip(*points, strict=True), line, color=colour, linewidth=width, label=label.format(f"worker {number}")
            )


PANELS: Final[dict[str, Callable[["Axes", Sequence[Scrape]], None]]] = {
    SHARE: _share,
    WAIT: _wait,
    HITS: _hits,
    GAP: _gap,
}
"""The panels by their titles in the dashboard."""
