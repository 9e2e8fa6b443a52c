"""How a call names the data-parallel rank that serves it, by engine and path. Pure.

vLLM reads a header of chats and completions (`entrypoints/generate/base/serving.py`); SGLang a header of chats
(`entrypoints/request_headers.py`) and a field of the body of completions. At all other paths the engine chooses the
rank itself.
"""

from collections.abc import Collection, Mapping
from typing import Final

import orjson

from router.api.body.call import COMPLETIONS
from router.api.body.json_edit import insert_members
from router.api.endpoints.chat import PATH as CHAT

HEADERS: Final[Mapping[tuple[str, str], str]] = {
    ("vllm", CHAT): "x-data-parallel-rank",
    ("vllm", COMPLETIONS): "x-data-parallel-rank",
    ("sglang", CHAT): "x-override-routed-dp-rank",
}
"""By engine and path."""
FIELDS: Final[Mapping[tuple[str, str], str]] = {("sglang", COMPLETIONS): "routed_dp_rank"}
"""The same, for what the engine reads from the body."""


def can_name_rank(path: str, engines: Collection[str]) -> bool:
    """Return whether calls to a path can name a rank of each of these engines."""
    return all((engine, path) in HEADERS or (engine, path) in FIELDS for engine in engines)


def rank_header(engine: str, path: str, rank: int | None) -> dict[str, str]:
    """Return the header that names a rank; none if there is no rank, or it is named in the body or not at all."""
    header = None if rank is None else HEADERS.get((engine, path))
    return {} if header is None else {header: str(rank)}


def with_rank(body: bytes, engine: str, path: str, rank: int | None) -> bytes:
    """Return a body, which names no rank, with the field that names this one, if the engine reads it there."""
    field = None if rank is None else FIELDS.get((engine, path))
    return body if field is None else insert_members(body, {field: orjson.dumps(rank)})
