"""The emulated engines: pure schedulers and caches of vLLM and SGLang, step by step."""
