"""The generation calls that each engine rejects before it counts a token. PURE.

Both engines ignore unknown fields. Where a message names the rejected field, it has the engine's own wording, because
clients and routers look for the name there.
"""

from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from typing import Final

from workers.api.call import MAX_TOKEN_ID, ApiError, Body, boolean, string, wrong_type

Refusal = Callable[[Body, str], None]
"""Takes a body and a path. Raises ApiError if the engine rejects the call."""
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
SGLANG_ROLES: Final = frozenset(
    {"user", "system", "assistant", "tool", "function", "developer", "latest_reminder", "root"}
)
"""The message roles that SGLang accepts; vLLM accepts any."""


def refuse_for_vllm(body: Body, path: str) -> None:
    """Reject a call as vLLM 0.32 does. Raises ApiError."""
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        if path not in (CHAT, COMPLETIONS, RESPONSES):
            raise wrong_type("cache_salt", "a text of at least one character")
        raise _named("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if path not in (CHAT, COMPLETIONS):
        return
    if body.get("stream_options") and not boolean(body, "stream"):
        raise _named("Stream options can only be defined when `stream=True`.", "stream_options")
    if path == CHAT:
        refuse_chat_ends(body)
    elif not (body.get("prompt") or isinstance(body.get("prompt"), list)):
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    _check_sampling(body)
    answers = body.get("n")
    if body.get("temperature") == 0 and isinstance(answers, int) and answers > 1:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {answers}.")


def refuse_chat_ends(body: Body) -> None:
    """Reject a chat that both continues its last message and opens a new answer, as vLLM does. Raises ApiError."""
    if not boolean(body, "continue_final_message"):
        return
    if boolean(body, "add_generation_prompt"):
        raise ApiError(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if "add_generation_prompt" not in body:
        raise ApiError(400, "continue_final_message and add_generation_prompt are not compatible.")


def refuse_for_sglang(body: Body, path: str) -> None:
    """Reject a call as SGLang 0.5.23 does. Raises ApiError."""
    if path == RESPONSES or path in (CHAT, COMPLETIONS):
        _check_salt(body)
    if path not in (CHAT, COMPLETIONS):
        return
    if "model" in body and body["model"] is None:
        raise wrong_type("model", "a string")
    if path == CHAT:
        _check_roles(body)
        if boolean(body, "stream"):
            _refuse_ids_in_chat_streams(body)
    _check_sampling(body)
    _check_bias(body)


def _check_bias(body: Body) -> None:
    bias = body.get("logit_bias")
    for key in bias if isinstance(bias, dict) else ():
        if key.removeprefix("-").isdecimal() and not 0 <= int(key) <= MAX_TOKEN_ID:
            raise ApiError(400, f"logit_bias must has keys in [0, {MAX_TOKEN_ID}], got {key}.", "BadRequest")


def _check_roles(body: Body) -> None:
    messages = body.get("messages")
    for turn in messages if isinstance(messages, list) else ():
        role = turn.get("role") if isinstance(turn, dict) else None
        if isinstance(role, str) and role.lower() not in SGLANG_ROLES:
            raise wrong_type("messages.0.role", "a role that is known")


def _refuse_ids_in_chat_streams(body: Body) -> None:
    if boolean(body, "return_token_ids"):
        message = (
            "return_token_ids is not supported with streaming on /v1/chat/completions. "
            "Please set stream=false when using return_token_ids=true."
        )
        raise ApiError(400, message, "BadRequest")
    if boolean(body, "return_prompt_token_ids"):
        message = (
            "return_prompt_token_ids is not supported with streaming. "
            "Please set stream=false when using return_prompt_token_ids=true."
        )
        raise ApiError(400, message, "BadRequest")


def _check_salt(body: Body) -> None:
    salt = body.get("cache_salt")
    several = salt if isinstance(salt, list) else [salt or ""]
    if not all(isinstance(each, str) for each in several):
        raise wrong_type("cache_salt", "a string or a list of them")


def _check_sampling(body: Body) -> None:
    """Check what both engines check alike, apart from the wording."""
    string(body, "user")
    temperature, top_p = _number(body, "temperature"), _number(body, "top_p")
    if temperature is not None and not (isfinite(temperature) and temperature >= 0):
        raise ApiError(400, f"temperature must be non-negative, got {temperature}.", param="temperature")
    if top_p is not None and not 0 < top_p <= 1:
        raise ApiError(400, f"top_p must be in (0, 1], got {top_p}.", param="top_p")


def _number(body: Body, field: str) -> float | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, str | int | float):
        with suppress(ValueError):
            return float(value)
    raise wrong_type(field, "a number")


def _named(message: str, field: str) -> ApiError:
    """Return an error that names the field twice, as vLLM does."""
    return ApiError(400, f"{message} (parameter={field})", param=field)
