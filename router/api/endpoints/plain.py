"""For calls whose JSON body is forwarded unchanged, and for answers of which the router reads only the usage."""

import re
from typing import Any, Final

from router.api.answer.stream_reader import Answer, read_error
from router.api.answer.usage import whole_usage
from router.api.body import fields as read
from router.api.body.call import Call, Head
from router.api.body.fields import Fields, largest_id
from router.api.body.json_object import load
from router.api.body.restrictions import NO_ENGINE
from router.core.model.prompt_key import Prompt
from router.core.model.request import Usage

PARSED_AT_ONCE: Final = 64 * 1024
"""Bytes of an answer parsed in full at most. In a longer one, such as many embeddings, only the usage is searched."""
_LAST_USAGE: Final = re.compile(rb'"usage"\s*+:\s*+(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})[^{}"]*+(?:"[^{}]*+)?\}\s*+')


def plain_call(
    head: Head,
    body: bytes,
    fields: Fields,
    prompts: tuple[Prompt, ...],
    output_limit: int | None,
    *,
    user: str | None,
    streamed: bool = False,
    extendable: bool = True,
    computed_anew_by: frozenset[str] = NO_ENGINE,
) -> Call:
    """Make a call that is forwarded unchanged. `output_limit`: output tokens at most; None without a limit.

    The default for `streamed` is False even if the body has a `stream`, which engines ignore in most such calls.
    """
    return Call(
        path=head.path,
        body=body,
        model=read.model_name(fields),
        streamed=streamed,
        prompts=prompts,
        output_limit=output_limit,
        user=user,
        usage_wanted=True,
        continuous_wanted=True,
        extendable=extendable,
        session=read.session_members(fields),
        adapters=read.adapters(fields),
        largest_id=largest_id(fields),
        computed_anew_by=computed_anew_by,
    )


def read_plain(call: Call, body: bytes) -> Answer:  # noqa: ARG001 - the signature of all readers
    """Read the usage and the error of an answer, which may be anything."""
    fields = answer_fields(body)
    return Answer(whole_usage(fields), (), read_error(fields), False)


def answer_fields(body: bytes) -> dict[str, Any]:
    """Return the members of an answer. Of a long answer, only its usage, if that is its last object."""
    if len(body) <= PARSED_AT_ONCE:
        return load(body) or {}
    usage = usage_near_end(body)
    return {} if usage is None else {"usage": usage}


def usage_near_end(body: bytes) -> dict[str, Any] | None:
    """Return the usage in the end of an answer; None unless it is the last object there."""
    start = body.rfind(b'"usage"', max(0, len(body) - PARSED_AT_ONCE))
    found = _LAST_USAGE.fullmatch(body, start) if start >= 0 else None
    return None if found is None else load(found[1])


def tail_usage(tail: bytes) -> Usage | None:
    """Return the usage of an answer of which only the end is known; None if it cannot be found."""
    usage = usage_near_end(tail)
    return None if usage is None else whole_usage({"usage": usage})
