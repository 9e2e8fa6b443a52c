"""What the APIs have in common whose calls engines turn into chats, and so do their keys."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.api.body import prompt_bytes as render
from router.api.body.call import Call
from router.api.body.fields import Fields
from router.core.model.prompt_key import PromptKey
from router.errors import BadRequest


def before_messages(fields: Fields, tools: Sequence[Fields], effort: object) -> Fields:
    """What of a body stands before the first message, under the names that it has in a chat's.

    `tools`: each as the function that a chat would have; `effort`: the object that tells how much to think.
    """
    return {
        **{name: fields[name] for name in ("cache_salt", "chat_template_kwargs") if name in fields},
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "reasoning_effort": effort.get("effort") if isinstance(effort, dict) else None,
    }


def next_turn(call: Call, answer: Iterable[Mapping[str, Any]]) -> PromptKey:
    """The key of the call's prompt and its answer, given as messages of a chat.

    That of the prompt alone where the answer is nested too deeply to be sent again.
    """
    (prompt,) = call.prompts
    try:
        return prompt.extend(render.messages(answer))
    except BadRequest:
        return prompt.key
