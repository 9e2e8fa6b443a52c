"""The metrics of fronts in processes of their own: each front reports its counts, and one page shows their sums."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.channel.messages import FrontMeasured, FrontMetric, MetricKind, ProcessLoad

FAMILIES: Final = {MetricKind.COUNTER: CounterMetricFamily, MetricKind.GAUGE: GaugeMetricFamily}
OS_METRICS: Final = ProcessCollector(registry=None)
"""Reads /proc of this process."""
CREATED: Final = "_created"


def measured_metrics(collectors: list[Collector]) -> tuple[FrontMetric, ...]:
    """Return what these collectors count now. They have counters and gauges only."""
    return tuple([_measured(metric) for collector in collectors for metric in collector.collect()])


def _measured(metric: Metric) -> FrontMetric:
    samples = [sample for sample in metric.samples if not sample.name.endswith(CREATED)]
    labels = tuple(samples[0].labels) if samples else ()
    rows = tuple([(tuple(sample.labels.values()), float(sample.value)) for sample in samples])
    return FrontMetric(metric.name, MetricKind(metric.type), metric.documentation, labels, rows)


class FrontMeasurements(Collector):
    """The last report of each front, and the counts of those that have ended."""

    def __init__(self) -> None:
        self._reports: dict[str, FrontMeasured] = {}
        self._ended: dict[str, FrontMetric] = {}
        """The sum of the counters of ended fronts, by name: a counter never goes back."""

    @property
    def loads(self) -> Mapping[str, ProcessLoad]:
        """How busy each front is, by its name."""
        return {front: report.load for front, report in self._reports.items()}

    def take(self, front: str, report: FrontMeasured) -> None:
        """Replace the report of a front."""
        self._reports[front] = report

    def front_closed(self, front: str) -> None:
        """Keep the counts of a front that has ended, and nothing else of it."""
        if (report := self._reports.pop(front, None)) is not None:
            for metric in report.metrics:
                if metric.kind is MetricKind.COUNTER:
                    self._ended[metric.name] = _sum(self._ended.get(metric.name), metric)

    def collect(self) -> Iterator[Metric]:
        """Yield the sums over all fronts."""
        sums = dict(self._ended)
        for report in self._reports.values():
            for metric in report.metrics:
                sums[metric.name] = _sum(sums.get(metric.name), metric)
        for metric in sums.values():
            family = FAMILIES[metric.kind](metric.name, metric.text, labels=metric.labels)
            for values, value in metric.rows:
                family.add_metric(values, value)
            yield family


def _sum(before: FrontMetric | None, more: FrontMetric) -> FrontMetric:
    if before is None:
        return more
    rows = dict(before.rows)
    for values, value in more.rows:
        rows[values] = rows.get(values, 0.0) + value
    return replace(more, labels=more.labels or before.labels, rows=tuple(rows.items()))


def process_load(lag: float, calls: int, channel_delay: float = 0.0, restarts: int = 0) -> ProcessLoad:
    """Return how busy this process is. `lag`, `calls`, `channel_delay` and `restarts`: as in `ProcessLoad`."""
    found = {sample.name: sample.value for metric in OS_METRICS.collect() for sample in metric.samples}
    return ProcessLoad(
        time.process_time(),
        lag,
        calls,
        channel_delay,
        restarts,
        int(found.get("process_resident_memory_bytes", 0)),
        int(found.get("process_open_fds", 0)),
        found.get("process_start_time_seconds", 0.0),
    )


class ProcessMetrics(Collector):
    """Shows how busy this process and each front in a process of its own are."""

    def __init__(
        self,
        name: str,
        lag: Callable[[], float],
        calls: Callable[[], int],
        fronts: FrontMeasurements,
        restarts: int = 0,
    ) -> None:
        """`name`: of this process; `lag`: of its event loop, in seconds; `calls`: those in flight in it.

        `restarts`: how often it was started again.
        """
        self._name = name
        self._lag = lag
        self._calls = calls
        self._fronts = fronts
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        """Yield one gauge or counter per measure, labelled by process."""
        own = process_load(self._lag(), self._calls(), restarts=self._restarts)
        loads = {self._name: own} | dict(sorted(self._fronts.loads.items()))
        cpu = CounterMetricFamily("d2lpm_process_cpu_seconds", "CPU time of each process.", labels=("process",))
        lag = GaugeMetricFamily(
            "d2lpm_process_loop_lag_seconds",
            "Longest delay of the event loop of each process in the last half minute.",
            labels=("process",),
        )
        calls = GaugeMetricFamily("d2lpm_process_calls", "Calls in flight in each process.", labels=("process",))
        delay = GaugeMetricFamily(
            "d2lpm_channel_delay_seconds",
            "Seconds that the scheduler took for its last answer to a front.",
            labels=("process",),
        )
        restarts = CounterMetricFamily(
            "d2lpm_process_restarts", "Times that each process was started again.", labels=("process",)
        )
        memory = GaugeMetricFamily(
            "d2lpm_process_resident_memory_bytes", "Resident memory of each process.", labels=("process",)
        )
        files = GaugeMetricFamily(
            "d2lpm_process_open_files", "Open file descriptors of each process.", labels=("process",)
        )
        started = GaugeMetricFamily(
            "d2lpm_process_start_time_seconds",
            "When each process was started, in seconds since 1970.",
            labels=("process",),
        )
        for process, load in loads.items():
            if load.started:  # /proc is there
                memory.add_metric((process,), load.memory_bytes)
                files.add_metric((process,), load.open_files)
                started.add_metric((process,), load.started)
            restarts.add_metric((process,), load.restarts)
            cpu.add_metric((process,), load.cpu_seconds)
            lag.add_metric((process,), load.loop_lag)
            calls.add_metric((process,), load.calls)
            if load is not own:
                delay.add_metric((process,), load.channel_delay)
        return iter((cpu, lag, calls, delay, restarts, memory, files, started))
