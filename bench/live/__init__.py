"""A workload against an OpenAI-compatible server, over HTTP."""
