"""What travels between clients and engines, endpoint by endpoint. Pure: bytes in, facts and bytes out."""

from collections.abc import Mapping
from typing import Final, Protocol

from router.api import chat, completions
from router.api.call import Call
from router.core.prompt_key import PromptHasher


class Parser(Protocol):
    """Reads the body of a call to one endpoint."""

    def __call__(self, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:
        """Raises BadRequest. `ids`: ask for those of the tokens where another engine could go on by them."""


ENDPOINTS: Final[Mapping[str, Parser]] = {
    chat.PATH: chat.parse_chat,
    completions.PATH: completions.parse_completion,
}
"""Path to parser."""
