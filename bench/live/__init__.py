"""Run a workload over HTTP against an OpenAI-compatible server."""
