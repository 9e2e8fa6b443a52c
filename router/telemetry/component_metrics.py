"""Prometheus metrics of single components: admission, KV events, stored responses, files."""

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.kv_blocks.kv_events import EventsReport
from router.core.model.request import WorkerId


class AdmissionMetrics(Collector):
    """Counts the calls refused because of a limit, by reason."""

    def __init__(self, refusals: Mapping[str, int]) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "d2lpm_limited_calls", "Calls refused because of a limit of their client or its group.", labels=("reason",)
        )
        for reason, count in self._refusals.items():
            family.add_metric((reason,), count)
        yield family


class EventMetrics(Collector):
    """Shows how each worker's KV events are followed, what was wrong with them, and how prompts were tokenized."""

    def __init__(
        self, report: Callable[[], Mapping[WorkerId, EventsReport]], outcomes: Callable[[], Mapping[str, int]]
    ) -> None:
        self._report = report
        self._outcomes = outcomes

    def collect(self) -> Iterator[Metric]:
        followed = GaugeMetricFamily(
            "d2lpm_kv_events_followed", "1 while the router follows the worker's KV events.", labels=("worker",)
        )
        complete = GaugeMetricFamily(
            "d2lpm_kv_events_complete",
            "1 while KV events cover all that the worker has cached.",
            labels=("worker",),
        )
        faults = CounterMetricFamily(
            "d2lpm_kv_event_faults", "Faults in KV events, by kind.", labels=("worker", "fault")
        )
        for worker, report in self._report().items():
            followed.add_metric((worker,), report.followed)
            complete.add_metric((worker,), report.complete)
            for fault, count in report.faults.items():
                faults.add_metric((worker, fault), count)
        tokens = CounterMetricFamily(
            "d2lpm_token_lookups", "Calls by the outcome of finding the tokens of their prompt.", labels=("outcome",)
        )
        for outcome, count in self._outcomes().items():
            tokens.add_metric((outcome,), count)
        return iter((followed, complete, faults, tokens))


class ResponseMetrics(Collector):
    """Counts stored responses and responses that are computed in the background."""

    def __init__(self, stored: Sized, background: Sized) -> None:
        """`stored`: the responses remembered; `background`: those that an engine still computes after its answer."""
        self._stored = stored
        self._background = background

    def collect(self) -> Iterator[Metric]:
        for name, what, responses in (
            ("d2lpm_background_responses", "Responses that engines compute in the background.", self._background),
            ("d2lpm_stored_responses", "Stored responses whose worker and client the router remembers.", self._stored),
        ):
            yield GaugeMetricFamily(name, what, value=len(responses))


class WrittenFile(Protocol):
    """A file that the router rewrites or appends to while it runs."""

    @property
    def failing(self) -> bool:
        """Whether the last write failed."""


class FileMetrics(Collector):
    """Shows whether the state file and the journal can be written."""

    def __init__(self, files: Mapping[str, WrittenFile | None]) -> None:
        """`files`: the files by name; None for one that is switched off."""
        self._files = files

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "d2lpm_file_failing", "1 while the journal or the state file cannot be written, else 0.", labels=("file",)
        )
        for name, file in self._files.items():
            if file is not None:
                family.add_metric((name,), float(file.failing))
        yield family
