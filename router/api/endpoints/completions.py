"""POST /v1/completions."""

from typing import Final

from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.api.body.call import COMPLETIONS, Call, Head, ResumeMode
from router.api.body.edits import additions, requested_usage
from router.api.body.fields import Fields, largest_id
from router.api.body.prompts import prompts_of
from router.api.body.restrictions import completion_computed_anew_by, is_for_one_engine, resume_mode_of
from router.core.model.prompt_key import Prompt, PromptHasher, unmatched

DEFAULT_MAX_TOKENS: Final = 16
"""The limit of both engines for a call without one."""


def parse_completion(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Parse the members that the router needs, and leave the others to the engine.

    `ids`: ask the engine for token ids if another engine could continue the answer by them. Raises BadRequest.
    """
    fields = read.load_fields(body)
    model = read.model_name(fields)
    choices = read.count(fields, "n", minimum=1) or 1
    limit = read.count(fields, "max_tokens") if "max_tokens" in fields else DEFAULT_MAX_TOKENS
    user = read.text(fields, "user")
    streamed = read.flag(fields, "stream")
    usage = requested_usage(fields)
    prompts = _prompts(body, fields, model, hasher)
    mode = resume_mode_of(fields, streamed=streamed, answers=choices * len(prompts))
    ids_wanted = read.flag(fields, "return_token_ids")
    return Call(
        path=COMPLETIONS,
        body=body,
        model=model,
        streamed=streamed,
        prompts=prompts,
        output_limit=None if limit is None else limit * choices * len(prompts),
        user=user,
        usage_wanted=usage.final,
        continuous_wanted=usage.in_chunks,
        choices=choices,
        resume_mode=mode,
        additions=additions(fields, usage, streamed=streamed, ids=ids and mode is ResumeMode.IDS and not ids_wanted),
        ids_wanted=ids_wanted,
        session=read.session_members(fields),
        adapters=read.adapters(fields),
        largest_id=largest_id(fields),
        computed_anew_by=completion_computed_anew_by(fields),
        beam_search=read.flag(fields, "use_beam_search"),
        # The answer is text, so it cannot extend token ids; nor can it with the prompt echoed or a suffix after it.
        extendable=prompts[0].key.tokens is None and not (fields.get("echo") or fields.get("suffix")),
        whole=is_for_one_engine(fields, choices * len(prompts)),
    )


def _prompts(body: bytes, fields: Fields, model: str, hasher: PromptHasher) -> tuple[Prompt, ...]:
    """Return the prompts of a body. If there is none, an engine refuses the call, or takes embeddings in its place.

    Raises BadRequest.
    """
    prompt = fields.get("prompt")
    if prompt is None or prompt == []:
        return (unmatched(len(body) // 4),)
    return prompts_of(prompt, "prompt", lambda kind: render.head(kind, model, fields), hasher)
