"""Who is the client: the share of the fleet that a call counts against, and what it may do.

Whoever has a key of the book goes by its name there. The id of anybody else begins with its source (`key-`, `header-`,
`user-`, `address-`), so that nobody can pose as another by choosing a name; the book has no name that begins like that.
A key shows only as the first 128 bits of its SHA-256: enough that nobody finds a second key with the same id.

Keys are known by their SHA-256, found in one step of a dict. No slower hash is needed: a key is 256 random bits, which
nobody guesses, however fast a guess can be tried; and what a look-up's time tells is a part of a hash, which opens
nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple
from urllib.parse import quote

from router.core.model.request import ClientId, GroupId
from router.errors import ConfigError, InvalidKey

ID_LENGTH: Final = 64
DIGEST_LENGTH: Final = 32
"""Hexadecimal digits of the digest in an id: 128 bits, so that nobody finds a second name with the same one."""
ANONYMOUS: Final = ClientId("anonymous")
"""Whoever no source names; it has no prefix, so no name can be made to equal it."""
KEY_PREFIX: Final = b"sk-"
"""What our keys begin with. A text that begins otherwise, and is none of the book's, is nobody's key: client libraries
insist on some."""
LOOPBACK: Final = ("127.0.0.0/8", "::1/128")

Network = IPv4Network | IPv6Network


class IdentitySource(StrEnum):
    KEY = "key"
    """The API key: `Authorization: Bearer` or `x-api-key`."""
    HEADER = "header"
    """A header that a proxy in front sets and the operator trusts."""
    USER = "user"
    """The body's `user` field; whoever can call may choose it."""
    ADDRESS = "address"
    """The peer's IP address."""


DEFAULT_ORDER: Final = (IdentitySource.HEADER, IdentitySource.KEY, IdentitySource.USER, IdentitySource.ADDRESS)
"""A trusted header comes first: client libraries always send a key, which would hide it."""


class Limits(NamedTuple):
    """What may be asked for; None is no limit."""

    in_flight: int | None = None
    """Calls that wait or run."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Input and output, cached or not, by the engine's word."""


UNLIMITED: Final = Limits()


class Group(NamedTuple):
    """Clients that have something together."""

    name: GroupId
    weight: float | None = 1.0
    """Which they share; None where each has its own."""
    limits: Limits = UNLIMITED
    """Of all of them together."""


class Identity(NamedTuple):
    """A client, and what the book says of it."""

    client: ClientId
    weight: float = 1.0
    """The client's share relative to others, or to others of its group."""
    group: Group | None = None
    limits: Limits = UNLIMITED
    """Its own, beside those of its group."""
    models: frozenset[str] | None = None
    """Those that it may call; None for all."""
    anonymous: bool = False
    """Whether nobody vouches for it, so that one may call itself by many names."""

    @property
    def shared_group(self) -> GroupId | None:
        """The group whose weight it shares."""
        return None if self.group is None or self.group.weight is None else self.group.name

    @property
    def group_weight(self) -> float:
        """That weight; 1 where there is none."""
        return 1.0 if self.group is None or self.group.weight is None else self.group.weight


class ResolvedClient(NamedTuple):
    """What one key, or a trusted name, stands for."""

    identity: Identity
    until: float | None = None
    """When it expires, in seconds since 1970."""


class AnonymousPolicy(NamedTuple):
    """What is done about those whom nobody vouches for."""

    allowed: bool = True
    group: Group | None = None
    """They are all in it."""
    limits: Limits = UNLIMITED
    """Of each."""
    models: frozenset[str] | None = None
    new_per_minute: float | None = None
    """How many may come by a new name from one address; beyond that they go by their address."""


class ClientDirectory(NamedTuple):
    """Who is known. Replaced as a whole, never changed."""

    keys: Mapping[bytes, ResolvedClient] = {}
    """By the SHA-256 of a key."""
    names: Mapping[str, ResolvedClient] = {}
    """The same clients by name, for trusted headers."""
    anonymous: AnonymousPolicy = AnonymousPolicy()
    checks: bool = False
    """Whether keys that are not in it are refused; else each is a client of its own."""


class Identifier:
    """Names the client of a call by the first source that has something to say.

    `trusted_headers` are the header names that count as `IdentitySource.HEADER`, in order of preference, and only where the
    call comes from one of the networks in `proxies`: a client can set any header.
    """

    def __init__(
        self,
        order: Iterable[str] = DEFAULT_ORDER,
        trusted_headers: Iterable[str] = (),
        proxies: Iterable[str] = LOOPBACK,
        book: ClientDirectory = ClientDirectory(),  # noqa: B008 - immutable
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`clock`: the wall clock, in seconds since 1970, by which keys expire."""
        try:
            sources = [IdentitySource(name) for name in order]
        except ValueError as error:
            raise ConfigError(f"client identity: {error}; use some of {', '.join(IdentitySource)}") from None
        self._trusted = tuple(name.lower().encode() for name in trusted_headers)
        self._order = tuple(source for source in sources if source is not IdentitySource.HEADER or self._trusted)
        self._proxies = tuple(ip_network(network) for network in proxies)
        self.directory = book
        self._clock = clock

    def identify_head(self, headers: Mapping[bytes, bytes], address: str | None) -> Identity | None:
        """Who calls, by the head of a call; None where its body may name another. Raises InvalidKey, see `identify`."""
        for source in self._order:
            if source is IdentitySource.USER and self.directory.anonymous.allowed:
                return None
            found = self._from_source(source, headers, None, address)
            if found is not None:
                return found
        return self._anonymous(ANONYMOUS)

    def identify(self, headers: Mapping[bytes, bytes], user: str | None, address: str | None) -> Identity:
        """`headers` have lower-case names. Raises InvalidKey for a bad key, and where there must be one."""
        for source in self._order:
            found = self._from_source(source, headers, user, address)
            if found is not None:
                return found
        return self._anonymous(ANONYMOUS)

    def _from_source(
        self, source: IdentitySource, headers: Mapping[bytes, bytes], user: str | None, address: str | None
    ) -> Identity | None:
        if source is IdentitySource.KEY:
            return self._from_key(key) if (key := _key(headers)) else None
        if source is IdentitySource.HEADER:
            return self._from_header(headers, address)
        name = user if source is IdentitySource.USER else address
        return self._anonymous(_named_id(source, name.encode())) if name else None

    def _from_key(self, key: bytes) -> Identity | None:
        if not self.directory.checks:
            return self._anonymous(_key_id(key))
        entry = self.directory.keys.get(sha256(key).digest())
        if entry is not None:
            return self._valid(entry)
        if key.startswith(KEY_PREFIX):
            raise InvalidKey("The API key is not known.")
        return None

    def _from_header(self, headers: Mapping[bytes, bytes], address: str | None) -> Identity | None:
        for header in self._trusted:
            value = headers.get(header)
            if value and _is_in(address or "", self._proxies):
                entry = self.directory.names.get(value.decode("latin-1"))
                return Identity(_named_id(IdentitySource.HEADER, value)) if entry is None else self._valid(entry)
        return None

    def _valid(self, entry: ResolvedClient) -> Identity:
        if entry.until is not None and self._clock() >= entry.until:
            raise InvalidKey("The API key has expired.")
        return entry.identity

    def _anonymous(self, client: ClientId) -> Identity:
        rules = self.directory.anonymous
        if not rules.allowed:
            raise InvalidKey("This takes an API key as a bearer token.")
        return _stranger(client, rules)


def address_id(address: str | None) -> ClientId:
    """The client that goes by its address."""
    return _named_id(IdentitySource.ADDRESS, address.encode()) if address else ANONYMOUS


def is_allowed_name(name: str) -> bool:
    """Whether a client of the book may have this name: no other can have it for an id."""
    return name not in (ANONYMOUS, "other") and not name.startswith(tuple(f"{source}-" for source in IdentitySource))


@lru_cache(maxsize=4096)
def _is_in(address: str, networks: tuple[Network, ...]) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    plain = getattr(parsed, "ipv4_mapped", None) or parsed
    return any(plain in network for network in networks)


def _key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, credentials = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and (key := credentials.strip()):
        return key
    return headers.get(b"x-api-key", b"").strip()


@lru_cache(maxsize=4096)
def _stranger(client: ClientId, rules: AnonymousPolicy) -> Identity:
    return Identity(client, 1.0, rules.group, rules.limits, rules.models, anonymous=True)


def _key_id(key: bytes) -> ClientId:
    return ClientId(f"key-{sha256(key).hexdigest()[:DIGEST_LENGTH]}")


def _named_id(source: IdentitySource, name: bytes) -> ClientId:
    """Printable ASCII of at most `ID_LENGTH` characters; distinct names stay distinct."""
    return _short_named_id(source, name) if len(name) <= ID_LENGTH else _made_id(source, name)


@lru_cache(maxsize=4096)
def _short_named_id(source: IdentitySource, name: bytes) -> ClientId:
    return _made_id(source, name)


def _made_id(source: IdentitySource, name: bytes) -> ClientId:
    client = f"{source}-{quote(name[:ID_LENGTH], safe='@:')}"
    if len(name) > ID_LENGTH or len(client) > ID_LENGTH:
        # quote() escapes "+", so a short name cannot be made to look like a shortened one.
        digest = sha256(name).hexdigest()[:DIGEST_LENGTH]
        client = f"{client[: ID_LENGTH - 1 - DIGEST_LENGTH]}+{digest}"
    return ClientId(client)
