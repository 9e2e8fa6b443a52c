"""Parse one API call from an OpenAI body: what both dialects accept, before the limits of either. PURE."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from workers.engine.tokenizer import encode, render_chat

Body = Mapping[str, object]
MAX_CHOICES: Final = 128
MAX_TOKEN_ID: Final = (1 << 57) - 1
TRUE: Final = frozenset({"true", "yes", "on", "t", "y", "1", "1.0"})
FALSE: Final = frozenset({"false", "no", "off", "f", "n", "0", "0.0"})
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")


class ApiError(Exception):
    """An answer with a status other than 200; the dialect decides its wording. `kind` is the OpenAI error type."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class Call:
    """A chat or completion call: `prompts` as token ids, `n` answers to each, `max_tokens` None if not given.

    `stream_interval`: the least tokens per chunk, except for the first and the last chunk.
    """

    chat: bool
    model: str | None
    prompts: list[list[int]]
    n: int
    max_tokens: int | None
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    stream_interval: int
    rid: str | None


def parse_call(body: Body, chat: bool) -> Call:
    """Parse a call. Raises ApiError 400 if a field has the wrong type or an impossible value."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object")
    return Call(
        chat=chat,
        model=string(body, "model"),
        prompts=[encode(_chat_text(body))] if chat else prompt_list(body.get("prompt")),
        n=_integer(body, "n", 1, MAX_CHOICES) or 1,
        max_tokens=_max_tokens(body, chat),
        ignore_eos=boolean(body, "ignore_eos"),
        stream=boolean(body, "stream"),
        include_usage=boolean(options, "include_usage"),
        continuous_usage=boolean(options, "continuous_usage_stats"),
        return_token_ids=boolean(body, "return_token_ids"),
        stream_interval=_integer(body, "stream_interval", 1) or 1,
        rid=string(body, "rid"),
    )


def text_tokens(body: Body) -> list[int]:
    """Return the tokens that `/tokenize` counts: of `prompt`, or of `messages` as a chat. Raises ApiError 400."""
    if "messages" in body:
        return encode(_chat_text(body))
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise wrong_type("prompt", "a string")
    return encode(prompt)


def token_list(value: object, field: str) -> list[int]:
    """Check that `value` is a list of token ids and return it. Raises ApiError 400 otherwise."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise wrong_type(field, "a list of token ids")
    if value and min(value) < 0:
        raise wrong_type(f"{field}.0", "a token id")
    if value and max(value) > MAX_TOKEN_ID:
        raise ApiError(400, f"Token id is out of vocabulary in {field}")
    return value


def _max_tokens(body: Body, chat: bool) -> int | None:
    if chat:
        given = _integer(body, "max_completion_tokens", 1)
        return _integer(body, "max_tokens", 1) if given is None else given
    return _integer(body, "max_tokens", 1) or 16


def _chat_text(body: Body) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise wrong_type("messages", "a list of objects")
    if not messages:
        raise ApiError(400, "A chat needs at least one message.")
    if not all(isinstance(message.get("role"), str) for message in messages):
        raise wrong_type("messages.0.role", "a string")
    return render_chat(messages, body.get("tools"), continue_last=boolean(body, "continue_final_message"))


def prompt_list(prompt: object) -> list[list[int]]:
    """Return the token ids of each prompt, given one text, a list of texts, one list of token ids, or several."""
    if isinstance(prompt, str):
        prompts = [encode(prompt)]
    elif isinstance(prompt, list) and prompt and all(isinstance(text, str) for text in prompt):
        prompts = [encode(text) for text in prompt]
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompts = [token_list(tokens, "prompt") for tokens in prompt]
    else:
        prompts = [token_list(prompt, "prompt")]
    if not prompts or not all(prompts):
        raise ApiError(400, "A prompt must not be empty.")
    return prompts


def wrong_type(field: str, wanted: str) -> ApiError:
    return ApiError(400, f"Input should be {wanted}: {field}", "Bad Request", f"body.{field}")


def string(body: Body, field: str) -> str | None:
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise wrong_type(field, "a string")
    return value


def boolean(body: Body, field: str) -> bool:
    """Read a boolean field; both engines also accept words, 0 and 1. Raises ApiError 400 for any other value."""
    value = body.get(field)
    if value is None or isinstance(value, bool):
        return bool(value)
    word = str(value).lower() if isinstance(value, str | int | float) else ""
    if word not in TRUE | FALSE:
        raise wrong_type(field, "a boolean")
    return word in TRUE


def _integer(body: Body, field: str, low: int, high: int | None = None) -> int | None:
    value = whole(body.get(field), field)
    if value is None:
        return None
    if value < low or (high is not None and value > high):
        message = f"{field} must be at least {low}" + (f", at most {high}" if high else "")
        raise ApiError(400, message, param=None if field == "n" else field)  # vLLM does not name the field for `n`
    return value


def whole(value: object, field: str) -> int | None:
    """Read an integer; both engines also accept one written as text, or as a float without a fraction."""
    if value is None or isinstance(value, int):
        return value if value is None else int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    raise wrong_type(field, "an integer")
