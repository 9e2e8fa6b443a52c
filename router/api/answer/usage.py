"""Reads the usage that an engine reports."""

from math import ceil
from typing import Any, Final

from router.core.model.request import Usage

TOKEN_COUNT_LIMIT: Final = 2**53
"""Token counts from here on are rejected, so that sums of counts can be written as JSON."""


def read_usage(value: object) -> Usage | None:
    """Read an OpenAI `usage` object. None if the value is not an object or has no prompt count."""
    if not isinstance(value, dict):
        return None
    prompt, output = token_count(value, "prompt_tokens"), token_count(value, "completion_tokens")
    if prompt is None:
        return None
    details = value.get("prompt_tokens_details")
    cached = token_count(details, "cached_tokens") if isinstance(details, dict) else None
    return Usage(prompt, output or 0, cached)


def token_count(fields: dict[str, Any], name: str) -> int | None:
    """Read a member that counts tokens. None unless it is a valid count."""
    value = fields.get(name)
    return value if type(value) is int and 0 <= value < TOKEN_COUNT_LIMIT else None


AUDIO_TOKENS_PER_SECOND: Final = 50
"""Tokens charged per second of audio if an engine reports only its length. Whisper's encoder makes as many."""


def whole_usage(answer: dict[str, Any]) -> Usage | None:
    """Read the usage in a whole answer of any endpoint. None if it has none in a known shape.

    Known shapes: OpenAI's (`prompt_tokens`, or `input_tokens` with details), Anthropic's (`input_tokens` excludes
    tokens read from the cache and tokens written to it), `total_tokens` alone, seconds of audio, and Cohere's `meta`.
    """
    usage, nested = answer.get("usage"), answer.get("response")
    if not isinstance(usage, dict) and isinstance(nested, dict):
        answer, usage = nested, nested.get("usage")
    if not isinstance(usage, dict):
        meta = answer.get("meta")
        usage = meta.get("tokens") or meta.get("billed_units") if isinstance(meta, dict) else None
    if not isinstance(usage, dict):
        return None
    return read_usage(usage) or _by_input(usage) or _by_total(usage)


def _by_input(usage: dict[str, Any]) -> Usage | None:
    input_tokens = token_count(usage, "input_tokens")
    if input_tokens is None:
        return None
    details = usage.get("input_tokens_details")
    cached = token_count(details, "cached_tokens") if isinstance(details, dict) else None
    cache_read = token_count(usage, "cache_read_input_tokens")
    cache_written = token_count(usage, "cache_creation_input_tokens")
    if cache_read is not None or cache_written is not None:
        input_tokens += (cache_read or 0) + (cache_written or 0)
        cached = cache_read
    return Usage(input_tokens, token_count(usage, "output_tokens") or 0, cached)


def _by_total(usage: dict[str, Any]) -> Usage | None:
    total = token_count(usage, "total_tokens")
    if total is not None:
        return Usage(total, 0)
    seconds = usage.get("seconds")
    if usage.get("type") != "duration" or not isinstance(seconds, int | float) or not 0 <= seconds < 10**7:
        return None
    return Usage(ceil(seconds * AUDIO_TOKENS_PER_SECOND), 0)
