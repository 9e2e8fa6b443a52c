"""Keeping prefixes apart: a salt in each call, so that a client finds in a cache only what its own side has put there.

Whoever may time its calls learns from a fast first token that somebody has sent the same prefix before. Engines that
know `cache_salt` (vLLM, and SGLang) make it a part of what their blocks are known by. The router does as well, since it
stands at the head of what the prompt is keyed by (`render.CACHE_FIELDS`): so its own prefix tree has one part for each
salt too, and what it believes is true.
"""

from collections.abc import Callable
from hashlib import sha256
from typing import Final

from router.api.body.error_bodies import load
from router.api.body.fields import dump
from router.api.body.json_edit import put_members

FIELD: Final = "cache_salt"


def isolated(body: bytes, side_of: Callable[[str | None], str], secret: bytes) -> bytes:
    """The body with a salt of the side that `side_of` names for its `user`; a client's own salt goes into that.

    The salt tells nobody without the secret whose it is. A body that is no JSON object stays as it is.
    """
    fields = load(body)
    if fields is None:
        return body
    user, own = fields.get("user"), fields.get(FIELD)
    salt = _salt(side_of(user if isinstance(user, str) else None), b"" if own is None else dump(own, FIELD), secret)
    return put_members(body, {FIELD: dump(salt, FIELD)}, fields)


def _salt(side: str, own: bytes, secret: bytes) -> str:
    keyed = sha256(sha256(b"cache salt\0" + secret).digest())
    keyed.update(side.encode() + b"\0" + own)
    return keyed.hexdigest()[:32]
