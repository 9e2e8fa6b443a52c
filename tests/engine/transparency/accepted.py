"""The differences that are meant, in the words of docs/operations.md ("What differs from an engine")."""

import json
from typing import Final

from ..wire import Answer, Json
from .calls import Probe
from .differences import Difference

REQUEST_ID: Final = "every answer has an `x-request-id`"
UNBUFFERED: Final = "a stream has `x-accel-buffering: no`"
CORS: Final = "CORS headers come by the router's setting"
OWN_WORDS: Final = "a call that the router refuses itself has the engine's status and the router's words"
SHAPE: Final = "an error without a message has OpenAI's shape, and one of `/v1/messages` Anthropic's"
OWN_PATHS: Final = "paths at which the router tells of itself"
CLOSED: Final = "paths that stay closed"
UNKNOWN_MODEL: Final = "a model that no worker lists is refused, also where SGLang would serve it as its own"
BYTE_ORDER_MARK: Final = "a byte order mark is removed, also where SGLang would refuse it"
NO_OBJECT: Final = "a body that is JSON but no object is refused with 400, also where SGLang fails with 500"
INVOCATIONS: Final = "`/invocations` serves completions, too, which SGLang refuses there"
PATHS_OF_THE_ROUTER: Final = (
    *("/health", "/ready", "/load", "/ping"),
    *("/v1/models/tiny", "/v1/models/nope", "/v1/models/"),
)
CLOSED_PATHS: Final = ("/inference/v1/generate", "/generate", "/api/chat", "/api/tags")
ANTHROPIC: Final = "/v1/messages"


def accepted(probe: Probe, difference: Difference, direct: Answer, routed: Answer) -> str | None:
    """Return the reason for a difference; None if there is none."""
    if difference.part.startswith("header "):
        return accepted_header(probe, difference.part.removeprefix("header "))
    if direct.status != routed.status or probe.path in PATHS_OF_THE_ROUTER:
        return accepted_status(probe, direct.status, routed.status)
    error = error_of(routed)
    if error is None:
        return None
    if "x-d2lpm-worker" not in routed.headers:
        return OWN_WORDS if error.get("type") in ("invalid_request_error", "not_found_error") else None
    return SHAPE if "detail" in fields_of(direct) or probe.path.startswith(ANTHROPIC) else None


def accepted_status(probe: Probe, direct: int, routed: int) -> str | None:
    """Return the reason for another status, or for another answer of the router's own; None if there is none."""
    if probe.path in PATHS_OF_THE_ROUTER:
        return OWN_PATHS
    if probe.path in CLOSED_PATHS and routed == 404:
        return CLOSED
    reasons = {
        ("chat: an unknown model", 200, 404): UNKNOWN_MODEL,
        ("chat: a list", 500, 400): NO_OBJECT,
        ("invocations: a text", 400, 200): INVOCATIONS,
    }
    if probe.name.endswith("a byte order mark") and (direct, routed) == (400, 200):
        return BYTE_ORDER_MARK
    return reasons.get((probe.name, direct, routed))


def accepted_header(probe: Probe, name: str) -> str | None:
    """Return the reason for a header that differs; None if there is none."""
    if name == "x-request-id":
        return REQUEST_ID
    if name == "x-accel-buffering":
        return UNBUFFERED
    if name == "vary" or name.startswith("access-control-"):
        return CORS
    return OWN_PATHS if probe.path in PATHS_OF_THE_ROUTER else None


def error_of(answer: Answer) -> Json | None:
    """Return the error object in an answer; None if there is none."""
    error = fields_of(answer).get("error")
    return error if isinstance(error, dict) else None


def fields_of(answer: Answer) -> Json:
    """Return the members of a JSON object; none for any other body."""
    try:
        fields = json.loads(answer.body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
