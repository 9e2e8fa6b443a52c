"""The clients file: its schema, and the client directory built from it.

    clients:
      alice: {key: "sha256:...", weight: 2, group: research, limits: {in_flight: 8}}
    groups:
      research: {weight: 4, limits: {tokens_per_minute: 100000}}
    anonymous: {weight: 1, new_per_minute: 10}
    prices:
      currency: EUR
      models:
        llama: {input: 0.20, cached_input: 0.05, output: 0.60}

The file holds only hashes of keys, so that reading it does not let anybody call as one of the clients.
"""

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from router.auth.identity import (
    UNLIMITED,
    AnonymousPolicy,
    ClientDirectory,
    ClientGroup,
    Identity,
    ResolvedClient,
    is_allowed_name,
)
from router.auth.prices import NO_PRICES, Price, PriceList
from router.core.clients.rate_limits import ClientLimits
from router.core.model.request import ClientId, GroupId
from router.errors import ConfigError
from router.runtime import yaml_file
from router.runtime.mistakes import did_you_mean, place_in, refuse_unknown_keys, what_is_wrong

FROZEN: Final = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,47}")
HASH: Final = re.compile(r"sha256:([0-9a-f]{64})(?: until (\S+))?")
REVOKED: Final = "revoked"
ANONYMOUS_GROUP: Final = "anonymous"
"""The built-in group of unauthenticated clients."""


class KeyHash(NamedTuple):
    """The SHA-256 of a key, and when the key expires, in seconds since 1970."""

    digest: bytes
    until: float | None = None


def hash_of(key: str) -> str:
    """Return the text that stands for a key in the file."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def valid_name(name: str) -> str:
    """Return the name itself if a client may have it; raises ValueError with the reason otherwise."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name[:60]!r} is not a valid name: at most 48 letters, digits and . _ @ -, the first a letter or digit"
        )
    if not is_allowed_name(name):
        raise ValueError(
            f"{name!r} is reserved: anonymous, other, and names that begin with key-, header-, user- or address-"
        )
    return name


def _hashes(given: object) -> object:
    if given == REVOKED:
        return ()
    texts = given if isinstance(given, list) else [given]
    found = []
    for text in texts:
        match = HASH.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"neither sha256: with 64 hexadecimal digits nor {REVOKED}; `d2lpm keys add` creates a key"
            )
        found.append(KeyHash(bytes.fromhex(match[1]), None if match[2] is None else _seconds(match[2])))
    return tuple(found)


def _seconds(text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a time such as 2027-01-31 or 2027-01-31T12:00:00Z") from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _expiry(given: object) -> object:
    return _seconds(given) if isinstance(given, str) else given


def _day(given: object) -> object:
    try:
        return date.fromisoformat(given) if isinstance(given, str) else given
    except ValueError:
        raise ValueError(f"{str(given)[:40]!r} is not a day such as 2027-01-31") from None


def _nothing(given: object) -> object:
    """Read a name without a value, as in `clients:`, as an empty mapping."""
    return {} if given == "" else given


def _listed(given: object) -> object:
    """Read a single entry as a list of it."""
    return given if isinstance(given, list | tuple) else [given]


Amount = Annotated[Decimal, Field(ge=0, le=10**9, decimal_places=9)]
"""A price in the currency of the file."""
Name = Annotated[str, AfterValidator(valid_name)]
Models = tuple[Annotated[str, Field(min_length=1)], ...] | None


class FileSection(BaseModel):
    """A mapping in the file."""

    model_config = FROZEN

    @model_validator(mode="before")
    @classmethod
    def _from_nothing(cls, given: object) -> object:
        refuse_unknown_keys(given, cls.model_fields)
        return _nothing(given)


class LimitsEntry(FileSection):
    """The limits of a client or group."""

    in_flight: PositiveInt | None = None
    requests_per_minute: PositiveFloat | None = None
    tokens_per_minute: PositiveFloat | None = None

    @property
    def limits(self) -> ClientLimits:
        """The same limits as the router uses them."""
        return ClientLimits(self.in_flight, self.requests_per_minute, self.tokens_per_minute)


class ClientEntry(FileSection):
    """A client's entry."""

    key: Annotated[tuple[KeyHash, ...], BeforeValidator(_hashes)] = ()
    """The hashes of its keys; none if the key is revoked, or if a trusted header names the client."""
    weight: PositiveFloat = 1.0
    group: str | None = None
    limits: LimitsEntry = LimitsEntry()
    expires: Annotated[float | None, BeforeValidator(_expiry)] = None
    models: Models = None


class GroupEntry(FileSection):
    """A group's entry; weight and limits are shared by all its members."""

    weight: PositiveFloat = 1.0
    limits: LimitsEntry = LimitsEntry()
    models: Models = None


class AnonymousEntry(FileSection):
    """The treatment of clients without a key."""

    allowed: bool = True
    weight: PositiveFloat | None = None
    """The weight that all of them share; if None, each has weight 1."""
    limits: LimitsEntry = LimitsEntry()
    """The limits of all of them together."""
    each: LimitsEntry = LimitsEntry()
    """The limits of each of them."""
    models: Models = None
    new_per_minute: PositiveFloat | None = None
    """New anonymous clients per minute from one address."""


class PriceEntry(FileSection):
    """Prices of a model, per million tokens."""

    input: Amount
    """Of input tokens that are computed."""
    cached_input: Amount | None = None
    """Of input tokens found in a prefix cache; by default the same."""
    output: Amount
    since: Annotated[date, BeforeValidator(_day)] = date.min
    """The first day (UTC) on which they hold."""

    @property
    def price(self) -> Price:
        """The same prices as the router uses them."""
        return Price(
            self.input, self.input if self.cached_input is None else self.cached_input, self.output, self.since
        )


def _prices(entries: tuple[PriceEntry, ...]) -> tuple[PriceEntry, ...]:
    days = [entry.since for entry in entries]
    if len(set(days)) < len(days):
        raise ValueError("two prices begin on the same day; give each its own `since`")
    return entries


def _currency(text: str) -> str:
    if not re.fullmatch("[A-Za-z]{1,12}", text):
        raise ValueError("must be 1 to 12 letters, such as EUR")
    return text


class PricesEntry(FileSection):
    """The prices of all models."""

    currency: Annotated[str, AfterValidator(_currency)]
    """Such as EUR."""
    models: Annotated[
        dict[
            Annotated[str, Field(min_length=1)],
            Annotated[tuple[PriceEntry, ...], BeforeValidator(_listed), Field(min_length=1), AfterValidator(_prices)],
        ],
        BeforeValidator(_nothing),
    ] = {}

    @property
    def prices(self) -> PriceList:
        """The same prices as the router uses them."""
        by_day = {
            model: tuple(sorted([entry.price for entry in entries], key=lambda price: price.since, reverse=True))
            for model, entries in self.models.items()
        }
        return PriceList(self.currency, by_day)


class ClientsFile(FileSection):
    """The whole file."""

    clients: Annotated[dict[Name, ClientEntry], BeforeValidator(_nothing)] = {}
    groups: Annotated[dict[Name, GroupEntry], BeforeValidator(_nothing)] = {}
    anonymous: AnonymousEntry = AnonymousEntry(allowed=False)
    prices: PricesEntry | None = None

    @model_validator(mode="after")
    def _fits(self) -> "ClientsFile":
        owners: dict[bytes, str] = {}
        for name, client in self.clients.items():
            if client.group is not None and client.group not in self.groups:
                meant = did_you_mean(client.group, self.groups)
                raise ValueError(
                    f"clients: {name}: there is no group {client.group!r}{meant}; add it under `groups` first"
                )
            for key in client.key:
                if owners.setdefault(key.digest, name) != name:
                    raise ValueError(f"clients: {name}: has the same key as {owners[key.digest]}")
        return self


def load(path: Path) -> ClientDirectory:
    """Read a file and build the client directory. Raises ConfigError like `read_clients`, and for an empty file."""
    file = read_clients(path)
    if not file.model_fields_set:  # a file may be empty for a moment while it is being written
        raise ConfigError(f"{path}: empty; `clients: {{}}` is a file of no clients")
    return build_directory(file)


def read_clients(path: Path) -> ClientsFile:
    """Read a clients file. Raises ConfigError, in one line that names the file, the mistake and its place."""
    try:
        return parse(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: {reason}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(text: str) -> ClientsFile:
    """Parse the text of a clients file. Raises ConfigError, in one line that does not name the file."""
    try:
        document = yaml_file.read(text)
        return ClientsFile.model_validate({} if document is None else document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [part for part in first["loc"] if part != "[key]"]
        line = [f"line {yaml_file.line_of(text, place)}"] if place else []
        raise ConfigError(": ".join([*line, *place_in(place), what_is_wrong(first)])) from None


def build_directory(file: ClientsFile) -> ClientDirectory:
    """Build the client directory."""
    keys: dict[bytes, ResolvedClient] = {}
    names: dict[str, ResolvedClient] = {}
    for name, client in file.clients.items():
        identity = _identity(name, client, file.groups)
        names[name] = ResolvedClient(identity, client.expires)
        for key in client.key:
            ends = [time for time in (client.expires, key.until) if time is not None]
            keys[key.digest] = ResolvedClient(identity, min(ends, default=None))
    prices = NO_PRICES if file.prices is None else file.prices.prices
    return ClientDirectory(keys, names, _anonymous(file.anonymous), checks=True, prices=prices)


def _identity(name: str, client: ClientEntry, groups: Mapping[str, GroupEntry]) -> Identity:
    entry = None if client.group is None else groups[client.group]
    group = None if entry is None else ClientGroup(GroupId(str(client.group)), entry.weight, entry.limits.limits)
    models = None if client.models is None else frozenset(client.models)
    if entry is not None and entry.models is not None:
        models = frozenset(entry.models) if models is None else models & frozenset(entry.models)
    return Identity(ClientId(name), client.weight, group, client.limits.limits, models)


def _anonymous(entry: AnonymousEntry) -> AnonymousPolicy:
    together = entry.limits.limits
    group = (
        ClientGroup(GroupId(ANONYMOUS_GROUP), entry.weight, together) if entry.weight or together != UNLIMITED else None
    )
    models = None if entry.models is None else frozenset(entry.models)
    return AnonymousPolicy(entry.allowed, group, entry.each.limits, models, entry.new_per_minute)
