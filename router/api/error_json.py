"""Errors as OpenAI clients read them."""

import orjson

from router.errors import RouterError


def error_body(error: RouterError) -> bytes:
    """The body of an error response."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return orjson.dumps({"error": fields})


def error_event(error: RouterError) -> bytes:
    """The end of a stream that began well, in the shape that vLLM gives it."""
    return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"
