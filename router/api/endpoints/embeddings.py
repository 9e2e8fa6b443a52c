"""POST /v1/embeddings, and the endpoints for pooling and classification."""

from functools import partial
from typing import Final

from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.api.body.call import Call, Head
from router.api.body.fields import Fields
from router.api.body.prompts import prompts_of
from router.api.body.restrictions import NO_ENGINE, pooling_computed_anew_by
from router.api.endpoints.plain import plain_call
from router.core.model.prompt_key import Prompt, PromptHasher, unmatched
from router.errors import BadRequest

POOLING: Final = ("/pooling", "/v1/pooling")
PATHS: Final = ("/v1/embeddings", *POOLING, "/classify", "/v1/classify")


def parse_embeddings(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Parse a call with one prompt per input, or one prompt for a chat. Raises BadRequest."""
    fields = read.load_fields(body)
    model = read.model_name(fields)
    recomputed_by = pooling_computed_anew_by(fields) if head.path in POOLING else NO_ENGINE
    prompts = _prompts(body, fields, model, hasher)
    return plain_call(head, body, fields, prompts, 0, user=read.text(fields, "user"), computed_anew_by=recomputed_by)


def _prompts(body: bytes, fields: Fields, model: str, hasher: PromptHasher) -> tuple[Prompt, ...]:
    """Return the prompts of a body. Input that is neither text nor tokens, such as images, counts as uncached.

    The engine validates such input.
    """
    messages = fields.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return (hasher.prompt(render.head("embed chat", model, fields) + render.messages(messages)),)
    try:
        head = partial(_head, model, fields)
        return prompts_of(fields.get("input"), "input", head, hasher)
    except BadRequest:
        return (unmatched(len(body) // 4),)


def _head(model: str, fields: Fields, kind: str) -> bytes:
    return render.head(f"embed {kind}", model, fields)
