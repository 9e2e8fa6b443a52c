"""What an engine says that a call used, in full or choice by choice."""

from math import ceil
from typing import Any, Final

from router.api.body.error_bodies import load
from router.core.model.request import Usage

TOKEN_COUNT_LIMIT: Final = 2**53
"""No count is as large as this, and sums of counts can be written as JSON."""


def read_usage(value: object) -> Usage | None:
    """An OpenAI `usage` object; None where it is none or lacks its counts."""
    if not isinstance(value, dict):
        return None
    prompt, output = token_count(value, "prompt_tokens"), token_count(value, "completion_tokens")
    if prompt is None:
        return None
    details = value.get("prompt_tokens_details")
    cached = token_count(details, "cached_tokens") if isinstance(details, dict) else None
    return Usage(prompt, output or 0, cached)


def token_count(fields: dict[str, Any], name: str) -> int | None:
    """A member that counts tokens; None where it is none."""
    value = fields.get(name)
    return value if type(value) is int and 0 <= value < TOKEN_COUNT_LIMIT else None


class UsageTally:
    """Adds up the usage in the chunks of one stream.

    In chunks both engines count per choice: `completion_tokens` of this choice so far, `prompt_tokens` of its prompt.
    """

    __slots__ = ("_choices", "_deferred", "_latest", "_tokens", "final")

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._tokens: dict[int, int] = {}
        self._latest: dict[int, dict[str, Any]] = {}
        self._deferred: tuple[bytes, bool] | None = None
        self.final: Usage | None = None
        """The sum that the engine sent at the end; it overrules the chunks."""

    def add_chunk(self, index: int, usage: object, has_output: bool) -> None:
        """Count a chunk of choice `index`; without usage a chunk with output is taken for one token."""
        self._read()
        if isinstance(usage, dict) and (tokens := token_count(usage, "completion_tokens")) is not None:
            self._tokens[index] = tokens
            self._latest[index] = usage
        elif has_output:
            self._tokens[index] = self._tokens.get(index, 0) + 1

    def defer_chunk(self, usage: bytes, has_output: bool) -> None:
        """The same of choice 0 and usage as JSON; it is read once that is of use, which the final usage may prevent."""
        self._read()
        self._deferred = usage, has_output

    def _read(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None and (usage := load(deferred[0])) is not None:
            self.add_chunk(0, usage, deferred[1])

    @property
    def output_tokens(self) -> int:
        if self.final:
            return self.final.output_tokens
        self._read()
        return sum(self._tokens.values())

    @property
    def usage(self) -> Usage | None:
        """The final usage, else what the chunks tell; cached tokens only where they tell them."""
        if self.final:
            return self.final
        self._read()
        by_prompt = {index // self._choices: read_usage(latest) for index, latest in self._latest.items()}
        known = [usage for usage in by_prompt.values() if usage]
        if not known:
            return None
        cached = [usage.cached_tokens for usage in known if usage.cached_tokens is not None]
        return Usage(sum(usage.input_tokens for usage in known), self.output_tokens, sum(cached) if cached else None)


AUDIO_TOKENS_PER_SECOND: Final = 50
"""What a second of audio counts for where an engine tells its length alone: as many as Whisper's encoder makes."""


def whole_usage(answer: dict[str, Any]) -> Usage | None:
    """What a whole answer of any endpoint says that it used, whichever of the usual shapes it says it in.

    OpenAI's (`prompt_tokens`, or `input_tokens` with its details), Anthropic's (`input_tokens` without what was found
    in the cache or put there), `total_tokens` alone, seconds of audio, and Cohere's `meta`.
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
    given = token_count(usage, "input_tokens")
    if given is None:
        return None
    details = usage.get("input_tokens_details")
    cached = token_count(details, "cached_tokens") if isinstance(details, dict) else None
    found, stored = token_count(usage, "cache_read_input_tokens"), token_count(usage, "cache_creation_input_tokens")
    if found is not None or stored is not None:
        given += (found or 0) + (stored or 0)
        cached = found
    return Usage(given, token_count(usage, "output_tokens") or 0, cached)


def _by_total(usage: dict[str, Any]) -> Usage | None:
    total = token_count(usage, "total_tokens")
    if total is not None:
        return Usage(total, 0)
    seconds = usage.get("seconds")
    if usage.get("type") != "duration" or not isinstance(seconds, int | float) or not 0 <= seconds < 10**7:
        return None
    return Usage(ceil(seconds * AUDIO_TOKENS_PER_SECOND), 0)
