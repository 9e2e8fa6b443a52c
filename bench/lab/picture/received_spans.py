"""Spans as a collector gets them: OTLP over HTTP as protobuf, decoded with OpenTelemetry's own package."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came, with its attributes as values of Python."""

    span: Span
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    """What the process that made it says of itself."""

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def failed(self) -> bool:
        """Whether its status is that of an error."""
        return self.span.status.code == Status.STATUS_CODE_ERROR

    @property
    def times(self) -> tuple[int, int]:
        """When it began and ended, in nanoseconds since 1970."""
        return self.span.start_time_unix_nano, self.span.end_time_unix_nano

    @property
    def own(self) -> Mapping[str, Any]:
        """The router's own attributes."""
        prefix = "d2lpm."
        return {name.removeprefix(prefix): value for name, value in self.attributes.items() if name.startswith(prefix)}


def spans_in(body: bytes) -> list[ReceivedSpan]:
    """Return the spans in the body of a call to /v1/traces."""
    return [
        ReceivedSpan(span, values(span.attributes), values(resource.resource.attributes))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def trace_of_call(spans: Iterable[ReceivedSpan], request: str | None = None) -> list[ReceivedSpan]:
    """Return the span of a call, which ends last, and then the spans in it as they began; empty if it has not come.

    `request`: the id of the call; None if only one call may have come. Raises ValueError if several fit.
    """
    known = [*spans]
    found = [
        each for each in known if each.span.kind == Span.SPAN_KIND_SERVER and request in (None, each.own.get("request"))
    ]
    if not found:
        return []
    (call,) = found
    same = [each for each in known if each.span.trace_id == call.span.trace_id and each is not call]
    return [call, *sorted(same, key=lambda each: each.times)]


def values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Return attributes as values of Python, by name."""
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
