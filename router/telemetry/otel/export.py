"""Sends the traces and metrics of one front to an OpenTelemetry collector, by OTLP over HTTP."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from threading import Thread
from typing import Any, Final, Self
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from router.api.families import family_of, without_azure
from router.errors import ConfigError
from router.telemetry.calls.recorded_call import RecordedCall
from router.telemetry.otel.gen_ai_metrics import GenAiMetrics
from router.telemetry.otel.span_counts import SpanCounts
from router.telemetry.otel.traced_call import TracedCall, Tracing
from router.upstream.connections import WorkerConnections

log = logging.getLogger(__name__)

NAME: Final = "d2lpm-router"
CLOSE_SECONDS: Final = 3.0
"""How long the end of a process waits for a collector that takes nothing."""
PROTOCOL: Final = "http/protobuf"
SILENCED: Final = ("opentelemetry.exporter", "opentelemetry.trace")
"""Loggers of the SDK that say how each attempt to send failed, and repeat what is wrong in the headers of clients."""
NOT_TAKEN: Final = (
    "the OpenTelemetry collector did not take %s; see OTEL_EXPORTER_OTLP_ENDPOINT (why: --log-level debug)"
)
"""Always the same words, so that the log counts them instead of repeating them."""


class EndedSpans(SpanProcessor):
    """Counts the spans that are to be sent. The SDK drops the oldest ones if too many wait."""

    def __init__(self, counts: SpanCounts) -> None:
        self._counts = counts

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._counts.ended += 1


class CountedSpanExporter(OTLPSpanExporter):
    """Sends spans in a thread of the SDK, and counts which the collector took."""

    def __init__(self, counts: SpanCounts) -> None:
        super().__init__()
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._counts.sent += len(spans)
        else:
            self._counts.lost += len(spans)
            log.warning(NOT_TAKEN, "spans")
        return result


class LoggedMetricExporter(OTLPMetricExporter):
    """Sends metrics in a thread of the SDK, and logs if the collector does not take them: then it gets them later."""

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **more: Any
    ) -> MetricExportResult:
        result = super().export(metrics_data, timeout_millis, **more)
        if result is not MetricExportResult.SUCCESS:
            log.warning(NOT_TAKEN, "metrics")
        return result


class OpenTelemetry:
    """Traces and measures the calls of a front while the context is entered.

    Everything but the router's policy comes from the standard variables, such as OTEL_EXPORTER_OTLP_ENDPOINT. What is
    sent waits in a bounded queue; threads of the SDK encode and send it, so no call and no event loop waits for a
    collector.
    """

    def __init__(
        self, connections: WorkerConnections, policy: str, environment: Mapping[str, str] = os.environ
    ) -> None:
        """`policy`: the name of the policy. Raises ConfigError for a variable with a value that cannot be used."""
        self.spans: Final = SpanCounts()
        self._exporters: list[SpanExporter | MetricExporter] = []
        _check_protocol(environment)
        if not log.isEnabledFor(logging.DEBUG):
            for name in SILENCED:
                logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            resource = _resource()
            self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
            if environment.get("OTEL_TRACES_EXPORTER") != "none":
                self._exporters.append(spans := CountedSpanExporter(self.spans))
                self._traces.add_span_processor(BatchSpanProcessor(spans))
                self._traces.add_span_processor(EndedSpans(self.spans))
            readers: list[MetricReader] = []
            if environment.get("OTEL_METRICS_EXPORTER") != "none":
                self._exporters.append(metrics := LoggedMetricExporter())
                readers = [PeriodicExportingMetricReader(metrics)]
            self._metrics = MeterProvider(readers, resource, shutdown_on_exit=False)
        except ValueError as error:
            raise ConfigError(f"otel: {error}") from None
        measured = GenAiMetrics(self._metrics.get_meter(NAME, version(NAME)))
        tracer = self._traces.get_tracer(NAME, version(NAME))
        self._tracing = Tracing(tracer, connections, policy, time.monotonic, time.time_ns, measured.measure)

    def begin(self, scope: Scope) -> RecordedCall:
        """Return the record of a call that arrives: with spans if it is for engines."""
        if family_of(without_azure(scope["path"])[0]) is None:
            return RecordedCall(self._tracing.clock)
        return TracedCall(scope, self._tracing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send what is left, for at most `CLOSE_SECONDS`: in a thread for which nothing else waits."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._traces.shutdown()
            self._metrics.shutdown()
            with suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(closed.set)

        Thread(target=close, name="otel-close", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await closed.wait()
                return
        for exporter in self._exporters:
            exporter.shutdown()  # its thread tries no longer


def _check_protocol(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the environment asks for a protocol that is not installed."""
    for name in (
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
    ):
        if (protocol := environment.get(name) or PROTOCOL) != PROTOCOL:
            raise ConfigError(f"otel: {name} is {protocol}; only {PROTOCOL} is supported")


def _resource() -> Resource:
    """Return what says which process it is. The standard variables may say otherwise."""
    own: dict[str, AttributeValue] = {
        "service.name": NAME,
        "service.version": version(NAME),
        "service.instance.id": uuid4().hex,
        "process.pid": os.getpid(),
    }
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})
