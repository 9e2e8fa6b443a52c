"""Who is the client: the share of the fleet that a call counts against.

An id begins with its source (`key-`, `header-`, `user-`, `address-`), so that nobody can pose as a client
of another source by choosing a name. A key shows only as the start of its SHA-256.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple
from urllib.parse import quote

from router.core.model import ClientId
from router.errors import ConfigError

ID_LENGTH: Final = 64
ANONYMOUS: Final = ClientId("anonymous")
"""Whoever no source names; it has no prefix, so no name can be made to equal it."""


class Source(StrEnum):
    KEY = "key"
    """The API key: `Authorization: Bearer` or `x-api-key`."""
    HEADER = "header"
    """A header that a proxy in front sets and the operator trusts."""
    USER = "user"
    """The body's `user` field; whoever can call may choose it."""
    ADDRESS = "address"
    """The peer's IP address."""


DEFAULT_ORDER: Final = (Source.HEADER, Source.KEY, Source.USER, Source.ADDRESS)
"""A trusted header comes first: client libraries always send a key, which would hide it."""


class Identity(NamedTuple):
    client: ClientId
    weight: float
    """The client's share relative to others."""


class Identifier:
    """Names the client of a call by the first source that has something to say.

    `trusted_headers` are the header names that count as `Source.HEADER`, in order of preference; a client can set
    any header, so name only those that a proxy in front overwrites. `weights` are by client id; 1 where absent.
    """

    def __init__(
        self,
        order: Iterable[str] = DEFAULT_ORDER,
        trusted_headers: Iterable[str] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        try:
            self._order = tuple(Source(name) for name in order)
        except ValueError as error:
            raise ConfigError(f"client identity: {error}; use some of {', '.join(Source)}") from None
        self._trusted = tuple(name.lower().encode() for name in trusted_headers)
        self._weights = dict(weights or {})

    def identify(self, headers: Mapping[bytes, bytes], user: str | None, address: str | None) -> Identity:
        """`headers` have lower-case names."""
        client = self._client(headers, user, address)
        return Identity(client, self._weights.get(client, 1.0))

    def _client(self, headers: Mapping[bytes, bytes], user: str | None, address: str | None) -> ClientId:
        for source in self._order:
            if source is Source.KEY:
                if key := _key(headers):
                    return _key_id(key)
            elif source is Source.HEADER:
                for header in self._trusted:
                    if value := headers.get(header):
                        return _named_id(source, value)
            elif name := (user if source is Source.USER else address):
                return _named_id(source, name.encode())
        return ANONYMOUS


def _key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, credentials = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and (key := credentials.strip()):
        return key
    return headers.get(b"x-api-key", b"").strip()


@lru_cache(maxsize=4096)
def _key_id(key: bytes) -> ClientId:
    return ClientId(f"key-{sha256(key).hexdigest()[:12]}")


@lru_cache(maxsize=4096)
def _named_id(source: Source, name: bytes) -> ClientId:
    """Printable ASCII of at most `ID_LENGTH` characters; distinct names stay distinct."""
    client = f"{source}-{quote(name, safe='@:')}"
    if len(client) > ID_LENGTH:
        # quote() escapes "+", so a short name cannot be made to look like a shortened one.
        digest = sha256(name).hexdigest()[:16]
        client = f"{client[: ID_LENGTH - 17]}+{digest}"
    return ClientId(client)
