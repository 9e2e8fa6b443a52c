"""How a call names the data-parallel rank that serves it, by engine and path. Pure.

Read in vLLM 0.32.0 (`entrypoints/generate/base/serving.py`: a header, also of messages, which it answers as chats) and
SGLang 0.5.23 (`entrypoints/openai/protocol.py`: a field of the body; of messages, which it answers as chats, a header).
At all other paths the engine chooses the rank itself.
"""

from collections.abc import Collection, Mapping
from typing import Final

import orjson

from router.api.body.call import COMPLETIONS
from router.api.body.json_object import insert_members
from router.api.endpoints.chat import PATH as CHAT
from router.api.endpoints.messages import PATH as MESSAGES
from router.api.endpoints.responses import PATH as RESPONSES

HEADER: Final = "x-data-parallel-rank"
FIELD: Final = "routed_dp_rank"
HEADER_PATHS: Final[Mapping[str, frozenset[str]]] = {
    "vllm": frozenset({CHAT, COMPLETIONS, MESSAGES}),
    "sglang": frozenset({MESSAGES}),
}
"""Where the rank is named in a header, by engine."""
FIELD_PATHS: Final[Mapping[str, frozenset[str]]] = {"sglang": frozenset({CHAT, COMPLETIONS, RESPONSES})}
"""Where it is named in the body."""


def can_name_rank(path: str, engines: Collection[str]) -> bool:
    """Return whether calls to a path can name a rank of each of these engines."""
    return all(path in HEADER_PATHS.get(each, ()) or path in FIELD_PATHS.get(each, ()) for each in engines)


def rank_header(engine: str, path: str, rank: int) -> dict[str, str]:
    """Return the header that names a rank; none if it is named in the body, or not at all."""
    return {HEADER: str(rank)} if path in HEADER_PATHS.get(engine, ()) else {}


def with_rank(body: bytes, engine: str, path: str, rank: int | None) -> bytes:
    """Return a body, which names no rank, with the field that names this one, if the engine reads it there."""
    if rank is None or path not in FIELD_PATHS.get(engine, ()):
        return body
    return insert_members(body, {FIELD: orjson.dumps(rank)})
