"""What the router changes in a body: the model's name, a cache salt, and the usage and token ids that it asks for."""

from collections.abc import Callable
from enum import Enum
from hashlib import sha256
from typing import Final, NamedTuple

import orjson

from router.api.body import fields as read
from router.api.body.error_bodies import load
from router.api.body.fields import Fields, dump
from router.api.body.json_edit import put_members, replace_member
from router.api.body.multipart import is_form, replace_field


def rename(body: bytes, content_type: str, model: str) -> bytes:
    """`body`, which names a model, with this one instead. `content_type`: as it was read, see `Call.content_type`."""
    if is_form(content_type):
        return replace_field(body, content_type, "model", model)
    return replace_member(body, "model", orjson.dumps(model))


SALT_FIELD: Final = "cache_salt"


def with_cache_salt(body: bytes, side_of: Callable[[str | None], str], secret: bytes) -> bytes:
    """The body with a salt of the side that `side_of` names for its `user`; a client's own salt goes into that.

    The salt tells nobody without the secret whose it is. A body that is no JSON object stays as it is.
    """
    fields = load(body)
    if fields is None:
        return body
    user, own = fields.get("user"), fields.get(SALT_FIELD)
    salt = _salt(
        side_of(user if isinstance(user, str) else None), b"" if own is None else dump(own, SALT_FIELD), secret
    )
    return put_members(body, {SALT_FIELD: dump(salt, SALT_FIELD)}, fields)


def _salt(side: str, own: bytes, secret: bytes) -> str:
    keyed = sha256(sha256(b"cache salt\0" + secret).digest())
    keyed.update(side.encode() + b"\0" + own)
    return keyed.hexdigest()[:32]


_OPTIONS: Final = "stream_options"
USAGE_IN_EVERY_CHUNK: Final = b'{"include_usage":true,"continuous_usage_stats":true}'
"""The `stream_options` of a call that came without."""


class Addition(Enum):
    """A field that the router adds; the value is its place in the body."""

    USAGE = "stream_options.include_usage"
    """The usage of the whole call, at its end."""
    CHUNK_USAGE = "stream_options.continuous_usage_stats"
    """The usage so far, in every chunk. vLLM needs `USAGE` beside it, SGLang does not."""
    TOKEN_IDS = "return_token_ids"
    """The token ids of prompt and answer."""

    @property
    def member(self) -> str:
        """Its own name, without that of the object around it."""
        return self.value.rpartition(".")[2]


AddedFields = frozenset[Addition]
NO_FIELDS: Final[AddedFields] = frozenset()
ALL_FIELDS: Final[AddedFields] = frozenset(Addition)
_IN_OPTIONS: Final[AddedFields] = frozenset({Addition.USAGE, Addition.CHUNK_USAGE})


class Additions(NamedTuple):
    """What the router wants to add to one body."""

    wanted: AddedFields = NO_FIELDS
    """What the client did not ask for itself."""
    options: Fields | None = None
    """The client's own `stream_options`."""
    members: tuple[str, ...] = ()
    """Those of the members below that the client's body has, and that are replaced."""

    def put(self, body: bytes, added: AddedFields) -> bytes:
        """The body with `added`, a part of `wanted`, by the least change of its bytes."""
        values = {}
        if Addition.TOKEN_IDS in added:
            values[Addition.TOKEN_IDS.value] = b"true"
        if in_options := added & _IN_OPTIONS:
            values[_OPTIONS] = self._stream_options(in_options)
        return put_members(body, values, self.members) if values else body

    def _stream_options(self, added: AddedFields) -> bytes:
        if not self.options and added == _IN_OPTIONS:
            return USAGE_IN_EVERY_CHUNK
        return orjson.dumps({**(self.options or {}), **{each.member: True for each in Addition if each in added}})


class RequestedUsage(NamedTuple):
    """What the client itself asked for of usage."""

    final: bool = False
    in_chunks: bool = False


def requested_usage(fields: Fields) -> RequestedUsage:
    """Raises BadRequest where `stream_options` is none."""
    options = read.mapping(fields, _OPTIONS)
    if not options:
        return RequestedUsage()
    return RequestedUsage(
        *[read.flag(options, each.member, each.value) for each in (Addition.USAGE, Addition.CHUNK_USAGE)]
    )


def additions(fields: Fields, wish: RequestedUsage, *, streamed: bool, ids: bool) -> Additions:
    """What to add to a call. `ids`: token ids are of use, and the client did not ask for them.

    Raises BadRequest where the client's `stream_options` cannot be written again.
    """
    if not streamed:
        return Additions()
    options = read.mapping(fields, _OPTIONS)
    if options:
        read.dump(options, _OPTIONS)
    asked = ((Addition.USAGE, wish.final), (Addition.CHUNK_USAGE, wish.in_chunks), (Addition.TOKEN_IDS, not ids))
    unwanted = {addition for addition, needless in asked if needless}
    members = tuple([name for name in (_OPTIONS, Addition.TOKEN_IDS.value) if name in fields])
    return Additions(ALL_FIELDS - unwanted, options, members)


def fields_named_in(refusal: bytes, added: AddedFields) -> AddedFields:
    """Those of `added` that an engine's refusal names. Where it names `stream_options` alone, all that is in there."""
    named = frozenset(each for each in added if each.member.encode() in refusal)
    if not named and _OPTIONS.encode() in refusal:
        return added & _IN_OPTIONS
    return named
