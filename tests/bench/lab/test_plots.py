"""The pictures of all experiments keep one style: units, whole counts, and nothing that hides anything else."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from random import Random

import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox, BboxBase
from numpy.ma import MaskedArray

from bench.__main__ import main
from bench.lab.drawing.looks import POLICIES
from bench.lab.drawing.page import drawn
from bench.lab.experiments import EXPERIMENTS
from bench.lab.frame.experiment import Experiment, Row, Value
from bench.lab.frame.plots import draw_bars, draw_marks, draw_points
from bench.lab.frame.report import Written, draw, from_markdown, note, read, table, write
from bench.lab.neighbour.experiment import NoisyNeighbour
from bench.lab.papers import fig4
from bench.lab.picture.panels import NOTE, draw_panels
from bench.lab.picture.scrapes import Scrape
from bench.lab.sweeps.defaults import Defaults
from tests.bench.lab.tiny_experiment import Tiny

SEEDS = 3
UNIT = re.compile(r"\([^()]+\)")
NUMBER = re.compile(r"[-\u2212]?[\d,]*\.?\d+$")


class Invented(dict[str, Sequence[Value]]):
    """Figures of a row, made up when they are asked for: lines over time by the names that the table does not have."""

    def __init__(self, experiment: Experiment, seed: str) -> None:
        super().__init__()
        self._experiment = experiment
        self._random = Random(seed)

    def __missing__(self, name: str) -> Sequence[Value]:
        size = 10.0 ** Random(name).randint(-1, 6)
        if self._experiment.over_time and name not in self._experiment.decimals:
            self[name] = [[(float(x), size * self._random.random()) for x in range(12)] for _ in range(SEEDS)]
        else:
            self[name] = [size * 10 ** self._random.uniform(-2.0, 0.0) for _ in range(SEEDS)]
        return self[name]


@cache
def invented(experiment: Experiment) -> Sequence[Row]:
    """Return a row for each simulation of a quick run, or one workload's if that has too few; of no more policies than
    three, since a picture's axes and legend do not depend on the others.
    """
    if isinstance(experiment, NoisyNeighbour):
        labels = [{"router": router, "heavy": str(heavy)} for router in ("d2lpm", "dlpm_home") for heavy in (0, 2, 8)]
    else:
        quick = not isinstance(experiment, Defaults)
        cells = [dict(cell.labels) for cell in experiment.cells(quick=quick)]
        policies = list(dict.fromkeys(each.get("policy") for each in cells))[:3]
        labels = [each for each in cells if each.get("policy") in policies]
        if not quick:
            labels = [each for each in labels if each["workload"] == labels[0]["workload"]]
    return [Row(each, Invented(experiment, " ".join(each.values()))) for each in labels]


def scrape(at: float) -> Scrape:
    """Return what a router with two workers would report, in made-up figures."""
    lines = ["# TYPE d2lpm_service_cost_units_total counter"]
    lines += [f'd2lpm_service_cost_units_total{{client="user-{who}"}} {at * 900}' for who in ("heavy", "light-1")]
    lines += [f'd2lpm_client_wait_seconds{{client="user-heavy",percentile="95"}} {at}']
    lines += [f'd2lpm_service_gap_cost_units{{worker="127.0.0.1:{port}"}} {at * 7}' for port in (40001, 40002)]
    lines += [f'd2lpm_service_gap_bound_cost_units{{worker="127.0.0.1:{port}"}} 90000' for port in (40001, 40002)]
    return Scrape.parsed(at, "\n".join([*lines, ""]))


DRAWN: Mapping[str, Experiment] = {**EXPERIMENTS, "neighbour": NoisyNeighbour()}
ALIKE = ("fig8", "fig9", "br-table1", "br-sensitivity")
"""Drawn by the same functions as `fig12` and `br-fair`, with other rows."""
NAMES = (*(name for name in DRAWN if name not in ALIKE), "fig4", "dashboard")


@cache
def picture(name: str) -> Figure:
    """Return a picture of made-up figures, laid out as it is written."""
    if name == "fig4":
        costs = [fig4.Cost(each.policy, each.workers, each.waiting, 300.0, 0.02) for each in fig4.settings()]
        figure = drawn(fig4.TITLE, "", lambda figure: fig4.draw(costs, figure))
    elif name == "dashboard":
        figure = drawn("A router", NOTE, lambda figure: draw_panels(figure, [scrape(float(at)) for at in range(5)]))
    else:
        experiment, rows = DRAWN[name], invented(DRAWN[name])
        figure = drawn(
            experiment.title, note(experiment, Written(rows, SEEDS)), lambda figure: experiment.draw(rows, figure)
        )
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    for axes in figure.axes:
        axes.get_tightbbox()  # gives a colour bar its shape, as drawing it would
    return figure


def ticks(axis: Axis) -> Sequence[Text]:
    """Return the labels of an axis's ticks that can be seen."""
    least, most = sorted(axis.get_view_interval())
    inside = [tick for tick in axis.get_major_ticks() if least <= tick.get_loc() <= most]
    return [text for tick in inside for text in (tick.label1, tick.label2) if text.get_visible() and text.get_text()]


def label(figure: Figure, axes: Axes, which: str) -> str:
    """Return the label of an axis or, in a grid, of the leftmost one in its line or the lowest in its column."""
    own = axes.get_xlabel() if which == "x" else axes.get_ylabel()
    place = axes.get_subplotspec()
    if own or place is None:
        return own
    for other in figure.axes:
        there = other.get_subplotspec()
        if there is None or there.get_gridspec() is not place.get_gridspec():
            continue
        if which == "x" and there.colspan.start == place.colspan.start and there.is_last_row():
            return other.get_xlabel()
        if which == "y" and there.rowspan.start == place.rowspan.start and there.is_first_col():
            return other.get_ylabel()
    return ""


def numbered(figure: Figure) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the label and the ticks of each axis whose ticks are numbers."""
    for axes in figure.axes:
        for which, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            seen = [text.get_text() for text in ticks(axis)]
            if any(NUMBER.match(text) for text in seen):
                yield label(figure, axes, which), seen


@pytest.mark.parametrize("name", NAMES)
def test_every_axis_of_numbers_has_a_unit(name: str) -> None:
    """Its label, or that of its line or column, has a unit in brackets, or says that it is a ratio or a count."""
    found = list(numbered(picture(name)))
    assert found
    assert [text for text, _ in found if not UNIT.search(text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_whole(name: str) -> None:
    """No axis of workers, ranks or clients has a tick between two whole numbers."""
    counted = [seen for text, seen in numbered(picture(name)) if "(count)" in text]
    assert [text for seen in counted for text in seen if not re.fullmatch(r"[\d,]+", text)] == []
    if name in ("fig4", "fig7", "fig11", "neighbour", "br-scaling", "br-pool"):
        assert counted


def boxes(figure: Figure) -> Iterator[tuple[str, BboxBase]]:
    """Yield the boxes of all that is written beside the plots: title, labels and legends."""
    titles = [each for each in figure.findobj(Text) if each.get_text() == figure.get_suptitle()]
    yield from ((each.get_text(), each.get_window_extent()) for each in titles)
    for axes in figure.axes:
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            if text.get_text():
                yield text.get_text(), text.get_window_extent()
        if own := axes.get_legend():
            yield "legend", own.get_window_extent()
    yield from (("legend", legend.get_window_extent()) for legend in figure.legends)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_stands_on_anything_else(name: str) -> None:
    """Legends, titles and labels overlap no plot, each other or the page's edge, and no tick's label the next one."""
    figure = picture(name)
    beside = list(boxes(figure))
    plots = [(f"plot {number}", axes.get_window_extent()) for number, axes in enumerate(figure.axes)]
    hidden = [(one, other) for (one, a), (other, b) in combinations([*beside, *plots], 2) if a.overlaps(shrunk(b))]
    assert hidden == []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            spans = [text.get_window_extent() for text in ticks(axis)]
            assert not any(a.overlaps(shrunk(b)) for a, b in pairwise(spans)), axis.get_label_text()
    page = figure.bbox
    outside = [
        text for text, box in beside if box.x0 < -1 or box.x1 > page.x1 + 1 or box.y0 < -1 or box.y1 > page.y1 + 1
    ]
    assert outside == []


def shrunk(box: BboxBase) -> Bbox:
    """Return a box less a dot on each side, as boxes that touch do not overlap."""
    return Bbox.from_extents(box.x0 + 1, box.y0 + 1, box.x1 - 1, box.y1 - 1)


@pytest.mark.parametrize("name", NAMES)
def test_all_that_was_measured_is_in_view(name: str) -> None:
    """No point lies outside of its axes."""
    for axes in picture(name).axes:
        (left, right), (low, high) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
        data = axes.dataLim
        if axes.has_data() and data.width < float("inf"):
            assert left <= data.x0 <= data.x1 <= right
            assert low <= data.y0 <= data.y1 <= high


@pytest.mark.parametrize("name", NAMES)
def test_what_a_legend_names_can_be_told_apart_without_colours(name: str) -> None:
    """Two lines of one plot with different names differ in their mark or in their dashes."""
    for axes in picture(name).axes:
        handles, labels = axes.get_legend_handles_labels()
        seen = {}
        for handle, text in zip(handles, labels, strict=True):
            line = handle[0] if isinstance(handle, tuple) else handle
            assert isinstance(line, Line2D)
            seen[text] = (line.get_marker(), line.get_linestyle(), line.get_linewidth())
        assert len(set(seen.values())) == len(seen)


def test_no_two_policies_of_the_main_comparison_look_alike() -> None:
    """The policies that most pictures compare differ in colour and in mark."""
    looks = [POLICIES[name] for name in ("d2lpm printed", "d2lpm", "dlpm_home", "rr+lpm", "preble", "vtc")]
    assert len({look.colour for look in looks}) == len({look.mark for look in looks}) == len(looks)


@pytest.mark.parametrize("name", DRAWN)
def test_a_table_gives_back_its_medians(name: str) -> None:
    """The rows read from a table are those that were written, rounded as the table is, and have no ranges."""
    experiment, rows = DRAWN[name], invented(DRAWN[name])
    for row, figure in product(rows, experiment.decimals):
        assert row.values[figure]
    back = from_markdown("\n".join([*table(experiment, rows), "", f"Medians over {SEEDS} seeds."]))
    assert back.seeds == SEEDS
    assert [row.labels for row in back.rows] == [row.labels for row in rows]
    for (row, read_back), (figure, decimals) in product(zip(rows, back.rows, strict=True), experiment.decimals.items()):
        assert read_back.median(figure) == pytest.approx(row.median(figure), abs=0.51 * 10.0**-decimals)
        assert read_back.spread(figure) is None


def test_the_last_of_several_tables_is_read() -> None:
    """A digest before it does not count, a dash is no figure, and a document without a table is refused."""
    digest = "| a | b |\n| --- | ---: |\n| x | 1 |\n"
    text = f"{digest}\n| policy | n | m |\n| --- | ---: | ---: |\n| vtc | 1,234.5 | - |\n\nMedians over 1 seed.\n"
    (row,), seeds = from_markdown(text)
    assert (row.labels, row.values, seeds) == ({"policy": "vtc"}, {"n": [1234.5], "m": [None]}, 1)
    with pytest.raises(ValueError, match="no table"):
        from_markdown("# Nothing\n")


ROWS = [
    Row({"seconds": seconds, "policy": policy}, {"calls": calls, "Jain": [0.5, 0.75], "none": [None, None]})
    for policy in ("d2lpm", "dlpm_home")
    for seconds, calls in (("1", [3, 5]), ("3", [9, 8]))
]


def test_a_picture_is_drawn_again_from_its_files(tmp_path: Path) -> None:
    """From the JSON it is the same to the byte, with ranges; from the table it has none, and its title says so."""
    write("tiny", Tiny(), ROWS, [0, 1], tmp_path)
    whole = (tmp_path / "tiny.png").read_bytes()
    (tmp_path / "tiny.png").unlink()
    draw("tiny", Tiny(), tmp_path)
    assert (tmp_path / "tiny.png").read_bytes() == whole
    assert read("tiny", tmp_path).rows[0].spread("calls") == (3, 5)
    assert note(Tiny(), read("tiny", tmp_path)) == "Medians over 2 seeds; bars from the least to the greatest seed."
    (tmp_path / "tiny.json").unlink()
    draw("tiny", Tiny(), tmp_path)
    assert (tmp_path / "tiny.png").read_bytes() != whole
    assert note(Tiny(), read("tiny", tmp_path)).endswith("the table that is left holds no ranges.")


def test_lines_over_time_need_more_than_a_table(tmp_path: Path) -> None:
    """A picture of lines is not drawn from medians: that is refused, and what was there stays."""
    experiment = EXPERIMENTS["fig9"]
    (tmp_path / "fig9.md").write_text("\n".join([*table(experiment, invented(experiment)), "Medians over 3 seeds."]))
    with pytest.raises(ValueError, match="no lines over time"):
        draw("fig9", experiment, tmp_path)
    assert not (tmp_path / "fig9.png").exists()


def test_a_line_ends_where_most_seeds_have_ended() -> None:
    """Where one of three seeds has no point the others make it, and one alone makes none."""
    row = Row({}, {"line": [[(1.0, 5.0), (3.0, 2.0), (5.0, 9.0)], [(1.0, 4.0)], [(1.0, 9.0), (3.0, 6.0)]]})
    assert row.line("line") == [(1.0, 5.0, 4.0, 9.0), (3.0, 2.0, 2.0, 6.0)]


def test_what_was_not_measured_is_not_drawn() -> None:
    """A cell without a figure is left white, and a mark and a bar without one are left out, not drawn at 0."""
    figures: dict[str, Sequence[Value]] = {"service/s": [100.0], "light TTFT p95": [1.0], "Jain": [None]}
    rows = [
        Row({"workload": "qa", "policy": "vtc"}, {**figures, "Jain": [0.5]}),
        Row({"workload": "qa", "policy": "d2lpm"}, figures),
    ]
    figure = Figure()
    EXPERIMENTS["policies"].draw(rows, figure)
    jain = figure.axes[1].images[0].get_array()
    assert isinstance(jain, MaskedArray)
    assert sorted(jain.mask.flatten()) == [False, True]
    axes = Figure().subplots()
    draw_bars(axes, rows, ["vtc", "d2lpm"], "Jain", ["black", "black"])
    assert [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] == pytest.approx(
        [0.5, float("nan")], nan_ok=True
    )
    axes = Figure().subplots()
    draw_marks(axes, rows, "workload", "Jain")
    assert [line.get_label() for line in axes.lines] == ["vtc"]


def test_bars_reach_from_the_least_to_the_greatest_seed() -> None:
    """The bar of a point through the median covers every seed, and a point of one value has none."""
    axes = Figure().subplots()
    draw_points(axes, ROWS[:2], lambda row: float(row.labels["seconds"]), "calls", "d2lpm", POLICIES["d2lpm"])
    (container,) = axes.containers
    assert isinstance(container, ErrorbarContainer)
    (bars,) = container.lines[2]
    assert [(low, high) for (_, low), (_, high) in bars.get_segments()] == [(3.0, 5.0), (8.0, 9.0)]


def test_figure_4_is_drawn_from_its_table() -> None:
    """What is read from the table is what was measured, rounded as it is there."""
    costs = [fig4.Cost("d2lpm", 8, 10_000, 471.0, 0.036), fig4.Cost("dlpm_home", 1, 200, 286.0, 0.022)]
    back = fig4.parse("\n".join(["# Title", "", *fig4.table(costs)]))
    assert [replace(cost, decode_step=0.0) for cost in back] == [replace(cost, decode_step=0.0) for cost in costs]
    assert [cost.decode_step for cost in back] == pytest.approx([cost.decode_step for cost in costs])


def test_pictures_are_drawn_again_by_the_command(tmp_path: Path) -> None:
    """`--redraw` runs nothing and draws all that has figures in the folder."""
    experiment = EXPERIMENTS["saturation"]
    text = "\n".join([*table(experiment, invented(experiment)), "", "Medians over 1 seed.", ""])
    (tmp_path / "saturation.md").write_text(text, "utf-8")
    main(["experiment", "all", "--redraw", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"saturation.md", "saturation.png"}
