"""Calls with a JSON body that nothing is added to, and whole answers of which only the usage is of interest."""

import re
from typing import Any, Final

from router.api.answer.stream_reader import Answer, read_error
from router.api.answer.usage import whole_usage
from router.api.body import cache_reading
from router.api.body import fields as read
from router.api.body.call import Call, Head
from router.api.body.checks import largest_id
from router.api.body.error_bodies import load
from router.api.body.fields import Fields
from router.core.model.prompt_key import Prompt
from router.core.model.request import Usage

PARSED_AT_ONCE: Final = 64 * 1024
"""Bytes of an answer that is parsed in full; of a longer one, as many embeddings are, the usage is looked for."""
_LAST_USAGE: Final = re.compile(rb'"usage"\s*+:\s*+(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})[^{}"]*+(?:"[^{}]*+)?\}\s*+')


def model_or_any(fields: Fields) -> str:
    """The model that a body names; empty where it names none."""
    return read.model_name(fields) if fields.get("model") is not None else ""


def plain_call(
    head: Head,
    body: bytes,
    fields: Fields,
    prompts: tuple[Prompt, ...],
    output: int | None,
    *,
    user: str | None,
    streamed: bool = False,
    extendable: bool = True,
    computed_anew_by: frozenset[str] = cache_reading.NO_ENGINE,
) -> Call:
    """A call that is forwarded as it came. `output`: the most output tokens; None without a limit.

    Its answer comes whole unless `streamed`: of most such calls engines pass over a `stream`.
    """
    return Call(
        path=head.path,
        body=body,
        model=model_or_any(fields),
        streamed=streamed,
        prompts=prompts,
        output_limit=output,
        user=user,
        usage_wanted=True,
        continuous_wanted=True,
        extendable=extendable,
        adapters=read.adapters(fields),
        largest_id=largest_id(fields),
        computed_anew_by=computed_anew_by,
    )


def read_plain(call: Call, body: bytes) -> Answer:  # noqa: ARG001 - as all readers
    """What an answer tells of its usage; it may be anything."""
    fields = answer_fields(body)
    return Answer(whole_usage(fields), (), read_error(fields), False)


def answer_fields(body: bytes) -> dict[str, Any]:
    """The members of an answer; of a long one its usage alone, where that is the last object in it."""
    if len(body) <= PARSED_AT_ONCE:
        return load(body) or {}
    usage = usage_near_end(body)
    return {} if usage is None else {"usage": usage}


def usage_near_end(body: bytes) -> dict[str, Any] | None:
    """The usage of an answer, of which this is the end, where it is the last object in it."""
    start = body.rfind(b'"usage"', max(0, len(body) - PARSED_AT_ONCE))
    found = _LAST_USAGE.fullmatch(body, start) if start >= 0 else None
    return None if found is None else load(found[1])


def tail_usage(tail: bytes) -> Usage | None:
    """What an answer used, of which only the end is known; None where that does not tell."""
    usage = usage_near_end(tail)
    return None if usage is None else whole_usage({"usage": usage})
