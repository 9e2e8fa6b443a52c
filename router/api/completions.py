"""POST /v1/completions."""

import struct
from typing import Final

from router.api import fields as read
from router.api import render
from router.api.call import Call, Way, ask_for_ids, ask_for_usage
from router.api.fields import Fields
from router.api.ways import way_of
from router.core.prompt_key import Prompt, PromptHasher
from router.errors import BadRequest

PATH: Final = "/v1/completions"
DEFAULT_MAX_TOKENS: Final = 16
"""What both engines assume for a call that names no limit."""


def parse_completion(body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:
    """Check what the router needs to know and leave the rest to the engine.

    `ids`: ask for those of the tokens where another engine could go on by them. Raises BadRequest.
    """
    fields = read.load_fields(body)
    model = read.model_name(fields)
    choices = read.count(fields, "n", least=1) or 1
    limit = read.count(fields, "max_tokens") if "max_tokens" in fields else DEFAULT_MAX_TOKENS
    user = read.text(fields, "user")
    streamed = read.flag(fields, "stream")
    usage = ask_for_usage(body, fields, streamed)
    prompts = _prompts(fields, model, hasher)
    way = way_of(fields, streamed=streamed, answers=choices * len(prompts))
    ids_wanted = read.flag(fields, "return_token_ids")
    ids_asked = ids and way is Way.IDS and not ids_wanted
    return Call(
        path=PATH,
        body=ask_for_ids(usage.body, fields) if ids_asked else usage.body,
        model=model,
        streamed=streamed,
        prompts=prompts,
        output_limit=None if limit is None else limit * choices * len(prompts),
        user=user,
        usage_wanted=usage.final,
        continuous_wanted=usage.continuous,
        choices=choices,
        way=way,
        ids_asked=ids_asked,
        ids_wanted=ids_wanted,
        # The answer comes as text: after token ids, or with the prompt before or a suffix behind it, it has no place.
        extendable=prompts[0].key.tokens is None and not (fields.get("echo") or fields.get("suffix")),
    )


def _prompts(fields: Fields, model: str, hasher: PromptHasher) -> tuple[Prompt, ...]:
    prompt = fields.get("prompt")
    if prompt is None:
        raise BadRequest("You must provide a prompt.", param="prompt", code="missing_required_parameter")
    if prompt == []:
        raise BadRequest("`prompt` must not be empty.", param="prompt", code="invalid_value")
    several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    each = prompt if several else [prompt]
    if all(isinstance(one, str) for one in each):
        head = render.head("text", model, fields) + render.TEXT
        return tuple(hasher.prompt(head + one.encode()) for one in each)
    if all(isinstance(one, list) for one in each):
        head = render.head("tokens", model, fields) + render.TEXT
        return tuple(hasher.prompt(head + _token_bytes(one), tokens=len(one)) for one in each)
    raise _wrong_prompt()


def _token_bytes(ids: list[object]) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        if all(isinstance(one, int) for one in ids):
            said = f"`prompt` has a token id outside 0 to {2**32 - 1}."
            raise BadRequest(said, param="prompt", code="invalid_value") from None
        raise _wrong_prompt() from None


def _wrong_prompt() -> BadRequest:
    return read.wrong_type("prompt", "a string, a list of strings, a list of token ids or a list of those")
