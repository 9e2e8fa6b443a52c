"""Metrics of the GenAI conventions, as a model's server: the router and its workers together are one."""

from typing import Final

from opentelemetry.metrics import Histogram, Meter

from router.telemetry.calls.recorded_call import CallOutcome
from router.telemetry.otel.conventions import ERROR_TYPE, MODEL, OPERATION, PROVIDER, TOKEN_TYPE
from router.telemetry.otel.traced_call import TracedCall

TOKEN_BOUNDS: Final = [4**power for power in range(14)]
DURATION_BOUNDS: Final = [0.01 * 2**power for power in range(14)]
FIRST_TOKEN_BOUNDS: Final = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
]
OUTPUT_TOKEN_BOUNDS: Final = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]


class GenAiMetrics:
    """Histograms over the calls that have ended, with the buckets of the conventions."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._tokens = self._histogram(
            "gen_ai.client.token.usage", "{token}", "Number of input and output tokens used.", TOKEN_BOUNDS
        )
        self._seconds = self._histogram(
            "gen_ai.server.request.duration", "s", "Seconds from arrival to the end of the answer.", DURATION_BOUNDS
        )
        self._first_token = self._histogram(
            "gen_ai.server.time_to_first_token", "s", "Seconds from arrival to the first token.", FIRST_TOKEN_BOUNDS
        )
        self._output_token = self._histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Mean seconds per output token after the first one.",
            OUTPUT_TOKEN_BOUNDS,
        )

    def measure(self, call: TracedCall) -> None:
        """Count a call that has ended, unless its model is not known. Only whole answers have times of tokens."""
        if call.model is None:
            return
        attributes = {OPERATION: call.operation, PROVIDER: call.provider, MODEL: call.model}
        error = {} if call.error_type is None else {ERROR_TYPE: call.error_type}
        self._seconds.record(call.seconds, attributes | error)
        usage, first, last = call.usage, call.first_token_seconds, call.worker_seconds
        if usage is not None:
            self._tokens.record(usage.input_tokens, attributes | {TOKEN_TYPE: "input"})
            self._tokens.record(usage.output_tokens, attributes | {TOKEN_TYPE: "output"})
        if call.outcome is not CallOutcome.FINISHED or first is None or last is None:
            return
        self._first_token.record(first, attributes)
        if usage is not None and usage.output_tokens > 1:
            self._output_token.record((last - first) / (usage.output_tokens - 1), attributes)

    def _histogram(self, name: str, unit: str, text: str, bounds: list[float]) -> Histogram:
        return self._meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=bounds)
