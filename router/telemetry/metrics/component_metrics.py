"""Prometheus metrics of single components: admission, KV events, stored responses, files."""

from collections.abc import Callable, Iterator, Mapping, Sized
from importlib.metadata import version
from platform import python_version
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
    """Shows how each worker's KV events are followed, and what was wrong with them."""

    def __init__(self, report: Callable[[], Mapping[WorkerId, EventsReport]]) -> None:
        self._report = report

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
        return iter((followed, complete, faults))


class TokenMetrics(Collector):
    """Counts how the search for the tokens of prompts ended."""

    def __init__(self, outcomes: Callable[[], Mapping[str, int]]) -> None:
        self._outcomes = outcomes

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "d2lpm_token_lookups", "Calls by the outcome of finding the tokens of their prompt.", labels=("outcome",)
        )
        for outcome, count in self._outcomes().items():
            tokens.add_metric((outcome,), count)
        yield tokens


class StoredMetrics(Collector):
    """Counts the stored responses that the router remembers."""

    def __init__(self, stored: Sized) -> None:
        self._stored = stored

    def collect(self) -> Iterator[Metric]:
        what = "Stored responses whose worker and client the router remembers."
        yield GaugeMetricFamily("d2lpm_stored_responses", what, value=len(self._stored))


class BackgroundMetrics(Collector):
    """Counts the responses that an engine still computes after its answer."""

    def __init__(self, background: Sized) -> None:
        self._background = background

    def collect(self) -> Iterator[Metric]:
        what = "Responses that engines compute in the background."
        yield GaugeMetricFamily("d2lpm_background_responses", what, value=len(self._background))


class LagMetrics(Collector):
    """Counts the calls that were refused because the scheduler's process lags."""

    def __init__(self, refusals: Callable[[], int]) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        what = "Calls refused because the scheduler's process does not keep up."
        yield CounterMetricFamily("d2lpm_scheduler_lag_refusals", what, value=self._refusals())


class LabelMetrics(Collector):
    """Counts the session labels that cannot be used."""

    def __init__(self, ignored: Callable[[], int]) -> None:
        self._ignored = ignored

    def collect(self) -> Iterator[Metric]:
        what = "Session labels that were empty, repeated, not ASCII or too long; their calls count as unlabelled."
        yield CounterMetricFamily("d2lpm_session_labels_ignored", what, value=self._ignored())


class WrittenFile(Protocol):
    """A file that the router rewrites or appends to while it runs."""

    @property
    def failing(self) -> bool:
        """Whether the last write failed."""

    @property
    def failures(self) -> int:
        """How many writes have failed."""


class FileMetrics(Collector):
    """Shows whether the state files and the journal can be written."""

    def __init__(self, files: Mapping[str, WrittenFile | None]) -> None:
        """`files`: the files by name; None for one that is switched off."""
        self._files = files

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "d2lpm_file_failing", "1 while the journal or a state file cannot be written, else 0.", labels=("file",)
        )
        failures = CounterMetricFamily(
            "d2lpm_file_failures", "Failed writes of the journal or a state file.", labels=("file",)
        )
        for name, file in self._files.items():
            if file is not None:
                family.add_metric((name,), float(file.failing))
                failures.add_metric((name,), file.failures)
        yield family
        yield failures


class BuildInfo(Collector):
    """Says which version runs, on which Python and with which policy."""

    def __init__(self, policy: str) -> None:
        self._values = (version("d2lpm-router"), python_version(), policy)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "d2lpm_build_info", "Always 1; its labels say what runs.", labels=("version", "python", "policy")
        )
        family.add_metric(self._values, 1)
        yield family
