"""Prompts that come as plain texts or as token ids, one or several."""

import struct
from collections.abc import Callable
from typing import Any, Final

from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.core.model.prompt_key import Prompt, PromptHasher
from router.errors import BadRequest

MAX_PROMPTS: Final = 1024
"""Prompts of one call: the scheduler looks for each by itself, and all in one go."""
HEADS_LIMIT: Final = 256 * 1024
"""Bytes that stand before all prompts of a call together and are each hashed."""


def prompts_of(value: object, name: str, head: Callable[[str], bytes], hasher: PromptHasher) -> tuple[Prompt, ...]:
    """The prompts in the member `name`, whose value this is; `head` of "text" or "tokens" stands before each.

    Raises BadRequest.
    """
    if value is None:
        raise BadRequest(f"You must provide {_a(name)}.", param=name, code="missing_required_parameter")
    if value == []:
        raise BadRequest(f"`{name}` must not be empty.", param=name, code="invalid_value")
    several = isinstance(value, list) and isinstance(value[0], str | list)
    each: list[Any] = value if isinstance(value, list) and several else [value]
    if len(each) > MAX_PROMPTS:
        raise BadRequest(f"`{name}` must not have more than {MAX_PROMPTS} items.", param=name, code="invalid_value")
    if all(isinstance(one, str) for one in each):
        before = _before(head("text"), len(each))
        return tuple(hasher.prompt(before + one.encode()) for one in each)
    if all(isinstance(one, list) for one in each):
        before = _before(head("tokens"), len(each))
        return tuple(hasher.prompt(before + _token_bytes(one, name), tokens=len(one)) for one in each)
    raise _wrong(name)


def _before(head: bytes, prompts: int) -> bytes:
    """What each of so many prompts begins with; for a head that is long it is as good to know that it is the same."""
    if len(head) * prompts > HEADS_LIMIT:
        head = render.PROMPT + render.digest(head)
    return head + render.TEXT


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _token_bytes(ids: list[object], name: str) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        raise _wrong(name) from None


def _wrong(name: str) -> BadRequest:
    return read.wrong_type(name, "a string, a list of strings, a list of token ids or a list of those")
