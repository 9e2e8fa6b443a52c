"""What the data path asks of the wire knowledge about one family of endpoints."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from router.api.answer.stream_reader import Answer, EngineError, StreamReader, read_json
from router.api.body.call import Call, Head
from router.api.body.error_bodies import ErrorShape
from router.api.body.multipart import is_form, media_type
from router.core.model.prompt_key import PromptHasher, PromptKey
from router.core.model.request import Usage
from router.errors import BadRequest


class Parser(Protocol):
    """Reads the body of a call."""

    def __call__(self, head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:
        """Raises BadRequest. `ids`: ask for those of the tokens where another engine could go on by them."""


class Reader(Protocol):
    """Follows one streamed answer; see `StreamReader`, which is one."""

    has_delivered: bool
    started: bool

    def feed(self, block: bytes) -> bytes:
        """Take bytes of the engine; return what goes to the client now."""

    def close(self) -> bytes:
        """The same at the end of the stream."""

    def answer_keys(self) -> tuple[PromptKey, ...]:
        """One key for each choice: prompt and answer as the next turn would begin."""

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


class Family(NamedTuple):
    """Endpoints that are read and answered alike."""

    parse: Parser
    reader: Callable[[Call], Reader] = StreamReader
    read_whole: Callable[[Call, bytes], Answer] = read_json
    """Reads an answer that was not streamed. Raises WorkerBroke."""
    errors: ErrorShape = ErrorShape()
    tokenizable: bool = False
    """Whether a prompt's token ids can be found before its engine sees it."""
    methods: tuple[str, ...] = ("POST",)
    generates: bool = False
    """Whether a model may write text at these paths: an SGLang that makes embeddings dies of such a call."""
    accepts_forms: bool = False
    """Whether a body may be a form with files, too."""
    served_by_all_engines: bool = False
    """Whether every engine that writes text serves these paths, so that one that answers 404 is broken."""

    def check_type(self, head: Head) -> None:
        """Raises BadRequest for a body of another type, as engines do.

        A page of another site may make a browser send text/plain, a form or no type at all, but not JSON by its name.
        """
        if media_type(head.content_type) != "application/json" and not (self.accepts_forms and is_form(head.content_type)):
            allowed = "application/json or multipart/form-data" if self.accepts_forms else "application/json"
            raise BadRequest(f"The content-type must be {allowed}.", code="unsupported_content_type")
