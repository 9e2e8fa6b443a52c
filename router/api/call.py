"""One call to a model, parsed as far as the router needs it."""

from enum import Enum
from typing import Final, NamedTuple

from router.api import fields as read
from router.api.fields import Fields
from router.api.json_span import put_members
from router.core.prompt_key import Prompt

IN_EVERY_CHUNK: Final = b'{"include_usage":true,"continuous_usage_stats":true}'
"""The `stream_options` of a call that came without."""


class Way(Enum):
    """What is needed to let another engine go on with an answer, beside the call itself."""

    NONE = "none"
    """It cannot be done."""
    TEXT = "text"
    """The text so far."""
    IDS = "ids"
    """The tokens so far, or else the text."""


class Call(NamedTuple):
    """What is forwarded, and what the scheduler and the reader of the answer need to know; no text of the prompt."""

    path: str
    body: bytes
    """What is forwarded: the client's own bytes, but for an alias, the salt where prefixes are kept apart, and
    `stream_options` and `return_token_ids` of a streamed chat or completion."""
    model: str
    """Empty where it names none, and any will do."""
    streamed: bool | None
    """None where only the answer's own type tells whether it is a stream."""
    prompts: tuple[Prompt, ...]
    output_limit: int | None
    """The most output tokens over all choices and prompts; None where the client set no limit."""
    user: str | None
    usage_wanted: bool
    """The client itself asked for `stream_options.include_usage`."""
    continuous_wanted: bool
    """The client itself asked for `stream_options.continuous_usage_stats`."""
    choices: int = 1
    """Answers per prompt; the engine numbers them over all prompts, prompt by prompt."""
    way: Way = Way.NONE
    """How another engine may go on with a stream of it."""
    ids_asked: bool = False
    """`body` asks for token ids, and the client did not."""
    ids_wanted: bool = False
    """The client itself asked for `return_token_ids`."""
    extendable: bool = True
    """Whether a later prompt may begin with this one and its answer, so that a longer key is worth keeping."""
    method: str = "POST"
    content_type: str = "application/json"
    """Of the body."""


class Head(NamedTuple):
    """What a call says before its body."""

    path: str
    method: str = "POST"
    query: bytes = b""
    content_type: str = "application/json"


class UsageRequest(NamedTuple):
    """What the client itself asked for of usage, and what is to be asked for instead."""

    options: bytes | None
    """The `stream_options` by which there is all that we need; None if its own will do."""
    final: bool = False
    continuous: bool = False


ITS_OWN: Final = UsageRequest(None)
OURS: Final = UsageRequest(IN_EVERY_CHUNK)


def asking(body: bytes, fields: Fields, usage: UsageRequest, *, ids: bool) -> bytes:
    """The body that asks for this usage and, if `ids`, for those of prompt and answer, with the least change of bytes.

    An engine that does not know a field passes over it.
    """
    asked = {}
    if ids:
        asked["return_token_ids"] = b"true"
    if usage.options is not None:
        asked["stream_options"] = usage.options
    return put_members(body, asked, fields)


def usage_request(fields: Fields, streamed: bool) -> UsageRequest:
    """Ask for usage in every chunk of a streamed call.

    vLLM honours `continuous_usage_stats` only together with `include_usage`; SGLang needs no more than the former.
    """
    options = read.mapping(fields, "stream_options")
    if not options:
        return OURS if streamed else ITS_OWN
    final = read.flag(options, "include_usage", "stream_options.include_usage")
    continuous = read.flag(options, "continuous_usage_stats", "stream_options.continuous_usage_stats")
    if not streamed or (final and continuous):
        return UsageRequest(None, final, continuous)
    both = {**options, "include_usage": True, "continuous_usage_stats": True}
    return UsageRequest(read.dump(both, "stream_options"), final, continuous)
