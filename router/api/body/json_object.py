"""What a worker answers in JSON, where nothing but an object is of use. Pure."""

from typing import Any

import orjson

from router.errors import WorkerBroke


def read_object(body: bytes) -> dict[str, Any]:
    """The members of an answer. Raises WorkerBroke where it is no JSON object."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise WorkerBroke("A worker's answer is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise WorkerBroke("A worker's answer is not a JSON object.")
    return fields
