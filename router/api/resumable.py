"""Decides by a call's body whether, and how, another engine can continue its answer."""

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
"""Members by which an answer is more than its text, or depends on more than it: a grammar would start over."""


def resume_mode_of(fields: Fields, *, streamed: bool, answers: int) -> ResumeMode:
    """How another engine can continue the stream of a call. `answers`: number of answers over all prompts."""
    if not streamed or answers != 1 or (fields.get("best_of") or 1) != 1:
        return ResumeMode.NONE
    if any(map(fields.get, NOT_RESUMABLE.intersection(fields))):
        return ResumeMode.NONE
    response_format = fields.get("response_format")
    if response_format is not None and not (
        isinstance(response_format, dict) and response_format.get("type") == "text"
    ):
        return ResumeMode.NONE
    tools = bool(fields.get("tools")) and fields.get("tool_choice") != "none"
    if tools and fields.get("tool_choice") not in (None, "auto"):
        return ResumeMode.NONE
    # Ids do not suffice in these cases: an engine holds back text that may begin a stop string, parses tool calls out
    # of the text, and cannot restore images from ids.
    if tools or fields.get("stop") or not _is_text(fields.get("messages")):
        return ResumeMode.TEXT
    return ResumeMode.IDS


def _is_text(messages: object) -> bool:
    """Whether the messages contain only text: no images or other files."""
    for message in objects(messages):
        content = message.get("content")
        if not isinstance(content, str) and any(part.get("type", "text") != "text" for part in objects(content)):
            return False
    return True
