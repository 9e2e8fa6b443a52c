"""Which engines compute a call's prompts anew, whatever their prefix caches hold: who needs a value for each token of
a prompt cannot have it of tokens that are not computed.

Read in the sources of vLLM 0.32 and SGLang 0.5.23:

- vLLM (`SamplingParams.skip_reading_prefix_cache`) does so wherever `prompt_logprobs` is not null, and 0 is not null: a
  stream may ask for 0 alone, and gets nothing for it. `echo` on a chat sets it to `top_logprobs`, 0 by default;
  `echo` on a completion sets it to `logprobs`, if that is not null. Pooling of all tokens (`token_embed`,
  `token_classify`, plugins) does so, too.
- SGLang matches no more of a prompt than `logprob_start_len`, which is 0 for a completion with `echo` and `logprobs`
  above 0, and the end of the prompt for all other calls that OpenAI's API has. It ignores `prompt_logprobs`.

What these have in common: the prompt is in the cache afterwards. All else that keeps a call from finding a prefix
(an adapter, a salt, another image) makes it another prefix, and stands in what its prompts are keyed by (`render`).
"""

from typing import Final

from router.api.body.fields import Fields

NO_ENGINE: Final[frozenset[str]] = frozenset()
"""Every engine reads its cache."""
VLLM: Final = frozenset({"vllm"})
BOTH: Final = frozenset({"vllm", "sglang"})
ALL_TOKENS: Final = frozenset({"token_embed", "token_classify", "embed&token_classify", "plugin"})
"""vLLM's tasks of pooling that have a result for each token, or may."""


def of_completion(fields: Fields) -> frozenset[str]:
    """The engines that compute the prompts of this body for /v1/completions anew."""
    logprobs = fields.get("logprobs")
    if fields.get("echo") and logprobs is not None:
        return BOTH if logprobs else VLLM
    return VLLM if fields.get("prompt_logprobs") is not None else NO_ENGINE


def of_chat(fields: Fields) -> frozenset[str]:
    """The engines that compute the prompt of this body for /v1/chat/completions anew."""
    return VLLM if fields.get("prompt_logprobs") is not None or fields.get("echo") else NO_ENGINE


def of_pooling(fields: Fields) -> frozenset[str]:
    """The engines that compute the prompts of this body for /pooling anew.

    A body that names no task gets its model's own, which is not known here, and is taken to read the cache.
    """
    return VLLM if fields.get("task") in ALL_TOKENS else NO_ENGINE
