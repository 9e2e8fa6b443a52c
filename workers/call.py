"""One API call, read from an OpenAI body: what both dialects accept, before either's own limits. PURE."""

from collections.abc import Mapping
from dataclasses import dataclass

from workers.tokenizer import encode, render_chat

Body = Mapping[str, object]
MAX_CHOICES = 128
MAX_TOKEN_ID = (1 << 57) - 1


class ApiError(Exception):
    """An answer other than 200; the dialect decides how it reads. `kind` is the OpenAI error type."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class Call:
    """A chat or completion call: `prompts` as token ids, `n` answers to each, `max_tokens` None if not given.

    `stream_interval`: tokens per chunk at least, except for the first and the last.
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
    """Read a call. Raises ApiError 400 where a field has the wrong type or an impossible value."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _wrong_type("stream_options", "an object")
    return Call(
        chat=chat,
        model=_string(body, "model"),
        prompts=[encode(_chat_text(body))] if chat else prompt_list(body.get("prompt")),
        n=_integer(body, "n", 1, MAX_CHOICES) or 1,
        max_tokens=_max_tokens(body, chat),
        ignore_eos=_boolean(body, "ignore_eos"),
        stream=_boolean(body, "stream"),
        include_usage=_boolean(options, "include_usage"),
        continuous_usage=_boolean(options, "continuous_usage_stats"),
        return_token_ids=_boolean(body, "return_token_ids"),
        stream_interval=_integer(body, "stream_interval", 1) or 1,
        rid=_string(body, "rid"),
    )


def text_tokens(body: Body) -> list[int]:
    """What `/tokenize` counts: a `prompt`, or `messages` rendered as a chat. Raises ApiError 400."""
    if "messages" in body:
        return encode(_chat_text(body))
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise _wrong_type("prompt", "a string")
    return encode(prompt)


def token_list(value: object, field: str) -> list[int]:
    """Token ids. Raises ApiError 400 for anything else."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise _wrong_type(field, "a list of token ids")
    if value and not 0 <= min(value) <= max(value) <= MAX_TOKEN_ID:
        raise ApiError(400, f"Token id is out of vocabulary in {field}", param=field)
    return value


def _max_tokens(body: Body, chat: bool) -> int | None:
    if chat:
        given = _integer(body, "max_completion_tokens", 1)
        return _integer(body, "max_tokens", 1) if given is None else given
    return _integer(body, "max_tokens", 1) or 16


def _chat_text(body: Body) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _wrong_type("messages", "a list of objects")
    if not messages or not all(isinstance(message.get("role"), str) for message in messages):
        raise ApiError(400, "messages must not be empty and each needs a role", param="messages")
    return render_chat(messages, body.get("tools"), go_on=_boolean(body, "continue_final_message"))


def prompt_list(prompt: object) -> list[list[int]]:
    """Token ids of each prompt: a text, texts, one list of ids, or several."""
    if isinstance(prompt, str):
        prompts = [encode(prompt)]
    elif isinstance(prompt, list) and prompt and all(isinstance(text, str) for text in prompt):
        prompts = [encode(text) for text in prompt]
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompts = [token_list(tokens, "prompt") for tokens in prompt]
    else:
        prompts = [token_list(prompt, "prompt")]
    if not all(prompts):
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    return prompts


def _wrong_type(field: str, wanted: str) -> ApiError:
    return ApiError(400, f"Input should be {wanted}: {field}", "Bad Request", f"body.{field}")


def _string(body: Body, field: str) -> str | None:
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise _wrong_type(field, "a string")
    return value


def _boolean(body: Body, field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise _wrong_type(field, "a boolean")
    return bool(value)


def _integer(body: Body, field: str, low: int, high: int | None = None) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if type(value) is not int:
        raise _wrong_type(field, "an integer")
    if value < low or (high is not None and value > high):
        raise ApiError(400, f"{field} must be at least {low}" + (f", at most {high}" if high else ""), param=field)
    return value
