"""Parses a worker's answer that must be a JSON object. Pure."""

from typing import Any

import orjson

from router.errors import WorkerBroke


def read_object(body: bytes) -> dict[str, Any]:
    """Parse an answer. Raises WorkerBroke unless it is a JSON object."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise WorkerBroke("A worker's answer is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise WorkerBroke("A worker's answer is not a JSON object.")
    return fields
