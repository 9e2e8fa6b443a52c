"""The parsed form of one call to a model, as far as the router needs it."""

from enum import Enum
from typing import Final, NamedTuple

from router.api.body.edits import Additions
from router.api.body.fields import NO_SESSION, SessionMembers
from router.core.model.prompt_key import Prompt

COMPLETIONS: Final = "/v1/completions"


class ResumeMode(Enum):
    """How another engine can continue an answer, by what it needs beside the call itself."""

    NONE = "none"
    """No engine can continue it."""
    TEXT = "text"
    """By the text so far."""
    IDS = "ids"
    """By the token ids so far, or by the text if they are not known."""


class Storage(NamedTuple):
    """How a call uses the responses that engines store."""

    stored: bool = False
    """Whether an engine may store the response, under an id of the engine's making."""
    background: bool = False
    """Whether the call is answered at once and computed afterwards."""
    previous_id: str | None = None
    """The id of the stored response that this one continues."""
    requested_id: str | None = None
    """The id that the call asks for its own response."""


NOT_STORED: Final = Storage()


class Call(NamedTuple):
    """What is forwarded to a worker, and what the scheduler and the reader of the answer need to know."""

    path: str
    body: bytes
    """The client's bytes, except for a resolved model alias, and a cache salt if prefixes are isolated. A worker gets
    them with those of the `additions` that it accepts."""
    model: str
    """Empty if the call names no model, so that any may serve it."""
    streamed: bool | None
    """None if only the content type of the answer shows whether it is a stream."""
    prompts: tuple[Prompt, ...]
    output_limit: int | None
    """Output tokens at most over all choices and prompts; None if the client set no limit."""
    user: str | None
    usage_wanted: bool
    """The client itself asked for `stream_options.include_usage`."""
    continuous_wanted: bool
    """The client itself asked for `stream_options.continuous_usage_stats`."""
    choices: int = 1
    """Answers per prompt; the engine numbers them over all prompts, prompt by prompt."""
    resume_mode: ResumeMode = ResumeMode.NONE
    """How another engine can continue a stream of this call."""
    additions: Additions = Additions()
    """The fields that the router wants to add to the body for its own use."""
    ids_wanted: bool = False
    """The client itself asked for `return_token_ids`."""
    extendable: bool = True
    """Whether a later prompt may begin with this one and its answer, so that a longer key is worth keeping."""
    method: str = "POST"
    content_type: str = "application/json"
    """The content type of the body."""
    adapters: tuple[str, ...] = ()
    """The adapters that the call names beside its model. The client needs permission for them as well."""
    largest_id: int = -1
    """The largest token id in the body; -1 if it has none."""
    computed_anew_by: frozenset[str] = frozenset()
    """The engines that do not read their prefix cache for this call."""
    beam_search: bool = False
    """The answers are beams, at an engine that searches them."""
    storage: Storage = NOT_STORED
    session: SessionMembers = NO_SESSION
    whole: bool = True
    """Whether one engine must compute all of it. If not, one may compute the prompt and another one the answer."""
    light: bool = True
    """Whether the event loop may parse and edit the body. If not, that takes long and is done in a thread."""


class Head(NamedTuple):
    """What the router knows of a call before its body."""

    path: str
    method: str = "POST"
    query: bytes = b""
    content_type: str = "application/json"
