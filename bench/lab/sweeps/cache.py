"""How accurate each way to follow the workers' caches is, and what that is worth, with small and large caches.

The caches are so small that a workload touches 0.5, 1, 2 and 5 times as many tokens. The first way assumes that nothing
is ever evicted. The second keeps a budget of as many tokens as the cache has, and drops the least recently sent. The
mirror replays what the engine does and corrects itself by answers and metrics. KV events report what a cache stores and
drops. An oracle that reads the engines' caches at the moment of the decision, which no router can, shows the most that
could be gained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Final, get_args

from bench.lab.drawing.axes import at, legend, outer, scale
from bench.lab.drawing.looks import Look, looks
from bench.lab.frame.conditions import A100, QUICK_SEEDS, fleet
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.loads import loaded
from bench.lab.frame.measures import service_seen
from bench.lab.frame.plots import LABELS
from bench.report.records import Record, Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario, WorkerSpec
from router.core.cache.engine_rules import Tracking
from router.core.clients.fairness import percentile
from router.core.scheduler_settings import SchedulerSettings
from workers.engine.model import Dialect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORKERS: Final = 2
SECONDS: Final = 30.0
FOOTPRINTS: Final[Mapping[str, int]] = {
    "tot-s1": 165_000,
    "tot-s2": 175_000,
    "judge-s1": 180_000,
    "judge-s2": 280_000,
    "qa-s1": 250_000,
    "tot": 190_000,
    "judge": 285_000,
    "qa": 230_000,
    "arena-chat": 280_000,
    "toolbench": 345_000,
    "toolbench-zipf": 330_000,
    "programming": 180_000,
    "video": 370_000,
    "loogle": 280_000,
    "embodied": 220_000,
}
"""Tokens of prompts and answers that each worker accumulates in that time if it evicts nothing.

qa-s2 is left out: its largest calls do not fit in a fifth of that.
"""
QUICK_WORKLOADS: Final = ("tot-s2", "qa-s1")
TIMES: Final = (0.5, 1.0, 2.0, 5.0)
"""How many times the size of the cache the workload touches."""
QUICK_TIMES: Final = (1.0, 5.0)
ENGINE_NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang"}
EVENTS: Final = "events"
ORACLE: Final = "oracle"
WAYS: Final[Mapping[str, Tracking]] = {
    "no eviction": Tracking(evicts=False, replays=False, corrects=False),
    "LRU budget": Tracking(replays=False, corrects=False),
    "mirror": Tracking(corrects=False),
    "mirror + correction": Tracking(),
    EVENTS: Tracking(),
    ORACLE: Tracking(),
}


@dataclass(frozen=True)
class CacheTruth(Experiment):
    """Compares the ways to follow a cache, all under D²LPM."""

    seeds: ClassVar[Sequence[int]] = QUICK_SEEDS
    marks: ClassVar[str] = ""
    caption: ClassVar[str] = (
        "Marks are means over the workloads; bars reach over the middle half of the workloads, which a few large"
        " errors can lift the mean above."
    )
    title: ClassVar[str] = "Predicted and actual cached tokens, and what predictions are worth, two A100 under D²LPM"
    published: ClassVar[str] = (
        "Of no paper. The error is the mean of |predicted - actual| / prompt tokens over all calls; false and missed"
        " are the tokens predicted and not there, and there and not predicted, as shares of all prompt tokens."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "error": 4,
        "false": 4,
        "missed": 4,
        "hit rate": 3,
        "service/s": 0,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            self._cell(workload, spec, times, way)
            for workload in (QUICK_WORKLOADS if quick else FOOTPRINTS)
            for dialect in get_args(Dialect)
            for spec in [replace(A100, dialect=dialect)]
            for times in (QUICK_TIMES if quick else TIMES)
            for way in WAYS
        ]

    @staticmethod
    def _cell(workload: str, spec: WorkerSpec, times: float, way: str) -> Cell:
        spec = replace(spec, kv_tokens=int(FOOTPRINTS[workload] / times))
        scenario = Scenario(
            "d2lpm",
            loaded(workload, WORKERS),
            fleet(spec, WORKERS),
            SECONDS,
            settings=SchedulerSettings(tracking=WAYS[way]),
            oracle=way == ORACLE,
            kv_events=way == EVENTS,
        )
        labels = (("workload", workload), ("engine", spec.dialect), ("times the cache", f"{times:g}"), ("way", way))
        return Cell(labels, scenario)

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        counts = [(predicted, actual, size) for predicted, actual, size in map(_token_counts, result.records) if size]
        tokens = sum(size for _, _, size in counts)
        return {
            "error": sum(abs(p - a) / size for p, a, size in counts) / len(counts) if counts else None,
            "false": sum(max(0, p - a) for p, a, _ in counts) / tokens if tokens else None,
            "missed": sum(max(0, a - p) for p, a, _ in counts) / tokens if tokens else None,
            "hit rate": summary["hit_rate"],
            "service/s": service_seen(summary) / (result.seconds - result.warmup),
        }

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        """Return a line for each way: its error and its worth over all workloads and caches."""
        best = {_place(row): row for row in rows if row.labels["way"] == ORACLE}
        lines = ["| way | mean error | worst error | hit rate / oracle | service / oracle |"]
        lines.append("| --- | ---: | ---: | ---: | ---: |")
        for way in WAYS:
            own = [row for row in rows if row.labels["way"] == way]
            errors = [row.median("error") or 0.0 for row in own]
            hits, service = (_shares(own, best, figure) for figure in ("hit rate", "service/s"))
            cells = (sum(errors) / len(errors), max(errors), sum(hits) / len(hits), sum(service) / len(service))
            lines.append(f"| {way} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
        return lines

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw error and hit rate by how small the cache is, as means over the workloads, by engine."""
        best = {_place(row): row for row in rows if row.labels["way"] == ORACLE}
        figure.set_figheight(5.5)
        engines = list(dict.fromkeys(row.labels["engine"] for row in rows))
        grid = figure.subplots(2, len(engines), sharex=True, sharey="row", squeeze=False)
        for column, engine in enumerate(engines):
            grid[0][column].set_title(f"emulated {ENGINE_NAMES.get(engine, engine)}")
            for place, (way, look) in enumerate(looks(list(WAYS)).items()):
                own = [row for row in rows if (row.labels["engine"], row.labels["way"]) == (engine, way)]
                aside = 1.03 ** (place - 2.5)
                _draw_means(grid[0][column], own, [row.median("error") or 0.0 for row in own], look, aside)
                _draw_means(grid[1][column], own, _shares(own, best, "hit rate"), look, aside)
            scale(grid[0][column], "y", LABELS["error"])
            scale(grid[1][column], "y", "hit rate over the oracle's (ratio)")
            for axes in grid[:, column]:
                at(axes, TIMES, [f"{times:g}" for times in TIMES], "tokens touched / cache (ratio)", logarithmic=True)
        outer(figure)
        legend(figure, list(WAYS))


def _draw_means(axes: "Axes", rows: Sequence[Row], figures: Sequence[float], look: Look, aside: float) -> None:
    """Draw the mean over the workloads of a way's figures at each size of the cache, with the range of half of them.

    `aside` moves the marks along the axis, by this factor, so that none hides another.
    """
    seen: dict[float, list[float]] = {}
    for row, figure in zip(rows, figures, strict=True):
        seen.setdefault(float(row.labels["times the cache"]), []).append(figure)
    means = [fmean(values) for values in seen.values()]
    quarters = [(percentile(values, 0.25) or 0.0, percentile(values, 0.75) or 0.0) for values in seen.values()]
    places = [times * aside for times in seen]
    axes.plot(places, means, look.mark + look.line, color=look.colour, label=rows[0].labels["way"] if rows else "")
    axes.vlines(places, *zip(*quarters, strict=True), color=look.colour, linewidth=0.9)


def _token_counts(record: Record) -> tuple[int, int, int]:
    """Return predicted cached, actual cached and prompt tokens; zeros if the engine reported nothing."""
    if record.predicted_cached_tokens is None or record.cached_tokens is None:
        return 0, 0, 0
    return record.predicted_cached_tokens, record.cached_tokens, record.input_tokens


def _place(row: Row) -> tuple[str, ...]:
    return tuple(value for column, value in row.labels.items() if column != "way")


def _shares(rows: Sequence[Row], best: Mapping[tuple[str, ...], Row], figure: str) -> Sequence[float]:
    """Return each row's figure as a share of the oracle's under the same conditions."""
    return [(row.median(figure) or 0.0) / (best[_place(row)].median(figure) or 1.0) for row in rows]
