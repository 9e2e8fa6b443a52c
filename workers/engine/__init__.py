"""The emulated engines: pure, stepwise schedulers and caches of vLLM and SGLang."""
