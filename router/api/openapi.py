"""What the OpenAPI document says of calls to models, and of errors: as much as the router itself checks and tells.

Of a body, that is little: whatever else it holds goes to the engine, which refuses it in its own words.
"""

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from router.api.body.call import COMPLETIONS
from router.api.body.fields import TOO_LARGE
from router.api.endpoints import chat, embeddings, messages, responses, scoring, tokenizing
from router.api.registry import FAMILIES, error_shape_of
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
"""Whatever is asked for, a client may be told these: `front.py` says them of its connection."""
CALL_ERRORS: Final = (
    *(*COMMON_ERRORS, InvalidKey, ModelNotAllowed, UnknownModel, BodyTooLarge, UnsupportedEncoding),
    *(WorkerBroke, NoWorker, WorkerHung),
)
STATUS_DESCRIPTIONS: Final = {
    400: "Something is wrong with the call; `param` names the member at fault.",
    401: "Not a good key.",
    403: "The client may not call this model.",
    404: "Nobody serves this model.",
    429: "The client or the router has as much as it may; `retry-after` tells when there may be room.",
    502: "No worker answered well.",
    503: "No worker is there, or the router shuts down.",
    504: "The worker said nothing for too long.",
}
"""By status; the others need no words but their own."""

_TEXT: Final[Json] = {"type": ["string", "null"]}
_FLAG: Final[Json] = {"type": ["boolean", "null"]}
_IDS: Final[Json] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_PROMPTS: Final[Json] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}
_MODEL: Final[Json] = {"type": "string", "minLength": 1}
_ANY_MODEL: Final[Json] = {"type": ["string", "null"], "minLength": 1, "description": "Any, where it names none."}


def _count(least: int = 0) -> Json:
    return {"type": ["integer", "null"], "minimum": least, "maximum": int(TOO_LARGE) - 1}


def _object(required: Iterable[str] = (), **members: Json) -> Json:
    named: Json = {"type": "object", "properties": members}
    return {**named, "required": list(required)} if required else named


def _or_null(schema: Json) -> Json:
    return {**schema, "type": [schema["type"], "null"]}


class Body(NamedTuple):
    """What is sent to an endpoint."""

    summary: str
    schema: Json
    example: Json


_GENERATED: Final = {
    "model": _MODEL,
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
    "A chat",
    _object(
        ("model", "messages"),
        **_GENERATED,
        max_completion_tokens=_count(),
        messages={"type": "array", "minItems": 1, "items": {"type": "object"}},
    ),
    {"model": "m", "messages": [_TURN], "max_tokens": 8},
)
_COMPLETION: Final = Body(
    "A text, continued",
    _object(("model", "prompt"), **_GENERATED, prompt=_PROMPTS),
    {"model": "m", "prompt": "Hello", "max_tokens": 8},
)
_RESPONSE: Final = Body(
    "A response",
    _object(model=_ANY_MODEL, user=_TEXT, stream=_FLAG, max_output_tokens=_count()),
    {"model": "m", "input": "Hello", "max_output_tokens": 8},
)
_MESSAGE: Final = Body(
    "A message, as Anthropic's clients ask for it",
    _object(
        ("model",),
        model=_MODEL,
        stream=_FLAG,
        max_tokens=_count(),
        metadata=_or_null(_object(user_id=_TEXT)),
    ),
    {"model": "m", "messages": [_TURN], "max_tokens": 8},
)
_COUNTING: Final = Body("How many tokens a message takes", _PLAIN, {"model": "m", "messages": [_TURN]})
_EMBEDDING: Final = Body("What a model makes of texts whole", _PLAIN, {"model": "m", "input": ["Hello"]})
_RERANK: Final = Body(
    "Texts in the order in which they fit a query",
    _PLAIN,
    {"model": "m", "query": "Hello", "documents": ["Hello", "Bye"]},
)
_SCORE: Final = Body("How well texts fit each other", _PLAIN, {"model": "m", "text_1": "Hello", "text_2": ["Bye"]})
_TOKENIZE: Final = Body("The tokens of a text", _PLAIN, {"model": "m", "prompt": "Hello"})
_DETOKENIZE: Final = Body("The text of tokens", _PLAIN, {"model": "m", "tokens": [72, 105]})

_BODIES: Final[Mapping[str, Body]] = {
    chat.PATH: _CHAT,
    COMPLETIONS: _COMPLETION,
    responses.PATH: _RESPONSE,
    messages.PATH: _MESSAGE,
    messages.COUNT_PATH: _COUNTING,
    **dict.fromkeys(embeddings.PATHS, _EMBEDDING),
    **{path: _RERANK if path.endswith("rerank") else _SCORE for path in scoring.PATHS},
    **{path: _DETOKENIZE if path.endswith("detokenize") else _TOKENIZE for path in tokenizing.PATHS},
}

_KEY: Final[Json] = {"type": "http", "scheme": "bearer", "description": "A client's key, where clients have some."}
_SCHEMAS: Final[Mapping[str, Json]] = {
    "Error": {
        "description": "The router's, in the first of these shapes, or an engine's, which may have the second.",
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
    """The document of the control plane with the calls to models, and errors in the shape in which they are told."""
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
        "description": "Served by an engine: what it refuses comes with its own status and words.",
        "operationId": path.strip("/").replace("/", "_"),
        "security": [{"ClientKey": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The engine's answer.", "content": {**whole, **streamed}},
            **dict(_errors(CALL_ERRORS, path)),
        },
    }


def _control_operation(operation: Json) -> Json:
    """An operation of the control plane, without the 422 that FastAPI supposes."""
    own = {status: answer for status, answer in operation["responses"].items() if status != "422"}
    refused = {status: {**answer, **_error_content("")} for status, answer in own.items() if int(status) >= 400}
    kinds = (*COMMON_ERRORS, BodyTooLarge) if "requestBody" in operation else COMMON_ERRORS
    return {**operation, "responses": {**own, **dict(_errors(kinds, "")), **refused}}


def _errors(kinds: Iterable[type[RouterError]], path: str) -> Iterator[tuple[str, Json]]:
    for status in sorted({kind.status for kind in kinds}):
        description = STATUS_DESCRIPTIONS.get(status, f"{HTTPStatus(status).phrase}.")
        yield str(status), {"description": description, **_error_content(path)}


def _error_content(path: str) -> Json:
    """How errors are told at a path."""
    name = "AnthropicError" if error_shape_of(path) is messages.ANTHROPIC else "Error"
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}
