"""Which of vLLM's test files run, and which of their tests may fail through the router."""

from collections.abc import Mapping

SUITES: Mapping[str, tuple[str, ...]] = {
    "chat": (
        "openai/chat_completion/test_chat.py",
        "openai/chat_completion/test_chat_completion.py",
        "openai/chat_completion/test_chat_echo.py",
        "openai/chat_completion/test_chat_logit_bias_validation.py",
        "openai/chat_completion/test_batched_chat_completions.py",
        "openai/chat_completion/test_completion_with_function_calling.py",
        "openai/chat_completion/test_enable_force_include_usage.py",
        "openai/chat_completion/test_include_reasoning.py",
        "openai/chat_completion/test_logprob_token_ids.py",
        "openai/chat_completion/test_root_path.py",
    ),
    "completions": (
        "openai/completion/test_completion.py",
        "openai/completion/test_prompt_validation.py",
        "openai/test_chunked_prompt.py",
        "openai/test_return_token_ids.py",
        "openai/test_return_tokens_as_ids.py",
    ),
    "models": ("openai/models/test_models.py",),
    "tokenization": ("serve/tokenize/test_tokenization.py",),
    "basic": ("serve/instrumentator/test_basic.py",),
    "responses": (
        "openai/responses/test_basic.py",
        "openai/responses/test_function_call.py",
        "openai/responses/test_parsable_context.py",
        "openai/responses/test_simple.py",
        "openai/responses/test_stateful.py",
        "openai/responses/test_structured_output.py",
    ),
    "messages": ("anthropic/test_messages.py",),
}
"""Files below tests/entrypoints, by the part of the API that they test."""

PREFIX = "a path prefix in the flags of one vLLM: the router has none"
FORCED = "usage that the client has not asked for, by a flag of one vLLM: the router cannot know that it is not its own"
COLD = "it wants an empty cache, and the same test has filled it at the same server, direct"
CHAT = "tests/entrypoints/openai/chat_completion"
EXCUSED: Mapping[str, str] = {
    f"{CHAT}/test_root_path.py::test_chat_session_root_path_with_api_key[test_case1]": PREFIX,
    f"{CHAT}/test_enable_force_include_usage.py::test_chat_with_enable_force_include_usage": FORCED,
    "tests/entrypoints/anthropic/test_messages.py::test_anthropic_streaming_cache_usage": COLD,
}
"""Tests that may pass direct only, each with the reason. A name without brackets stands for all its parameters."""
