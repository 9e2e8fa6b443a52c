"""The names of OpenTelemetry's semantic conventions, and of the router's own attributes.

GenAI: github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai (in development); the other names are stable.
"""

from collections.abc import Mapping
from typing import Final

from router.api.body.call import COMPLETIONS
from router.api.endpoints import embeddings, messages, responses
from router.api.endpoints.chat import PATH as CHAT
from router.api.families import FAMILIES, INFO
from router.channel.messages import WorkerCard
from router.core.model.request import Usage

ERROR_TYPE: Final = "error.type"
STATUS: Final = "http.response.status_code"
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
MODEL: Final = "gen_ai.request.model"
FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
TOKEN_TYPE: Final = "gen_ai.token.type"

OWN: Final = "d2lpm."
"""What the names of the router's own attributes begin with."""
NO_ENGINE: Final = "d2lpm"
"""The provider of a call that no engine was sent, or one of unknown kind."""
OTHER_OPERATION: Final = "other"
"""The operation of paths that the router passes on without knowing them."""
OPERATIONS: Final[Mapping[str, str]] = {
    CHAT: "chat",
    COMPLETIONS: "text_completion",
    responses.PATH: "chat",
    messages.PATH: "chat",
    **dict.fromkeys(embeddings.PATHS, "embeddings"),
}
"""The operations that the conventions name, by path."""


def route_of(path: str) -> str | None:
    """Return the path if the router knows it; None for one that may be of any kind, so that names stay few."""
    bare = path.rstrip("/")
    return bare if bare in FAMILIES or bare in INFO else None


def operation_of(route: str | None) -> str:
    """Return the operation of a route; where the conventions name none, it is the last part of the path."""
    return OTHER_OPERATION if route is None else OPERATIONS.get(route) or route.rpartition("/")[2]


def provider_of(card: WorkerCard | None) -> str:
    """Return the provider of a worker's answers: the kind of its engine."""
    return NO_ENGINE if card is None or not card.engine else card.engine


def usage_attributes(usage: Usage) -> dict[str, int]:
    """Return the attributes for tokens by the engine's count."""
    attributes = {"gen_ai.usage.input_tokens": usage.input_tokens, "gen_ai.usage.output_tokens": usage.output_tokens}
    if usage.cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return attributes
