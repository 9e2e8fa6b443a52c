"""Which answers another engine can go on with, by what their calls ask for."""

from typing import Final

from router.api.body.call import ResumeMode
from router.api.body.fields import Fields, objects

NOT_RESUMABLE: Final = frozenset(
    {
        *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "use_beam_search", "kv_transfer_params"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
        *("structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"),
        *("functions", "return_hidden_states", "audio", "modalities"),
    }
)
"""Members by which an answer is more than its text, or depends on more than that: a grammar would begin anew."""


def resume_mode_of(fields: Fields, *, streamed: bool, answers: int) -> ResumeMode:
    """How a stream of this call may be gone on with; `answers`: over all prompts."""
    if not streamed or answers != 1 or (fields.get("best_of") or 1) != 1:
        return ResumeMode.NONE
    if any(map(fields.get, NOT_RESUMABLE.intersection(fields))):
        return ResumeMode.NONE
    form = fields.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        return ResumeMode.NONE
    tools = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    if tools and fields.get("tool_choice") not in (None, "auto"):
        return ResumeMode.NONE
    # An engine holds back text that may be the beginning of a stop string, parses tool calls out of the text, and
    # cannot see images in ids.
    if tools or fields.get("stop") or not _is_text(fields.get("messages")):
        return ResumeMode.TEXT
    return ResumeMode.IDS


def _is_text(messages: object) -> bool:
    """Whether these messages have no images or other files."""
    for message in objects(messages):
        content = message.get("content")
        if not isinstance(content, str) and any(part.get("type", "text") != "text" for part in objects(content)):
            return False
    return True
