"""What the members of a body rule out: reading a prefix cache, another engine that continues, two engines at once.

**Reading a cache.** A call that needs a value for each token of its prompt cannot get it from cached tokens, so engines
compute its prompts even if their caches hold them. The rules below are from the sources of vLLM 0.32 and SGLang 0.5.23:

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

from router.api.body.call import ResumeMode
from router.api.body.fields import LIMITS, Fields, objects

NO_ENGINE: Final[frozenset[str]] = frozenset()
"""Every engine reads its cache for the call."""
VLLM: Final = frozenset({"vllm"})
BOTH: Final = frozenset({"vllm", "sglang"})
ALL_TOKENS: Final = frozenset({"token_embed", "token_classify", "embed&token_classify", "plugin"})
"""vLLM's pooling tasks that have, or may have, a result for each token."""


NOT_RESUMABLE: Final = frozenset(
    {
        *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "use_beam_search", "kv_transfer_params"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
        *("structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"),
        *("functions", "return_hidden_states", "audio", "modalities"),
    }
)
"""Members by which an answer is more than its text, or depends on more than it: a grammar would start over."""

FOR_ONE_ENGINE: Final = frozenset({"prompt_logprobs", "echo", "suffix", "use_beam_search"})
"""Members by which an answer has more of the prompt than its KV cache tells, or is computed from several sequences."""


def completion_computed_anew_by(fields: Fields) -> frozenset[str]:
    """Return the engines that recompute the prompts of this body of a call to /v1/completions."""
    logprobs = fields.get("logprobs")
    if fields.get("echo") and logprobs is not None:
        return BOTH if logprobs else VLLM
    return VLLM if fields.get("prompt_logprobs") is not None else NO_ENGINE


def chat_computed_anew_by(fields: Fields) -> frozenset[str]:
    """Return the engines that recompute the prompt of this body of a call to /v1/chat/completions."""
    return VLLM if fields.get("prompt_logprobs") is not None or fields.get("echo") else NO_ENGINE


def pooling_computed_anew_by(fields: Fields) -> frozenset[str]:
    """Return the engines that recompute the prompts of this body of a call to /pooling.

    A body without a task runs the model's default task, which the router does not know and assumes to read the cache.
    """
    return VLLM if fields.get("task") in ALL_TOKENS else NO_ENGINE


def is_for_one_engine(fields: Fields, answers: int) -> bool:
    """Return whether one engine must compute all of a call. `answers`: number of answers over all prompts.

    What a prefill worker keeps is read once, so it serves one answer.
    """
    if answers != 1 or (fields.get("best_of") or 1) != 1 or 0 in map(fields.get, LIMITS):
        return True
    return any(fields.get(name) not in (None, False, "") for name in FOR_ONE_ENGINE.intersection(fields))


def resume_mode_of(fields: Fields, *, streamed: bool, answers: int) -> ResumeMode:
    """Return how another engine can continue the stream of a call. `answers`: number of answers over all prompts."""
    if not streamed or answers != 1 or (fields.get("best_of") or 1) != 1:
        return ResumeMode.NONE
    if any(map(fields.get, NOT_RESUMABLE.intersection(fields))):
        return ResumeMode.NONE
    response_format = fields.get("response_format")
    if response_format is not None and not (
        isinstance(response_format, dict) and response_format.get("type") == "text"
    ):
        return ResumeMode.NONE
    tools = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    if tools and fields.get("tool_choice") not in (None, "auto"):
        return ResumeMode.NONE
    # Ids do not suffice in these cases: an engine holds back text that may begin a stop string, parses tool calls out
    # of the text, and cannot restore images from ids.
    if tools or fields.get("stop") or not _is_text(fields.get("messages")):
        return ResumeMode.TEXT
    return ResumeMode.IDS


def _is_text(messages: object) -> bool:
    """Return whether the messages contain only text: no images or other files."""
    for message in objects(messages):
        content = message.get("content")
        if not isinstance(content, str) and any(part.get("type", "text") != "text" for part in objects(content)):
            return False
    return True
