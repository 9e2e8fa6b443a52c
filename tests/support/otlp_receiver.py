"""A collector for tests: takes OTLP over HTTP as protobuf, and decodes it with OpenTelemetry's own package."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint

from bench.lab.picture.received_spans import ReceivedSpan, spans_in, trace_of_call
from tests.support.running import until


@dataclass(slots=True)
class Collector:
    """What has come so far."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """The same, as it came."""
    points: dict[str, list[HistogramDataPoint]] = field(default_factory=dict)
    """The latest points of each metric, by name."""

    async def trace(self, request: str | None = None) -> list[ReceivedSpan]:
        """Wait for the span of the call with this id, or of the only one. Returns it, and then the spans in it as they
        began.
        """
        await until(lambda: bool(trace_of_call(self.spans, request)))
        return trace_of_call(self.spans, request)


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Collector]:
    """Run a collector at a free port of loopback."""
    collector = Collector()

    async def take_traces(request: web.Request) -> web.Response:
        collector.bodies.append(await request.read())
        collector.spans += spans_in(collector.bodies[-1])
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
