"""Identifies the client of a call: the share of the fleet that the call counts against, and the client's limits.

A client with a key in the clients file has its name there as id. The id of any other client begins with its source
(`key-`, `header-`, `user-`, `address-`), and no name in the file may begin like that, so that a client cannot
impersonate another by choosing a name. A key appears in an id only as the first 128 bits of its SHA-256: enough that
nobody finds a second key with the same id.

Keys are looked up by their SHA-256 in a dict. A slower hash is not needed: a key is 256 random bits, which cannot be
guessed however fast guesses are tried; and the time of a look-up can only reveal part of a hash, which opens nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple
from urllib.parse import quote

from router.auth.prices import NO_PRICES, PriceList
from router.core.clients.rate_limits import ClientLimits
from router.core.model.request import ClientId, GroupId
from router.errors import ConfigError, InvalidKey

ID_LENGTH: Final = 64
DIGEST_LENGTH: Final = 32
"""Hexadecimal digits of the digest in an id: 128 bits, so that nobody finds a second name with the same digest."""
ANONYMOUS: Final = ClientId("anonymous")
"""The client of calls that no source identifies; it has no prefix, so no chosen name can equal it."""
KEY_PREFIX: Final = b"sk-"
"""The prefix of the keys that `d2lpm keys` creates. An unknown key without it counts as no key, because client
libraries insist on sending some text."""
LOOPBACK: Final = ("127.0.0.0/8", "::1/128")

Network = IPv4Network | IPv6Network


class IdentitySource(StrEnum):
    KEY = "key"
    """The API key: `Authorization: Bearer`, `x-api-key` or, as at Azure, `api-key`."""
    HEADER = "header"
    """A header that a proxy in front of the router sets and the operator trusts."""
    USER = "user"
    """The body's `user` field, which any caller can choose freely."""
    ADDRESS = "address"
    """The peer's IP address."""


DEFAULT_ORDER: Final = (IdentitySource.HEADER, IdentitySource.KEY, IdentitySource.USER, IdentitySource.ADDRESS)
"""A trusted header comes first: client libraries always send a key, which would take precedence over the header."""


UNLIMITED: Final = ClientLimits()


class ClientGroup(NamedTuple):
    """Clients that share a weight, limits or both."""

    name: GroupId
    weight: float | None = 1.0
    """The weight that the members share; None if each has its own."""
    limits: ClientLimits = UNLIMITED
    """The limits of all members together."""


class Identity(NamedTuple):
    """A client with its share, group and limits."""

    client: ClientId
    weight: float = 1.0
    """The client's share relative to other clients, or to the others of its group."""
    group: ClientGroup | None = None
    limits: ClientLimits = UNLIMITED
    """Its own limits, in addition to those of its group."""
    models: frozenset[str] | None = None
    """The models that it may call; None for all."""
    anonymous: bool = False
    """True if it is not authenticated, so that one caller may use many ids."""

    @property
    def shared_group(self) -> GroupId | None:
        """The group whose weight the client shares, if any."""
        return None if self.group is None or self.group.weight is None else self.group.name

    @property
    def group_weight(self) -> float:
        """The weight that the group shares; 1 if there is none."""
        return 1.0 if self.group is None or self.group.weight is None else self.group.weight


def budget_owner(identity: Identity | None, address: str | None) -> str:
    """Return the owner whose budget of bytes a call counts against: an authenticated client, otherwise the address."""
    return address or "" if identity is None or identity.anonymous else f"client {identity.client}"


class ResolvedClient(NamedTuple):
    """The client that one key or trusted name belongs to."""

    identity: Identity
    until: float | None = None
    """When the key or name expires, in seconds since 1970."""


class AnonymousPolicy(NamedTuple):
    """How unauthenticated clients are treated."""

    allowed: bool = True
    group: ClientGroup | None = None
    """The group of all of them."""
    limits: ClientLimits = UNLIMITED
    """The limits of each of them."""
    models: frozenset[str] | None = None
    new_per_minute: float | None = None
    """New clients per minute from one address; beyond that, further new ones are identified by the address."""


class ClientDirectory(NamedTuple):
    """The known clients. Immutable: a reload replaces it as a whole."""

    keys: Mapping[bytes, ResolvedClient] = {}
    """Clients by the SHA-256 of a key."""
    names: Mapping[str, ResolvedClient] = {}
    """The same clients by name, for trusted headers."""
    anonymous: AnonymousPolicy = AnonymousPolicy()
    checks: bool = False
    """True if unknown keys are refused; otherwise each unknown key is a client of its own."""
    prices: PriceList = NO_PRICES


class Identifier:
    """Identifies the client of a call by the first source that names one.

    `trusted_headers` are the header names that count as `IdentitySource.HEADER`, in order of preference, and only if
    the call comes from one of the networks in `proxies`: any other caller could set the header itself.
    """

    def __init__(
        self,
        order: Iterable[str] = DEFAULT_ORDER,
        trusted_headers: Iterable[str] = (),
        proxies: Iterable[str] = LOOPBACK,
        directory: ClientDirectory = ClientDirectory(),  # noqa: B008 - immutable
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`clock`: the wall clock by which keys expire, in seconds since 1970."""
        try:
            sources = [IdentitySource(name) for name in order]
        except ValueError as error:
            raise ConfigError(f"client identity: {error}; use some of {', '.join(IdentitySource)}") from None
        self._trusted = tuple(name.lower().encode() for name in trusted_headers)
        self._order = tuple(source for source in sources if source is not IdentitySource.HEADER or self._trusted)
        self._proxies = tuple(ip_network(network) for network in proxies)
        self.directory = directory
        self._clock = clock

    def identify_head(self, headers: Mapping[bytes, bytes], address: str | None) -> Identity | None:
        """Return the client by the head of a call alone; None if the body may name another client.

        Raises InvalidKey like `identify`.
        """
        for source in self._order:
            if source is IdentitySource.USER and self.directory.anonymous.allowed:
                return None
            found = self._from_source(source, headers, None, address)
            if found is not None:
                return found
        return self._anonymous(ANONYMOUS)

    def identify(self, headers: Mapping[bytes, bytes], user: str | None, address: str | None) -> Identity:
        """Return the client of a call, whose `headers` have lower-case names.

        Raises InvalidKey for an unknown or expired key, and for a missing one if a key is required.
        """
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
            raise InvalidKey("The API key is unknown.")
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
            raise InvalidKey("This call needs an API key, as a bearer token or in `x-api-key`.")
        return _anonymous_identity(client, rules)


def address_id(address: str | None) -> ClientId:
    """Return the id of a client that is identified by its address."""
    return _named_id(IdentitySource.ADDRESS, address.encode()) if address else ANONYMOUS


def is_allowed_name(name: str) -> bool:
    """True if a client in the file may have this name: the id of no other client can equal it."""
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
    return (headers.get(b"x-api-key", b"") or headers.get(b"api-key", b"")).strip()


@lru_cache(maxsize=4096)
def _anonymous_identity(client: ClientId, rules: AnonymousPolicy) -> Identity:
    return Identity(client, 1.0, rules.group, rules.limits, rules.models, anonymous=True)


def _key_id(key: bytes) -> ClientId:
    return ClientId(f"key-{sha256(key).hexdigest()[:DIGEST_LENGTH]}")


def _named_id(source: IdentitySource, name: bytes) -> ClientId:
    """Return an id of printable ASCII, at most `ID_LENGTH` characters; distinct names give distinct ids."""
    return _short_named_id(source, name) if len(name) <= ID_LENGTH else _build_id(source, name)


@lru_cache(maxsize=4096)
def _short_named_id(source: IdentitySource, name: bytes) -> ClientId:
    return _build_id(source, name)


def _build_id(source: IdentitySource, name: bytes) -> ClientId:
    client = f"{source}-{quote(name[:ID_LENGTH], safe='@:')}"
    if len(name) > ID_LENGTH or len(client) > ID_LENGTH:
        # quote() escapes "+", so a short name cannot be made to look like a shortened one.
        digest = sha256(name).hexdigest()[:DIGEST_LENGTH]
        client = f"{client[: ID_LENGTH - 1 - DIGEST_LENGTH]}+{digest}"
    return ClientId(client)
