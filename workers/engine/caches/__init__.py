"""The prefix caches of the emulated engines: vLLM's blocks, SGLang's radix tree."""
