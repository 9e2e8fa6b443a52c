"""A collector for tests: takes OTLP over HTTP as protobuf, and decodes it with OpenTelemetry's own package."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.running import until


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came, with its attributes as values of Python."""

    span: Span
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def failed(self) -> bool:
        """Whether its status is that of an error."""
        return self.span.status.code == Status.STATUS_CODE_ERROR

    @property
    def times(self) -> tuple[int, int]:
        """When it began and ended, in nanoseconds."""
        return self.span.start_time_unix_nano, self.span.end_time_unix_nano


@dataclass(slots=True)
class Collector:
    """What has come so far."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """The same, as it came."""
    points: dict[str, list[HistogramDataPoint]] = field(default_factory=dict)
    """The latest points of each metric, by name."""

    def called(self, kind: "Span.SpanKind.ValueType") -> list[ReceivedSpan]:
        """The spans of this kind, in the order in which they began."""
        return sorted([each for each in self.spans if each.span.kind == kind], key=lambda each: each.times)

    async def trace(self) -> list[ReceivedSpan]:
        """Wait for the span of one call, which ends last. Returns all spans of its trace as they began."""
        await until(lambda: bool(self.called(Span.SPAN_KIND_SERVER)))
        (call,) = self.called(Span.SPAN_KIND_SERVER)
        same = [each for each in self.spans if each.span.trace_id == call.span.trace_id]
        return [call, *sorted([each for each in same if each is not call], key=lambda each: each.times)]


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Collector]:
    """Run a collector at a free port of loopback."""
    collector = Collector()

    async def take_traces(request: web.Request) -> web.Response:
        collector.bodies.append(await request.read())
        for resource in ExportTraceServiceRequest.FromString(collector.bodies[-1]).resource_spans:
            of = values(resource.resource.attributes)
            for scope in resource.scope_spans:
                collector.spans += [ReceivedSpan(span, values(span.attributes), of) for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")

    async def take_metrics(request: web.Request) -> web.Response:
        for resource in ExportMetricsServiceRequest.FromString(await request.read()).resource_metrics:
            for scope in resource.scope_metrics:
                collector.points |= {metric.name: [*metric.histogram.data_points] for metric in scope.metrics}
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.add_routes([web.post("/v1/traces", take_traces), web.post("/v1/metrics", take_metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        collector.url = f"http://{host}:{port}"
        yield collector
    finally:
        await runner.cleanup()


def values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as values of Python, by name."""
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
