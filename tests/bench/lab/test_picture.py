"""The picture of the dashboard: its curves, and that its panels are the dashboard's."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.demo.load import DemoError
from bench.lab.picture.command import watch
from bench.lab.picture.panels import PANELS, draw
from bench.lab.picture.scrapes import Scrape, increases, levels, ratios, shares

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "d2lpm.json").read_text("utf-8"))


def scrape(at: float, *lines: str) -> Scrape:
    return Scrape.parsed(at, "\n".join([*lines, ""]))


def counted(at: float, values: Mapping[str, float], name: str = "c") -> Scrape:
    lines = (f'{name}_total{{who="{who}"}} {value}' for who, value in values.items())
    return scrape(at, f"# TYPE {name}_total counter", *lines)


def test_an_increase_covers_the_window() -> None:
    """The increase is since the first scrape in the window, and a series that begins later counts from 0."""
    scrapes = [counted(0, {"a": 5}), counted(1, {"a": 7}), counted(2, {"a": 7, "b": 3}), counted(3, {"a": 9, "b": 4})]
    assert increases(scrapes, "c_total", "who", 2.0) == {"a": [(1, 2), (2, 2), (3, 2)], "b": [(2, 3), (3, 4)]}


def test_shares_are_of_the_total_increase() -> None:
    """Shares add up to 1, and there are none where nothing increases."""
    scrapes = [counted(0, {"a": 5, "b": 1}), counted(1, {"a": 5, "b": 1}), counted(2, {"a": 8, "b": 2})]
    assert shares(scrapes, "c_total", "who", 1.0) == {"a": [(2, 0.75)], "b": [(2, 0.25)]}


def test_a_ratio_needs_an_increase_of_the_whole() -> None:
    """If the whole grew and the part did not, the ratio is 0; if the whole did not grow, there is none."""

    def both(at: float, part: float, whole: float) -> Scrape:
        of_part, of_whole = counted(at, {"w": part}, "part"), counted(at, {"w": whole}, "whole")
        return Scrape(at, {**of_part.families, **of_whole.families})

    scrapes = [both(0, 0, 0), both(1, 0, 4), both(2, 0, 4), both(3, 3, 8)]
    assert ratios(scrapes, "part_total", "whole_total", "who", 1.0) == {"w": [(1, 0), (3, 0.75)]}


def test_a_gauge_is_added_up_over_the_series_that_match() -> None:
    """Of two percentiles only the selected one counts, and of two models both."""
    lines = ('g{who="a",p="95",m="x"} 2', 'g{who="a",p="95",m="y"} 3', 'g{who="a",p="50",m="x"} 1')
    assert levels([scrape(4, "# TYPE g gauge", *lines)], "g", "who", {"p": "95"}) == {"a": [(4, 5)]}


def test_its_panels_are_the_dashboards() -> None:
    """The panels have the titles of the dashboard's panels."""
    titles = {panel["title"] for panel in DASHBOARD["panels"]}
    assert set(PANELS) <= titles


def test_missing_metrics_make_empty_panels(tmp_path: Path) -> None:
    """The picture of a router that reports no metrics has empty panels and is no error."""
    path = tmp_path / "dashboard.png"
    draw([scrape(0), scrape(1)], "nothing", path)
    assert path.read_bytes().startswith(b"\x89PNG")


async def test_an_unreachable_router_is_an_error() -> None:
    """The error is a DemoError that says what is wrong."""
    with pytest.raises(DemoError, match="broke off"):
        await watch("http://127.0.0.1:9", 20.0, 0)
