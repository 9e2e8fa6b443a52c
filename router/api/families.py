"""Families of endpoints: what the data path asks of each, and the family of each path. Pure.

Azure has other names of paths: a deployment's, which names the model, and those below /openai/v1.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

import orjson

from router.api.answer.event_reader import EventReader
from router.api.answer.stream_reader import Answer, Ending, EngineError, StreamReader, read_json
from router.api.body.call import COMPLETIONS, Call, Head
from router.api.body.error_bodies import ErrorShape
from router.api.body.json_object import load, put_members
from router.api.body.multipart import is_form, media_type, put_field
from router.api.endpoints import embeddings, invocations, messages, responses, scoring, tokenizing
from router.api.endpoints.chat import PATH as CHAT
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.completions import parse_completion
from router.api.endpoints.other import parse_other
from router.api.endpoints.plain import read_plain
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import Usage
from router.errors import BadRequest

JSON_TYPE: Final = "application/json"
AZURE_PREFIX: Final = "/openai/"
_DEPLOYMENT: Final = re.compile(
    r"/openai/deployments/(.+?)/(chat/completions|completions|embeddings|audio/(?:transcriptions|translations|speech))/?"
)
_AZURE_VERSION_1: Final = "/openai/v1/"


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

    def ending(self) -> Ending:
        """Return what the scheduler learns from a complete answer."""

    @property
    def broken(self) -> bool: ...
    @property
    def held(self) -> bytes: ...
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


def without_azure(path: str) -> tuple[str, str | None]:
    """Return OpenAI's name for a path of Azure's, with the model that it names in place of the body.

    Any other path is returned unchanged, and without a model.
    """
    if not path.startswith(AZURE_PREFIX):
        return path, None
    if found := _DEPLOYMENT.fullmatch(path):
        return f"/v1/{found[2]}", found[1]
    return (path.removeprefix("/openai") if path.startswith(_AZURE_VERSION_1) else path), None


def with_deployment(body: bytes, content_type: str, deployment: str) -> bytes:
    """Set the model of a JSON object or a form to the deployment of its path; any other body is unchanged.

    A body that names another model would be for a model that the path does not name: the path counts, as at Azure.
    """
    if is_form(content_type):
        return put_field(body, content_type, "model", deployment)
    fields = load(body)
    return body if fields is None else put_members(body, {"model": orjson.dumps(deployment)}, fields)


ROUTER_PATHS: Final = ("/v1/models", "/v1/usage")
"""Paths that the router answers itself, together with all paths below them."""
ENGINE_ADMIN_PATHS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/loads"})
"""Engine admin paths that are never proxied."""
VLLM_INFO_PATHS: Final = ("/version", "/tokenizer_info")
SGLANG_INFO_PATHS: Final = ("/model_info", "/get_model_info")
"""Paths outside /v1 at which one kind of engine tells of itself. A call is charged one input token.

Everything else outside /v1 stays closed: it starts, stops, empties or reconfigures an engine, shows its keys
(SGLang's /server_info), or generates without a count of tokens that could be charged (SGLang's Ollama paths).
"""


_EMBEDDINGS: Final = Family(embeddings.parse_embeddings, EventReader, read_plain)
_SCORING: Final = Family(scoring.parse_scoring, EventReader, read_plain)
_TOKENIZING: Final = Family(tokenizing.parse_tokenizing, EventReader, tokenizing.read_tokenized)
_INFO: Final = Family(parse_other, EventReader, read_plain, methods=("GET",))
FAMILIES: Final[Mapping[str, Family]] = {
    CHAT: Family(parse_chat, tokenizable=True, generates=True, served_by_all_engines=True),
    COMPLETIONS: Family(parse_completion, tokenizable=True, generates=True, served_by_all_engines=True),
    responses.PATH: Family(
        responses.parse_response, responses.ResponseReader, responses.read_response, responses.ERRORS, generates=True
    ),
    messages.PATH: Family(
        messages.parse_messages, messages.MessageReader, messages.read_message, messages.ANTHROPIC
    )._replace(generates=True),
    messages.COUNT_PATH: _TOKENIZING._replace(errors=messages.ANTHROPIC),
    **dict.fromkeys(embeddings.PATHS, _EMBEDDINGS),
    **dict.fromkeys(scoring.PATHS, _SCORING),
    **dict.fromkeys(tokenizing.PATHS, _TOKENIZING),
    invocations.PATH: Family(invocations.parse_invocation, generates=True, served_by_all_engines=True),
}
"""The families by path."""
INFO: Final[Mapping[str, Family]] = {
    **dict.fromkeys(VLLM_INFO_PATHS, _INFO._replace(engines=frozenset({"vllm"}))),
    **dict.fromkeys(SGLANG_INFO_PATHS, _INFO._replace(engines=frozenset({"sglang"}))),
}
"""The families of what engines tell of themselves, by path."""
OTHER: Final = Family(
    parse_other,
    EventReader,
    read_plain,
    methods=("POST", "GET", "PUT", "PATCH", "DELETE"),
    accepts_forms=True,
    generates=True,
)
"""The family of all other paths that an engine serves below /v1."""


def without_slash(path: str) -> str | None:
    """Return the path that a path with a slash at its end means; None if it has none, or means none of these."""
    if not path.endswith("/"):
        return None
    bare = path.rstrip("/")
    return bare if family_of(bare) is not None else None


def family_of(path: str) -> Family | None:
    """Return the family of a path, also with a slash at its end; None if the path does not belong to the data path."""
    family = FAMILIES.get(path) or INFO.get(path) or FAMILIES.get(path.rstrip("/"))
    if family is not None or not path.startswith("/v1/"):
        return family
    is_router_path = any(path == name or path.startswith(f"{name}/") for name in ROUTER_PATHS)
    # A proxy before an engine may shorten these, and so reach a path that is closed here.
    can_be_shortened = "//" in path.rstrip("/") or not {"..", "."}.isdisjoint(path.split("/"))
    return None if is_router_path or can_be_shortened or path.rstrip("/") in ENGINE_ADMIN_PATHS else OTHER


def error_shape_of(path: str) -> ErrorShape:
    """Return the shape of errors at a path."""
    family = FAMILIES.get(path)
    if family is None:
        return messages.ANTHROPIC if path.startswith(f"{messages.PATH}/") else ErrorShape()
    return family.errors
