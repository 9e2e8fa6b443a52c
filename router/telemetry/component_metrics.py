"""Prometheus metrics of single components: admission, KV events, stored responses, files."""

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.kv_blocks.kv_events import EventsReport
from router.core.model.request import WorkerId


class AdmissionMetrics(Collector):
    """How many, by the reason."""

    def __init__(self, refusals: Mapping[str, int]) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        family = CounterMetricFamily(
            "d2lpm_limited_calls", "Calls beyond what their client or its group may have.", labels=("reason",)
        )
        for reason, count in self._refusals.items():
            family.add_metric((reason,), count)
        yield family


class EventMetrics(Collector):
    """How each worker's events are followed, what was wrong with them, and what came of tokenising calls."""

    def __init__(
        self, report: Callable[[], Mapping[WorkerId, EventsReport]], outcomes: Callable[[], Mapping[str, int]]
    ) -> None:
        self._report = report
        self._outcomes = outcomes

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        followed = GaugeMetricFamily(
            "d2lpm_kv_events_followed", "1 while the worker's KV events are read.", labels=("worker",)
        )
        complete = GaugeMetricFamily(
            "d2lpm_kv_events_complete", "1 while KV events tell all that the worker holds.", labels=("worker",)
        )
        faults = CounterMetricFamily(
            "d2lpm_kv_event_faults", "What was wrong with KV events.", labels=("worker", "fault")
        )
        for worker, report in self._report().items():
            followed.add_metric((worker,), report.followed)
            complete.add_metric((worker,), report.complete)
            for fault, count in report.faults.items():
                faults.add_metric((worker, fault), count)
        tokens = CounterMetricFamily(
            "d2lpm_token_lookups", "Calls by what came of finding their prompt's tokens.", labels=("outcome",)
        )
        for outcome, count in self._outcomes().items():
            tokens.add_metric((outcome,), count)
        return iter((followed, complete, faults, tokens))


class ResponseMetrics(Collector):
    """How many there are."""

    def __init__(self, stored: Sized, background: Sized) -> None:
        """`stored`: those that are remembered; `background`: those that engines compute after they have answered."""
        self._stored = stored
        self._background = background

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        for name, what, responses in (
            ("d2lpm_background_responses", "Responses that engines compute in the background.", self._background),
            ("d2lpm_stored_responses", "Stored responses whose worker and client are remembered.", self._stored),
        ):
            yield GaugeMetricFamily(name, what, value=len(responses))


class WrittenFile(Protocol):
    """A file that is written again and again."""

    @property
    def failing(self) -> bool:
        """Whether it could not be written the last time."""


class FileMetrics(Collector):
    """State and journal, as far as there are any."""

    def __init__(self, files: Mapping[str, WrittenFile | None]) -> None:
        """By their names; None for one that is not kept."""
        self._files = files

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        family = GaugeMetricFamily(
            "d2lpm_file_failing", "1 while the journal or the state cannot be written, else 0.", labels=("file",)
        )
        for name, file in self._files.items():
            if file is not None:
                family.add_metric((name,), float(file.failing))
        yield family
