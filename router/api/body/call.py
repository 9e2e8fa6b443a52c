"""One call to a model, parsed as far as the router needs it."""

from enum import Enum
from typing import Final, NamedTuple

from router.api.body.edits import Addition, Additions
from router.core.model.prompt_key import Prompt
from router.errors import BadRequest

COMPLETIONS: Final = "/v1/completions"
NAME_BYTES: Final = 256
"""Of a model or a user: they are kept after their call."""


class ResumeMode(Enum):
    """What is needed to let another engine go on with an answer, beside the call itself."""

    NONE = "none"
    """It cannot be done."""
    TEXT = "text"
    """The text so far."""
    IDS = "ids"
    """The tokens so far, or else the text."""


class Storage(NamedTuple):
    """What a call has to do with the responses that engines store."""

    stored: bool = False
    """Whether an engine may store its response, under an id that the engine makes."""
    background: bool = False
    """Whether it is answered at once and computed then."""
    previous_id: str | None = None
    """The id of the stored response that it goes on from."""
    requested_id: str | None = None
    """The id that it wants for its own response."""


class Call(NamedTuple):
    """What is forwarded, and what the scheduler and the reader of the answer need to know; no text of the prompt."""

    path: str
    body: bytes
    """The client's own bytes, but for an alias, and the salt where prefixes are kept apart. A worker is sent these with
    what it takes of the `additions`."""
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
    resume_mode: ResumeMode = ResumeMode.NONE
    """How another engine may go on with a stream of it."""
    additions: Additions = Additions()
    """What the router wants to add to the body for itself."""
    ids_wanted: bool = False
    """The client itself asked for `return_token_ids`."""
    extendable: bool = True
    """Whether a later prompt may begin with this one and its answer, so that a longer key is worth keeping."""
    method: str = "POST"
    content_type: str = "application/json"
    """Of the body."""
    adapters: tuple[str, ...] = ()
    """What it names beside its model, which the client has to be allowed as well."""
    largest_id: int = -1
    """The largest token id that it names itself; -1 for none."""
    computed_anew_by: frozenset[str] = frozenset()
    """The engines that do not read their prefix cache for it; see `Request`."""

    storage: Storage = Storage()

    def check_names(self) -> None:
        """Raise BadRequest for a name that is too long to be kept."""
        for param, name in (("model", self.model), ("user", self.user or "")):
            if len(name) > NAME_BYTES or len(name.encode()) > NAME_BYTES:
                message = f"`{param}` is longer than {NAME_BYTES} bytes."
                raise BadRequest(message, param=param, code="string_above_max_length")

    @property
    def hides_ids(self) -> bool:
        """Whether token ids in the answer are there for the router alone."""
        return Addition.TOKEN_IDS in self.additions.wanted


class Head(NamedTuple):
    """What a call says before its body."""

    path: str
    method: str = "POST"
    query: bytes = b""
    content_type: str = "application/json"
