"""`bench trace` draws a trace that it received: a line per span, in the order of their start."""

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from bench.lab.picture.received_spans import spans_in, trace_of_call
from bench.lab.picture.trace_drawing import drawing

MILLISECOND = 10**6


def span(name: str, number: int, since: float, until: float, *, failed: bool = False, **attributes: str | int) -> Span:
    """A span of one trace; the first one is that of the call."""
    status = Status(code=Status.STATUS_CODE_ERROR if failed else Status.STATUS_CODE_UNSET)
    return Span(
        trace_id=b"1" * 16,
        span_id=bytes([number]) * 8,
        name=name,
        kind=Span.SPAN_KIND_SERVER if number == 1 else Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=int((1000 + since) * MILLISECOND),
        end_time_unix_nano=int((1000 + until) * MILLISECOND),
        status=status,
        attributes=[
            KeyValue(key=f"d2lpm.{key}" if key != "error" else "error.type", value=_value(value))
            for key, value in attributes.items()
        ],
    )


def _value(value: str | int) -> AnyValue:
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value)


def test_a_trace_is_drawn_to_scale() -> None:
    """Bars begin and end where the spans do, short spans are visible, and workers are numbered as they appear."""
    spans = [
        span("chat m", 3, 0, 160, failed=True, worker="b", outcome="failed", error="broken"),
        span("placement", 4, 160, 160.1, worker="a", why="home", match_tokens=7, longest_match_tokens=9),
        span("queue", 2, 0, 0),
        span("POST /v1/chat/completions", 1, 0, 320, outcome="finished", tries=2, request="mine"),
    ]
    other = span("POST /v1/chat/completions", 5, 0, 1, request="other")
    other.trace_id = b"2" * 16
    sent = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[*spans, other])])])
    lines = drawing(trace_of_call(spans_in(sent.SerializeToString()), "mine")).splitlines()
    assert lines[1:] == [
        "/v1/chat/completions       0.00   320.00  " + "━" * 32 + "  finished, 2 attempts",
        "  queue                    0.00     0.00  ╸",
        "  chat m                   0.00   160.00  " + "━" * 16 + " " * 18 + "worker 1: failed (broken)",
        "  placement              160.00     0.10  " + " " * 16 + "╸" + " " * 17 + "worker 2: home, match 7 of 9",
    ]
