"""The form that nearly all chunks of a chat stream have, taken apart as text: the fast way through the per-chunk path.

One choice, the first; some text without escapes and nothing else said; usage, which we asked for, as the last member.
Whatever has any other form is read as JSON.
"""

import re
from typing import Final

_NULLS: Final = rb'(?:, ?"\w+": ?null)*+'
# Before the choices there is no other brace, so they are a member of the root, and so is the usage after them: of valid
# JSON the last brace closes the root. A raw quote cannot stand inside a string, so names are names.
_COMMON: Final = re.compile(
    rb'(\{[^{\[]*"choices": ?\[\{"index": ?0, ?"delta": ?\{(?:"\w+": ?null, ?)*+'
    rb'"content": ?"([^"\\\x00-\x1f]+)"' + _NULLS + rb"\}" + _NULLS + rb"\}\])"
    rb', ?"usage": ?(\{[^}]*\}(?:[^{}]*\})?)\}'
)


def take_apart(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """A chunk's JSON without its usage, its text in UTF-8, and its usage as JSON; None for one of another form."""
    found = _COMMON.fullmatch(data)
    if found is None:
        return None
    rest, text, usage = found.groups()
    return rest + b"}", text, usage
