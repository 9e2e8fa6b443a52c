"""Emulate SGLang and vLLM workers without a GPU: a pure step engine behind an HTTP server."""
