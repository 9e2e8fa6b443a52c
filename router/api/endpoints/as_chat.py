"""Shared by the APIs whose calls engines convert to chats, so that the prompt's key is that of the chat."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.api.body import prompt_bytes as render
from router.api.body.call import Call
from router.api.body.fields import Fields
from router.core.model.prompt_key import PromptKey
from router.errors import BadRequest


def before_messages(fields: Fields, tools: Sequence[Fields], effort: object) -> Fields:
    """Return the members of a body that precede the first message, under their names in a chat's body.

    `tools`: the tools, each as the function of a chat's tool. `effort`: the object with the reasoning effort.
    """
    return {
        **{name: fields[name] for name in ("cache_salt", "chat_template_kwargs") if name in fields},
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "reasoning_effort": effort.get("effort") if isinstance(effort, dict) else None,
    }


def next_turn(call: Call, answer: Iterable[Mapping[str, Any]]) -> PromptKey:
    """Return the key of the call's prompt and its answer, given as messages of a chat.

    The key of the prompt alone if the answer is nested too deeply to be serialised again.
    """
    (prompt,) = call.prompts
    try:
        return prompt.extend(render.messages(answer))
    except BadRequest:
        return prompt.key
