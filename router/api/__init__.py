"""What travels between clients and engines, endpoint by endpoint. Pure: bytes in, facts and bytes out."""

from collections.abc import Callable, Mapping
from typing import Final

from router.api import chat, completions
from router.api.call import Call
from router.core.prompt_key import PromptHasher

ENDPOINTS: Final[Mapping[str, Callable[[bytes, PromptHasher], Call]]] = {
    chat.PATH: chat.parse_chat,
    completions.PATH: completions.parse_completion,
}
"""Path to parser; every parser raises BadRequest."""
