"""Calling a model by another name: what a client sent, with the name that workers know."""

import orjson

from router.api.body.json_edit import replace_member
from router.api.body.multipart import is_form, replace_field


def rename(body: bytes, content_type: str, model: str) -> bytes:
    """`body`, which names a model, with this one instead. `content_type`: as it was read, see `Call.content_type`."""
    if is_form(content_type):
        return replace_field(body, content_type, "model", model)
    return replace_member(body, "model", orjson.dumps(model))
