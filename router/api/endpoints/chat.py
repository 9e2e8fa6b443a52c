"""POST /v1/chat/completions."""

from typing import Final

from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.api.body.call import Call, Head, ResumeMode
from router.api.body.edits import additions, requested_usage
from router.api.body.fields import largest_id
from router.api.body.restrictions import chat_computed_anew_by, is_for_one_engine, resume_mode_of
from router.core.model.prompt_key import PromptHasher

PATH: Final = "/v1/chat/completions"


def parse_chat(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Parse the members that the router needs, and leave the others to the engine.

    `ids`: ask the engine for token ids if another engine could continue the answer by them. Raises BadRequest.
    """
    fields = read.load_fields(body)
    model = read.model_name(fields)
    choices = read.count(fields, "n", minimum=1) or 1
    user = read.text(fields, "user")
    streamed = read.flag(fields, "stream")
    ids_wanted, beam_search = read.flag(fields, "return_token_ids"), read.flag(fields, "use_beam_search")
    adapters = read.adapters(fields)
    messages = read.messages(fields)
    limit = read.output_limit(fields)
    session, largest = read.session_members(fields), largest_id(fields)
    computed_anew_by, whole = chat_computed_anew_by(fields), is_for_one_engine(fields, choices)
    mode = resume_mode_of(fields, streamed=streamed, answers=choices)
    prompt = hasher.prompt(render.head("chat", model, fields) + render.messages(messages))
    usage = requested_usage(fields)
    return Call(
        path=PATH,
        body=body,
        model=model,
        streamed=streamed,
        prompts=(prompt,),
        output_limit=None if limit is None else limit * choices,
        user=user,
        usage_wanted=usage.final,
        continuous_wanted=usage.in_chunks,
        choices=choices,
        resume_mode=mode,
        additions=additions(fields, usage, streamed=streamed, ids=ids and mode is ResumeMode.IDS and not ids_wanted),
        ids_wanted=ids_wanted,
        session=session,
        adapters=adapters,
        largest_id=largest,
        computed_anew_by=computed_anew_by,
        beam_search=beam_search,
        # With these members the answer repeats or continues the last message instead of adding one.
        extendable=not (fields.get("echo") or fields.get("continue_final_message")),
        whole=whole,
    )
