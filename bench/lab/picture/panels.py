"""The main panels of the dashboard (`deploy/grafana`) as one picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.lab.picture.scrapes import Curves, Scrape, levels, ratios, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW: Final = 10.0
"""Seconds over which shares and hit rates are taken; the dashboard's are longer, as it covers a day."""
SHARE: Final = "Share of service"
WAIT: Final = "Waiting time by client, p95"
HITS: Final = "Hit rate"
GAP: Final = "Service gap and its bound"
INCHES: Final = (11.0, 6.5)
DOTS_PER_INCH: Final = 100


def draw(scrapes: Sequence[Scrape], title: str, path: Path) -> None:
    """Write a PNG. Raises OSError."""
    # Imported here because the other commands, and the demo of an installed router, do not need matplotlib.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(INCHES, DOTS_PER_INCH, layout="constrained")
    for axes, (name, panel) in zip(figure.subplots(2, 2, sharex=True).flat, PANELS.items(), strict=True):
        axes.set_title(name, loc="left", fontsize="medium")
        axes.grid(alpha=0.3)
        panel(axes, scrapes)
        if axes.has_data():
            axes.legend(loc="best", fontsize="small", ncols=2, framealpha=0.4)
    for axes in figure.axes[-2:]:
        axes.set_xlabel("seconds")
    figure.suptitle(title)
    figure.savefig(path, metadata={"Software": None})


def _share(axes: "Axes", scrapes: Sequence[Scrape]) -> None:
    _curves(axes, shares(scrapes, "d2lpm_service_cost_units_total", "client", WINDOW))
    axes.set(ylim=(0, 1.02), ylabel=f"of all service, last {WINDOW:g} s")


def _wait(axes: "Axes", scrapes: Sequence[Scrape]) -> None:
    _curves(axes, levels(scrapes, "d2lpm_client_wait_seconds", "client", {"percentile": "95"}))
    axes.set(ylim=(0, None), ylabel="seconds in the queue")


def _hits(axes: "Axes", scrapes: Sequence[Scrape]) -> None:
    cached, asked = "d2lpm_cache_actual_tokens_total", "d2lpm_cache_prompt_tokens_total"
    _curves(axes, ratios(scrapes, cached, asked, "worker", WINDOW))
    axes.set(ylim=(0, 1.02), ylabel=f"of prompt tokens, last {WINDOW:g} s")


def _gap(axes: "Axes", scrapes: Sequence[Scrape]) -> None:
    _curves(axes, levels(scrapes, "d2lpm_service_gap_cost_units", "worker"), "gap, {}")
    _curves(axes, levels(scrapes, "d2lpm_service_gap_bound_cost_units", "worker"), "bound, {}", "--")
    axes.set_yscale("symlog", linthresh=100)
    axes.set(ylim=(0, None), ylabel="cost units")


def _curves(axes: "Axes", curves: Curves, label: str = "{}", style: str = "-") -> None:
    for name, points in sorted(curves.items()):
        if points:
            axes.plot(*zip(*points, strict=True), style, linewidth=1.2, label=label.format(name))


PANELS: Final[dict[str, Callable[["Axes", Sequence[Scrape]], None]]] = {
    SHARE: _share,
    WAIT: _wait,
    HITS: _hits,
    GAP: _gap,
}
"""The panels by their titles in the dashboard."""
