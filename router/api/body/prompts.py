"""Reads prompts given as plain texts or as token ids, one or several per call."""

import struct
from collections.abc import Callable
from typing import Any, Final

from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.core.model.prompt_key import Prompt, PromptHasher
from router.errors import BadRequest

MAX_PROMPTS: Final = 1024
"""Prompts per call at most, as the scheduler matches each of them against the caches in one step."""
HEADS_LIMIT: Final = 256 * 1024
"""Bytes of heads at most, over all prompts of a call, that are hashed in full."""


def prompts_of(value: object, name: str, head: Callable[[str], bytes], hasher: PromptHasher) -> tuple[Prompt, ...]:
    """Read the prompts in `value`, that of the member `name`. `head` renders the head for the kind "text" or "tokens".

    Raises BadRequest.
    """
    if value is None:
        raise BadRequest(f"You must provide {_with_article(name)}.", param=name, code="missing_required_parameter")
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
    """Return the bytes before each prompt. If the heads would be too long in all, a digest replaces the head."""
    if len(head) * prompts > HEADS_LIMIT:
        head = render.PROMPT + render.digest(head)
    return head + render.TEXT


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _token_bytes(ids: list[object], name: str) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        raise _wrong(name) from None


def _wrong(name: str) -> BadRequest:
    return read.wrong_type(name, "a string, a list of strings, a list of token ids or a list of lists of token ids")
