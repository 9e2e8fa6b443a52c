"""Calling a model by another name: the one change that is made to what a client sent."""

import orjson

from router.api.call import Head
from router.api.json_span import replace_member
from router.api.multipart import is_form, replace_field


def rename(head: Head, body: bytes, model: str) -> bytes:
    """`body`, which names a model, with this one instead."""
    if is_form(head.content_type):
        return replace_field(body, head.content_type, "model", model)
    return replace_member(body, "model", orjson.dumps(model))
