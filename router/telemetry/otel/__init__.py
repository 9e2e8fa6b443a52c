"""OpenTelemetry: traces of calls, and metrics of the GenAI conventions. Needs the extra `otel`."""
