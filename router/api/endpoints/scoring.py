"""POST /v1/rerank and /v1/score: a query beside each of several texts."""

from typing import Final

from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.api.body.call import Call, Head
from router.api.body.fields import Fields
from router.api.endpoints.plain import model_or_any, plain_call
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
"""What engines call the one side and the other."""
MAX_KEYED_PAIRS: Final = 256
"""Pairs that are each looked for in the caches; more are taken for new."""
MAX_KEYED_BYTES: Final = 2 * 2**20
"""Of all pairs together, likewise: a long query counts in each."""


def parse_scoring(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """One prompt per pair, the query first, as templates for scoring have it. Raises BadRequest."""
    fields = read.load_fields(body)
    before = render.head("score", model_or_any(fields), fields)
    pairs = _pairs(fields)
    prompts: tuple[Prompt, ...]
    if 0 < sum(len(before) + len(query) + len(text) for query, text in pairs) <= MAX_KEYED_BYTES:
        prompts = tuple(hasher.prompt(b"".join([before, query, text])) for query, text in pairs)
    else:
        prompts = (unmatched(len(body) // 4),)
    return plain_call(head, body, fields, prompts, 0, user=read.text(fields, "user"))


def _pairs(fields: Fields) -> list[tuple[bytes, bytes]]:
    """One with each of many, or the first with the first and so on; none where there are too many.

    What is wrong with them, the engine knows.
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
    """Texts, or objects that have one, each as it is rendered."""
    return [render.messages([{"content": part}]) for part in side]
