"""The interface between the data path and the wire format of one family of endpoints."""

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from router.api.answer.stream_reader import Answer, EngineError, StreamReader, read_json
from router.api.body.call import Call, Head
from router.api.body.error_bodies import ErrorShape
from router.api.body.multipart import is_form, media_type
from router.core.model.prompt_key import PromptHasher, PromptKey
from router.core.model.request import Usage
from router.errors import BadRequest

JSON_TYPE: Final = "application/json"


class CallParser(Protocol):
    """Parses the body of a call."""

    def __call__(self, head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:
        """Parse a body. `ids`: ask the engine for token ids if another engine could continue the answer by them.

        Raises BadRequest.
        """


class Reader(Protocol):
    """Follows one streamed answer. `StreamReader` documents the members."""

    has_delivered: bool
    started: bool

    def feed(self, block: bytes) -> bytes:
        """Take a block of bytes from the engine and return what to send to the client now."""

    def close(self) -> bytes:
        """End the stream and return what to send to the client."""

    def answer_keys(self) -> tuple[PromptKey, ...]:
        """One key per choice: of prompt and answer, as the next turn's prompt would begin."""

    @property
    def broken(self) -> bool: ...
    @property
    def held(self) -> bytes: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def error(self) -> EngineError | None: ...
    @property
    def finished(self) -> bool: ...
    @property
    def aborted(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    @property
    def ended_turn(self) -> bool | None: ...


class Family(NamedTuple):
    """Endpoints whose calls are parsed, and whose answers are read, in the same way."""

    parse: CallParser
    reader: Callable[[Call], Reader] = StreamReader
    read_whole: Callable[[Call, bytes], Answer] = read_json
    """Reads an answer that was not streamed. Raises WorkerBroke if it is not valid."""
    errors: ErrorShape = ErrorShape()
    tokenizable: bool = False
    """Whether the router can tokenize the prompts itself, before an engine sees them."""
    methods: tuple[str, ...] = ("POST",)
    generates: bool = False
    """Whether a model may generate text at these paths. Such a call crashes an SGLang that serves embeddings."""
    accepts_forms: bool = False
    """Whether a body may also be a form with files."""
    served_by_all_engines: bool = False
    """Whether every engine that generates text serves these paths, so that a 404 means a broken engine."""

    engines: frozenset[str] = frozenset()
    """The engines that serve these paths; empty if any may."""

    def is_of(self, engine: str) -> bool:
        """Return whether an engine may serve these paths, by its name; an engine without a name may."""
        return not (self.engines and engine) or engine in self.engines

    def check_type(self, head: Head) -> None:
        """Raise BadRequest unless the content type is allowed, as engines do.

        This protects against cross-site requests: a foreign page can make a browser send text/plain, a form or no
        content type at all, but not application/json.
        """
        given = head.content_type
        if given == JSON_TYPE or media_type(given) == JSON_TYPE:
            return
        if not (self.accepts_forms and is_form(given)):
            allowed = "application/json or multipart/form-data" if self.accepts_forms else "application/json"
            raise BadRequest(f"The content-type must be {allowed}.", code="unsupported_content_type")
