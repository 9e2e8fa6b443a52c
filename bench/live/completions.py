"""The wire of a call to `/v1/completions`, without the sockets: its body, and what the lines of its answer say."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from bench.workloads.parts.traffic import Call
from router.core.model.cost import Tokens

PATH: Final = "/v1/completions"


class AnswerFailed(Exception):
    """An answer that began well says that the call failed; the text is the server's."""


def body(
    model: str,
    user: str,
    call: Call,
    *,
    stream_interval: int | None = None,
    usage_in_events: bool = False,
    vocabulary: int | None = None,
) -> bytes:
    """The call in JSON: its prompt as token ids, an answer of exactly its length, and at its end the usage.

    `stream_interval`: tokens in each event of the answer after its first, where the server heeds it.
    `usage_in_events`: whether each event is to say how far the answer is. `vocabulary`: ids are taken modulo this, for
    a server that knows no others.
    """
    prompt = call.prompt.tokens
    fields: dict[str, object] = {
        "model": model,
        "user": user,
        "prompt": prompt if vocabulary is None else [token % vocabulary for token in prompt],
        "max_tokens": call.output_tokens,
        "ignore_eos": True,
    }
    if call.streamed:
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if usage_in_events else {})
        fields |= {"stream": True, "stream_options": options}
        if stream_interval is not None:
            fields["stream_interval"] = stream_interval
    return orjson.dumps(fields)


def event(line: bytes) -> dict[str, Any] | None:
    """The event in one line of an answer; None for a comment, for `[DONE]` and for an empty line.

    Raises AnswerFailed if it tells of a failure, ValueError if it is no JSON.
    """
    if not line.startswith(b"data: {"):
        return None
    found: dict[str, Any] = orjson.loads(line[6:])
    if "error" in found:
        raise AnswerFailed(str(found["error"]))
    return found


def tokens(usage: Mapping[str, Any]) -> Tokens:
    """What the usage says; where it does not say what was cached, nothing was."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Tokens(usage["prompt_tokens"] - cached, cached, usage["completion_tokens"])
