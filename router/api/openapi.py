"""Adds calls to models, and error responses, to the OpenAPI document: as far as the router itself handles them.

The schema of a body has only the members that the router checks. All others go to the engine, which validates them.
"""

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from router.api.body.call import COMPLETIONS
from router.api.body.fields import FALSE, TOO_LARGE, TRUE
from router.api.endpoints import chat, embeddings, invocations, messages, responses, scoring, tokenizing
from router.api.families import FAMILIES, error_shape_of
from router.errors import (
    BadRequest,
    BodyTooLarge,
    HeadTooLarge,
    InvalidKey,
    ModelNotAllowed,
    NoWorker,
    Refused,
    RouterError,
    TooSlow,
    UnknownModel,
    UnsupportedEncoding,
    UrlTooLong,
    WorkerBroke,
    WorkerHung,
)

Json = dict[str, Any]

COMMON_ERRORS: Final = (BadRequest, TooSlow, UrlTooLong, HeadTooLarge, Refused)
"""Errors that any request may get, from the handling of its connection."""
CALL_ERRORS: Final = (
    *(*COMMON_ERRORS, InvalidKey, ModelNotAllowed, UnknownModel, BodyTooLarge, UnsupportedEncoding),
    *(WorkerBroke, NoWorker, WorkerHung),
)
STATUS_DESCRIPTIONS: Final = {
    400: "The request is invalid; `param` names the member at fault.",
    401: "The API key is missing or invalid.",
    403: "The client is not allowed to call this model.",
    404: "No worker serves this model.",
    429: "A limit of the client or of the router is reached; `retry-after` estimates when to retry.",
    502: "No worker gave a valid answer.",
    503: "No worker is available, or the router is shutting down.",
    504: "The worker sent nothing for too long.",
}
"""Descriptions by status. Other statuses are described by their reason phrase."""

_TEXT: Final[Json] = {"type": ["string", "null"]}
_FLAG: Final[Json] = {
    "anyOf": [{"type": ["boolean", "null"]}, {"enum": [0, 1, *sorted(TRUE | FALSE)]}],
    "description": "A text counts in upper case, too.",
}
_IDS: Final[Json] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_PROMPTS: Final[Json] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}
_ANY_MODEL: Final[Json] = {
    "type": ["string", "null"],
    "description": "If missing, any model may serve the call.",
}


def _count(minimum: int = 0) -> Json:
    text = {"type": "string", "pattern": r"^\s*[+-]?\d{1,19}(\.0*)?\s*$"}
    return {"anyOf": [{"type": ["integer", "null"], "minimum": minimum, "maximum": int(TOO_LARGE) - 1}, text]}


def _object(required: Iterable[str] = (), **members: Json) -> Json:
    named: Json = {"type": "object", "properties": members}
    return {**named, "required": list(required)} if required else named


def _or_null(schema: Json) -> Json:
    return {**schema, "type": [schema["type"], "null"]}


class Body(NamedTuple):
    """The body of a call to an endpoint."""

    summary: str
    schema: Json
    example: Json


_GENERATED: Final = {
    "model": _ANY_MODEL,
    "user": _TEXT,
    "stream": _FLAG,
    "n": _count(1),
    "max_tokens": _count(),
    "stream_options": _or_null(_object(include_usage=_FLAG, continuous_usage_stats=_FLAG)),
    "return_token_ids": _FLAG,
}
_PLAIN: Final = _object(model=_ANY_MODEL, user=_TEXT)
_TURN: Final = {"role": "user", "content": "Hello"}

_CHAT: Final = Body(
    "Create a chat completion",
    _object(
        (),
        **_GENERATED,
        max_completion_tokens=_count(),
        messages={"type": ["array", "null"], "items": {"type": "object"}},
    ),
    {"model": "m", "messages": [_TURN], "max_tokens": 8},
)
_COMPLETION: Final = Body(
    "Complete a text",
    _object((), **_GENERATED, prompt=_PROMPTS),
    {"model": "m", "prompt": "Hello", "max_tokens": 8},
)
_RESPONSE: Final = Body(
    "Create a response",
    _object(model=_ANY_MODEL, user=_TEXT, stream=_FLAG, max_output_tokens=_count()),
    {"model": "m", "input": "Hello", "max_output_tokens": 8},
)
_MESSAGE: Final = Body(
    "Create a message (Anthropic's API)",
    _object(
        (),
        model=_ANY_MODEL,
        stream=_FLAG,
        max_tokens=_count(),
        metadata=_or_null(_object(user_id=_TEXT)),
    ),
    {"model": "m", "messages": [_TURN], "max_tokens": 8},
)
_COUNTING: Final = Body("Count the tokens of a message", _PLAIN, {"model": "m", "messages": [_TURN]})
_EMBEDDING: Final = Body("Embed, pool or classify texts", _PLAIN, {"model": "m", "input": ["Hello"]})
_RERANK: Final = Body(
    "Rank texts by their relevance to a query",
    _PLAIN,
    {"model": "m", "query": "Hello", "documents": ["Hello", "Bye"]},
)
_SCORE: Final = Body("Score the similarity of texts", _PLAIN, {"model": "m", "text_1": "Hello", "text_2": ["Bye"]})
_TOKENIZE: Final = Body("Tokenize a text", _PLAIN, {"model": "m", "prompt": "Hello"})
_DETOKENIZE: Final = Body("Detokenize token ids", _PLAIN, {"model": "m", "tokens": [72, 105]})

_BODIES: Final[Mapping[str, Body]] = {
    chat.PATH: _CHAT,
    COMPLETIONS: _COMPLETION,
    responses.PATH: _RESPONSE,
    messages.PATH: _MESSAGE,
    messages.COUNT_PATH: _COUNTING,
    invocations.PATH: _CHAT._replace(summary="Create a chat completion or complete a text (SageMaker's name)"),
    **dict.fromkeys(embeddings.PATHS, _EMBEDDING),
    **{path: _RERANK if path.endswith("rerank") else _SCORE for path in scoring.PATHS},
    **{path: _DETOKENIZE if path.endswith("detokenize") else _TOKENIZE for path in tokenizing.PATHS},
}

_KEY: Final[Json] = {
    "type": "http",
    "scheme": "bearer",
    "description": "A client's API key, if the router requires keys.",
}
_SCHEMAS: Final[Mapping[str, Json]] = {
    "Error": {
        "description": "An error of the router, in the first shape, or of an engine, in either.",
        "anyOf": [
            _object(("error",), error=_object(("message",), message={"type": "string"}, type=_TEXT, param=_TEXT)),
            _object(("message",), message={"type": "string"}),
        ],
    },
    "AnthropicError": _object(
        ("type", "error"),
        type={"const": "error"},
        error=_object(("type", "message"), type={"type": "string"}, message={"type": "string"}),
    ),
}
_NEVER_SENT: Final = ("HTTPValidationError", "ValidationError")


def with_calls(document: Json) -> Json:
    """Add the calls to models, and errors in their actual shapes, to the control plane's document."""
    control = {
        path: {method: _control_operation(operation) for method, operation in operations.items()}
        for path, operations in document["paths"].items()
    }
    components = document.get("components", {})
    schemas = {name: schema for name, schema in components.get("schemas", {}).items() if name not in _NEVER_SENT}
    return {
        **document,
        "paths": {**{path: {"post": _call(path)} for path in FAMILIES}, **control},
        "components": {
            **components,
            "schemas": {**schemas, **_SCHEMAS},
            "securitySchemes": {**components.get("securitySchemes", {}), "ClientKey": _KEY},
        },
    }


def _call(path: str) -> Json:
    body = _BODIES[path]
    schema = {**body.schema, "examples": [body.example]}
    whole: Json = {"application/json": {}}
    streamed: Json = {"text/event-stream": {}} if "stream" in body.schema["properties"] else {}
    return {
        "tags": ["models"],
        "summary": body.summary,
        "description": "Served by an engine. Errors of the engine keep its status and message.",
        "operationId": path.strip("/").replace("/", "_"),
        "security": [{"ClientKey": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The engine's answer.", "content": {**whole, **streamed}},
            **dict(_errors(CALL_ERRORS, path)),
        },
    }


def _control_operation(operation: Json) -> Json:
    """An operation of the control plane with the router's errors, and without FastAPI's default 422."""
    own = {status: answer for status, answer in operation["responses"].items() if status != "422"}
    errors = {status: {**answer, **_error_content("")} for status, answer in own.items() if int(status) >= 400}
    kinds = (*COMMON_ERRORS, BodyTooLarge) if "requestBody" in operation else COMMON_ERRORS
    return {**operation, "responses": {**own, **dict(_errors(kinds, "")), **errors}}


def _errors(kinds: Iterable[type[RouterError]], path: str) -> Iterator[tuple[str, Json]]:
    for status in sorted({kind.status for kind in kinds}):
        description = STATUS_DESCRIPTIONS.get(status, f"{HTTPStatus(status).phrase}.")
        yield str(status), {"description": description, **_error_content(path)}


def _error_content(path: str) -> Json:
    """Return the content of an error response at a path."""
    name = "AnthropicError" if error_shape_of(path) is messages.ANTHROPIC else "Error"
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}
