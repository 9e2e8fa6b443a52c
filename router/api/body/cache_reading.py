"""Finds the engines that recompute a call's prompts even if their prefix caches hold them.

A call that needs a value for each token of its prompt cannot get it from cached tokens. The rules below are from the
sources of vLLM 0.32 and SGLang 0.5.23:

- vLLM (`SamplingParams.skip_reading_prefix_cache`) skips its cache wherever `prompt_logprobs` is not null. 0 is not
  null: a stream may ask only for 0, and gets nothing for it. `echo` on a chat sets it to `top_logprobs`, 0 by default;
  `echo` on a completion sets it to `logprobs`, if that is not null. Pooling of all tokens (`token_embed`,
  `token_classify`, plugins) skips the cache, too.
- SGLang matches a prompt only up to `logprob_start_len`, which is 0 for a completion with `echo` and `logprobs`
  above 0, and the end of the prompt for all other calls of OpenAI's API. It ignores `prompt_logprobs`.

In all these cases the prompt is in the cache afterwards. Everything else that prevents a prefix match (an adapter, a
salt, another image) makes a different prefix and is part of the prompt's key (`prompt_bytes`).
"""

from typing import Final

from router.api.body.fields import Fields

NO_ENGINE: Final[frozenset[str]] = frozenset()
"""Every engine reads its cache for the call."""
VLLM: Final = frozenset({"vllm"})
BOTH: Final = frozenset({"vllm", "sglang"})
ALL_TOKENS: Final = frozenset({"token_embed", "token_classify", "embed&token_classify", "plugin"})
"""vLLM's pooling tasks that have, or may have, a result for each token."""


def of_completion(fields: Fields) -> frozenset[str]:
    """The engines that recompute the prompts of this body of a call to /v1/completions."""
    logprobs = fields.get("logprobs")
    if fields.get("echo") and logprobs is not None:
        return BOTH if logprobs else VLLM
    return VLLM if fields.get("prompt_logprobs") is not None else NO_ENGINE


def of_chat(fields: Fields) -> frozenset[str]:
    """The engines that recompute the prompt of this body of a call to /v1/chat/completions."""
    return VLLM if fields.get("prompt_logprobs") is not None or fields.get("echo") else NO_ENGINE


def of_pooling(fields: Fields) -> frozenset[str]:
    """The engines that recompute the prompts of this body of a call to /pooling.

    A body without a task runs the model's default task, which the router does not know and assumes to read the cache.
    """
    return VLLM if fields.get("task") in ALL_TOKENS else NO_ENGINE
