"""The router's edits of a body: the model's name, a cache salt, and the fields that ask for usage and token ids."""

from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple

import orjson

from router.api.body import fields as read
from router.api.body.fields import Fields, dump
from router.api.body.json_object import insert_first, join_members, load, put_members, replace_member
from router.api.body.multipart import is_form, replace_field


def rename(body: bytes, content_type: str, model: str) -> bytes:
    """Replace the model that `body` names. `content_type`: that of the body, as it was parsed."""
    if is_form(content_type):
        return replace_field(body, content_type, "model", model)
    return replace_member(body, "model", orjson.dumps(model))


SALT_FIELD: Final = "cache_salt"


def with_cache_salt(body: bytes, tenant_of: Callable[[str | None], str], secret: bytes) -> bytes:
    """Set the body's cache salt, so that only calls of one tenant (client or group) share prefixes.

    The salt is a keyed hash of the tenant that `tenant_of` returns for the body's `user`, and of the client's own salt,
    if any. Without the secret, the salt does not reveal the tenant. A body that is not a JSON object is unchanged.
    """
    fields = load(body)
    if fields is None:
        return body
    user, own = fields.get("user"), fields.get(SALT_FIELD)
    salt = _salt(
        tenant_of(user if isinstance(user, str) else None), b"" if own is None else dump(own, SALT_FIELD), secret
    )
    return put_members(body, {SALT_FIELD: dump(salt, SALT_FIELD)}, fields)


def _salt(tenant: str, own: bytes, secret: bytes) -> str:
    keyed = sha256(sha256(b"cache salt\0" + secret).digest())
    keyed.update(tenant.encode() + b"\0" + own)
    return keyed.hexdigest()[:32]


_OPTIONS: Final = "stream_options"
USAGE_IN_EVERY_CHUNK: Final = b'{"include_usage":true,"continuous_usage_stats":true}'
"""The `stream_options` for a call without any."""


class Addition(StrEnum):
    """A field that the router adds to a body; the value is its path."""

    USAGE = "stream_options.include_usage"
    """Asks for the usage of the whole call at the end of the stream."""
    CHUNK_USAGE = "stream_options.continuous_usage_stats"
    """Asks for the usage so far in every chunk. vLLM requires `USAGE` with it, SGLang does not."""
    TOKEN_IDS = "return_token_ids"
    """Asks for the token ids of prompt and answer."""

    @property
    def member(self) -> str:
        """The name of the field itself, without the object around it."""
        return self.value.rpartition(".")[2]


AddedFields = frozenset[Addition]
NO_FIELDS: Final[AddedFields] = frozenset()
ALL_FIELDS: Final[AddedFields] = frozenset(Addition)
_IN_OPTIONS: Final[AddedFields] = frozenset({Addition.USAGE, Addition.CHUNK_USAGE})


class Additions(NamedTuple):
    """The fields that the router wants to add to one body."""

    wanted: AddedFields = NO_FIELDS
    """The fields that the client did not set itself."""
    options: Fields | None = None
    """The client's own `stream_options`."""
    members: tuple[str, ...] = ()
    """The top-level members that the client's body already has and that must be replaced."""

    def put(self, body: bytes, added: AddedFields) -> bytes:
        """Add fields, a subset of `wanted`, to the body with the least change of its bytes."""
        if not added:
            return body
        if not self.members:
            return insert_first(body, _new_members(added))
        return put_members(body, _members(self.options, added), self.members)


_ASKED_FOR: Final = frozenset({_OPTIONS, Addition.TOKEN_IDS.value})
_WITH_IDS: Final = Additions(ALL_FIELDS)
_WITHOUT_IDS: Final = Additions(ALL_FIELDS - {Addition.TOKEN_IDS})
"""What the router wants to add to a body that has none of these members."""


@lru_cache(maxsize=8)
def _new_members(added: AddedFields) -> bytes:
    """Return the fields as the members of a body that has none of them."""
    return join_members(_members(None, added))


def _members(options: Fields | None, added: AddedFields) -> dict[str, bytes]:
    """Return the top-level members that add these fields, as JSON by name. `options`: the client's own
    `stream_options`.
    """
    values = {}
    if Addition.TOKEN_IDS in added:
        values[Addition.TOKEN_IDS.value] = b"true"
    if in_options := added & _IN_OPTIONS:
        values[_OPTIONS] = _stream_options(options, in_options)
    return values


def _stream_options(options: Fields | None, added: AddedFields) -> bytes:
    if not options and added == _IN_OPTIONS:
        return USAGE_IN_EVERY_CHUNK
    return orjson.dumps({**(options or {}), **{each.member: True for each in Addition if each in added}})


class RequestedUsage(NamedTuple):
    """The usage that the client itself asked for."""

    final: bool = False
    in_chunks: bool = False


def requested_usage(fields: Fields) -> RequestedUsage:
    """Read the usage that the client asked for. Raises BadRequest if `stream_options` is invalid."""
    if _OPTIONS not in fields or not (options := read.mapping(fields, _OPTIONS)):
        return RequestedUsage()
    return RequestedUsage(
        *[read.flag(options, each.member, each.value) for each in (Addition.USAGE, Addition.CHUNK_USAGE)]
    )


def additions(fields: Fields, requested: RequestedUsage, *, streamed: bool, ids: bool) -> Additions:
    """Return the fields to add to a call. `ids`: token ids are useful, and the client did not ask for them.

    Raises BadRequest if the client's `stream_options` are nested too deeply to be serialised again.
    """
    if not streamed:
        return Additions()
    if _ASKED_FOR.isdisjoint(fields):
        return _WITH_IDS if ids else _WITHOUT_IDS
    options = read.mapping(fields, _OPTIONS)
    if options:
        read.dump(options, _OPTIONS)
    redundant = (
        (Addition.USAGE, requested.final),
        (Addition.CHUNK_USAGE, requested.in_chunks),
        (Addition.TOKEN_IDS, not ids),
    )
    unwanted = {addition for addition, is_redundant in redundant if is_redundant}
    members = tuple([name for name in (_OPTIONS, Addition.TOKEN_IDS.value) if name in fields])
    return Additions(ALL_FIELDS - unwanted, options, members)


def fields_named_in(refusal: bytes, added: AddedFields) -> AddedFields:
    """Return the added fields that an engine's error names; all in `stream_options` if it names only that object."""
    named = frozenset(each for each in added if each.member.encode() in refusal)
    if not named and _OPTIONS.encode() in refusal:
        return added & _IN_OPTIONS
    return named
