"""POST /v1/rerank and /v1/score, which pair a query with each of several texts."""

from typing import Final

from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.api.body.call import Call, Head
from router.api.body.fields import Fields
from router.api.endpoints.plain import plain_call
from router.core.model.prompt_key import Prompt, PromptHasher, unmatched

PATHS: Final = ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score")
SIDES: Final = (
    ("query", "documents"),
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("query", "items"),
)
"""The names that engines use for the two sides of the pairs."""
MAX_KEYED_PAIRS: Final = 256
"""Pairs at most that are each matched against the caches. A call with more pairs counts as uncached."""
MAX_KEYED_BYTES: Final = 2 * 2**20
"""Bytes of all pairs at most that are matched. A query counts once per pair."""


def parse_scoring(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Parse a call with one prompt per pair, the query first, as in scoring templates. Raises BadRequest."""
    fields = read.load_fields(body)
    before = render.head("score", read.model_name(fields), fields)
    pairs = _pairs(fields)
    prompts: tuple[Prompt, ...]
    if 0 < sum(len(before) + len(query) + len(text) for query, text in pairs) <= MAX_KEYED_BYTES:
        prompts = tuple(hasher.prompt(b"".join([before, query, text])) for query, text in pairs)
    else:
        prompts = (unmatched(len(body) // 4),)
    return plain_call(head, body, fields, prompts, 0, user=read.text(fields, "user"))


def _pairs(fields: Fields) -> list[tuple[bytes, bytes]]:
    """Pair one query with each text, or the queries and texts by position. Empty if there are too many pairs.

    Invalid input is not reported: the engine validates it.
    """
    names = next((names for names in SIDES if all(name in fields for name in names)), None)
    if names is None:
        return []
    ones, others = (side if isinstance(side := fields[name], list) else [side] for name in names)
    pairs = len(others) if len(ones) == 1 else min(len(ones), len(others))
    if pairs > MAX_KEYED_PAIRS:
        return []
    queries, texts = _texts(ones[:pairs]), _texts(others[:pairs])
    return list(zip(queries * pairs if len(ones) == 1 else queries, texts, strict=False))


def _texts(side: list[object]) -> list[bytes]:
    """Render each item of one side: texts, or objects with a text."""
    return [render.messages([{"content": part}]) for part in side]
