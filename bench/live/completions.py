"""The format of a call to `/v1/completions`, without sockets: its body, and the lines of its answer."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from bench.workloads.parts.traffic import Call
from router.core.model.cost import Tokens

PATH: Final = "/v1/completions"


class AnswerFailed(Exception):
    """An answer with status 200 reports that the call failed; the text is the server's."""


def body(
    model: str,
    user: str,
    call: Call,
    *,
    stream_interval: int | None = None,
    usage_in_events: bool = False,
    vocabulary: int | None = None,
) -> bytes:
    """Return a call as JSON: a prompt of token ids, an answer of an exact length, and the usage at its end.

    `stream_interval`: tokens per event after the first, if the server supports it. `usage_in_events`: whether each
    event reports the usage so far. `vocabulary`: ids are taken modulo this, for a server with a smaller vocabulary.
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
    """Return the event in one line of an answer; None for a comment, `[DONE]` or an empty line.

    Raises AnswerFailed if the event reports a failure, ValueError if it is not JSON.
    """
    if not line.startswith(b"data: {"):
        return None
    found: dict[str, Any] = orjson.loads(line[6:])
    if "error" in found:
        raise AnswerFailed(str(found["error"]))
    return found


def tokens(usage: Mapping[str, Any]) -> Tokens:
    """Return the tokens of a usage; if it does not report cached tokens, none count as cached."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Tokens(usage["prompt_tokens"] - cached, cached, usage["completion_tokens"])
