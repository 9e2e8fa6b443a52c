"""Emulated SGLang and vLLM workers: a pure step engine behind an HTTP front, without a GPU."""
