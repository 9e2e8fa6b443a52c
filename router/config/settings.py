"""Every setting there is, and nothing about where its value comes from (see `sources`).

Each field is a flag, an environment variable and a key of the YAML file, and its docstring is its help text.
Policy parameters are not named here: each class in `PARAMETERS` is a group of keys of its own.
"""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    create_model,
    model_validator,
)

from router.auth.identity import DEFAULT_ORDER, LOOPBACK, Source
from router.core.policies.registry import PARAMETERS, POLICIES

FROZEN: Final = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
ZMQ_ENDPOINT: Final = r"^(tcp|ipc)://[^\s*]+$"
OWN_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
"""Of this machine, on itself."""
ADDRESSES: Final = frozenset(
    {
        "config",
        "clients",
        "trusted_proxy",
        "journal",
        "state",
        "host",
        "allowed_hosts",
        "port",
        "worker",
        "worker_api_key",
        "worker_dns",
        "workers_file",
        "admin_key",
        "emulate",
        "hash_secret",
        "tokenizer",
    }
)
"""Settings that say where something is or how to get in."""

if TYPE_CHECKING:
    PolicyGroups = BaseModel
else:
    PolicyGroups = create_model("PolicyGroups", **{name: (kind, kind()) for name, kind in PARAMETERS.items()})


def root_url(url: str) -> str:
    """The URL without a slash at its end; ValueError unless it is the root of an HTTP server."""
    parts = urlsplit(url)
    # What was given is not repeated: it may hold a password.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("not a URL like http://host:8000")
    if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError("more than scheme, host and port; /v1 is added to it here")
    parts.hostname.encode("idna")  # or raises: UnicodeError is a ValueError
    return f"{parts.scheme}://{parts.netloc}"


def name_url(url: str) -> str:
    """The URL as `root_url` gives it; ValueError for https."""
    if (root := root_url(url)).startswith("https"):
        raise ValueError("a certificate names a host, not its addresses; only http:// can be looked up")
    return root


def known_policy(name: str) -> str:
    """The name itself; ValueError, with the names there are, if it is none of them."""
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    return name


def network(text: str) -> str:
    """The text itself; ValueError unless it is an IP address or a network of them."""
    ip_network(text)
    return text


def host_name(text: str) -> str:
    """The text itself, in lower case; ValueError if it has a port or a scheme."""
    name = text.lower()
    if not text or "/" in name or (":" in name and not (name.startswith("[") and name.endswith("]"))):
        raise ValueError(f"{text!r} is not a host name without port; an IPv6 address stands in brackets")
    return name


def is_loopback(host: str) -> bool:
    """Whether this address to listen on can be reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def alias_pair(text: str) -> str:
    """The text itself; ValueError unless it is NAME=MODEL."""
    name, _, model = text.partition("=")
    if not name or not model:
        raise ValueError(f"{text!r} is not NAME=MODEL")
    return text


def one_model_each(aliases: tuple[str, ...]) -> tuple[str, ...]:
    """The aliases themselves; ValueError if a name is there twice."""
    names = [text.partition("=")[0] for text in aliases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice")
    return aliases


class WorkerAddress(BaseModel):
    """Where one engine listens; a text stands for its URL alone."""

    model_config = FROZEN

    url: Annotated[str, AfterValidator(root_url)]
    api_key: SecretStr | None = None
    """Sent to this worker instead of `worker_api_key`."""
    id: str = Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$", default_factory=lambda given: urlsplit(given["url"]).netloc)
    """Its name in metrics and headers; host and port where none is given."""
    kv_events: Annotated[str | None, Field(pattern=ZMQ_ENDPOINT)] = None
    """Where it publishes its KV events, like tcp://host:5557; it is asked where none is given."""
    kv_replay: Annotated[str | None, Field(pattern=ZMQ_ENDPOINT)] = None
    """Where past ones of these can be had."""
    kv_topic: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: object) -> object:
        return {"url": given} if isinstance(given, str) else given


def distinct(workers: tuple[WorkerAddress, ...]) -> tuple[WorkerAddress, ...]:
    """The workers themselves; ValueError if two have one URL or one id."""
    for worker in workers:
        if sum(worker.url == other.url or worker.id == other.id for other in workers) > 1:
            raise ValueError(f"{worker.id} at {worker.url} is there twice")
    return workers


class Settings(PolicyGroups):
    """What an operator may set. Beside these fields, each key of `PARAMETERS` is a field of its class."""

    model_config = FROZEN

    config: Path | None = None
    """A YAML file with any of these keys; environment and flags go before it."""
    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for every one of this machine."""
    allowed_hosts: tuple[Annotated[str, AfterValidator(host_name)], ...] = ()
    """A name, without port, under which clients may address the router in the Host header; once for each, * for any.
    `host`, localhost, 127.0.0.1 and [::1] are always allowed. Unless one is given, every name is allowed where `host`
    is no loopback address."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The TCP port to listen on; 0 for any that is free."""
    worker: Annotated[tuple[WorkerAddress, ...], AfterValidator(distinct)] = ()
    """The URL of a vLLM or SGLang server; once for each. In YAML an entry may also be {url, api_key, id, kv_events,
    kv_replay, kv_topic}."""
    worker_api_key: Annotated[SecretStr | None, Field(min_length=1)] = None
    """The API key for workers that have none of their own; better given by environment or file than as a flag."""
    alias: Annotated[tuple[Annotated[str, AfterValidator(alias_pair)], ...], AfterValidator(one_model_each)] = ()
    """Another name of a model, as NAME=MODEL, which workers are not told; once for each."""
    worker_dns: tuple[Annotated[str, AfterValidator(name_url)], ...] = ()
    """A URL like http://vllm:8000 whose host's addresses are workers, one each, looked up again and again; an address
    that is gone is drained. Once for each such name."""
    workers_file: Path | None = None
    """A YAML file with a list of workers as under `worker`, read again when it changes; one that is gone from it is
    drained, and a file with a mistake changes nothing."""
    discovery_interval: PositiveFloat = 5.0
    """Seconds between two looks at names and file."""
    emulate: Annotated[int, Field(ge=0, le=64)] = 0
    """How many emulated workers to start, which are processes that compute nothing and answer with made-up text."""

    policy: Annotated[
        str,
        AfterValidator(known_policy),
        Field(description=f"How requests are placed and ordered: {', '.join(POLICIES)}."),
    ] = "dlpm_home"
    extend_weight: PositiveFloat = 1.0
    """What a client is charged for a token of input that is not in the prefix cache, in cost units."""
    output_weight: NonNegativeFloat = 2.0
    """What a client is charged for a token of output, in cost units."""
    seed: int = 0
    """Seed of the random numbers that policies draw."""

    window: Literal["learned", "fixed", "off"] = "learned"
    """What may be in flight at a worker: as little as keeps its engine busy, as learned from its answers and metrics;
    the two limits below; or everything: then the engine alone orders it."""
    max_inflight: PositiveInt = 1024
    """Requests in flight at one worker, at most."""
    max_unstarted_tokens: PositiveInt = 16384
    """Uncached input tokens of the requests in flight at one worker that have no first token yet, at most."""
    max_queued: NonNegativeInt = 5000
    """Requests that wait here in all; beyond them, whoever has most waiting by weight is refused with 429."""
    max_queued_bytes: PositiveInt = 256 * 1024 * 1024
    """Bytes of the bodies of all requests that wait here; beyond them as with `max_queued`."""
    max_queued_per_client: NonNegativeInt = 0
    """Requests of one client that wait here, whether or not others do; 0 for no limit but what all have together."""
    max_queued_bytes_per_client: NonNegativeInt = 0
    """Bytes of their bodies; 0 for no limit but what all have together."""
    queue_ttl: PositiveFloat = 300.0
    """Seconds that a request may wait here before it is refused with 429."""

    client_limit: PositiveInt = 1000
    """Clients remembered that have nothing waiting or running; of twenty times as many others, only what they owe."""
    admin_key: Annotated[SecretStr | None, Field(min_length=16)] = None
    """The bearer token, 16 characters or more, of the operator's calls; without one, there are none of these."""
    admin_on_public: bool = False
    """Serve the operator's calls even where `host` is no loopback address."""
    identity: Annotated[tuple[Source, ...], Field(min_length=1)] = DEFAULT_ORDER
    """Where to look for the client's name; the first source that has one counts. Once for each."""
    trusted_header: tuple[str, ...] = ()
    """A header that names the client because a proxy in front sets it; once for each."""
    trusted_proxy: tuple[Annotated[str, AfterValidator(network)], ...] = LOOPBACK
    """An address, or a network like 10.0.0.0/8, from which such a header is believed; once for each."""
    clients: Path | None = None
    """The YAML file of clients and groups with their keys, weights and limits (`d2lpm keys`), read again when it
    changes; without one, keys name clients and are not checked."""
    isolate: Literal["none", "client", "group"] = "none"
    """Whose prefixes are kept apart in the caches, so that nobody learns by timing what others sent: each client's, or
    each group's; prefixes are then shared, and found cached, only on one side."""

    hash_secret: Annotated[SecretStr | None, Field(min_length=16)] = None
    """Key of the prompt hashes, 16 characters or more; drawn at random at each start where none is given, nor kept by
    `state`."""
    prefix_limit: PositiveInt = 4_000_000
    """Chunks of prompt text in the prefix tree over all workers; the least recently used go first."""
    kv_tokens_default: PositiveInt = 400_000
    """Tokens that the prefix cache of a worker is taken to hold where its engine does not tell."""
    min_match_tokens: NonNegativeInt = 64
    """Tokens of common prefix below which a match counts as none."""
    kv_events: Literal["auto", "off"] = "auto"
    """Whether to follow the KV events of workers that publish them, so that what these hold is known exactly."""
    tokenizer: Path | None = None
    """A folder with the tokenizer.json and chat template of the model, to match prompts by their tokens where KV events
    are followed; where none is given, a worker's /tokenize is asked."""
    token_budget: PositiveFloat = 0.05
    """Seconds that finding a prompt's tokens may take before it is matched by its bytes."""

    body_limit: PositiveInt = 16 * 1024 * 1024
    """Bytes of a request's body; a longer one is refused with 413."""
    max_held_bytes: PositiveInt = 256 * 1024 * 1024
    """Bytes held for all clients: bodies until their calls end, and answers that are not yet sent or read. A client, or
    an address where keys are not checked, may hold as much as is left free; beyond that it is refused with 429, and
    with 503 where nobody holds too much."""
    header_limit: Annotated[int, Field(ge=256)] = 64 * 1024
    """Bytes of a request's headers with its request line; more are refused with 431."""
    url_limit: Annotated[int, Field(ge=64)] = 8 * 1024
    """Bytes of a URL; a longer one is refused with 414."""
    header_timeout: PositiveFloat = 10.0
    """Seconds in which a connection's first headers must be complete, and any later ones from their first byte on."""
    body_timeout: PositiveFloat = 30.0
    """Seconds in which a request's body must be complete; as long again while it comes at 16 KiB per second or more."""
    write_timeout: PositiveFloat = 60.0
    """Seconds for which a client may read too little of an answer for the next part to be sent; then it is cut off."""
    keep_alive: PositiveFloat = 75.0
    """Seconds for which a client's connection is kept open between two calls."""
    max_connections: PositiveInt = 10_000
    """Connections of clients in all; beyond them one without a call gives way, of the address that has most."""
    max_connections_per_address: NonNegativeInt = 0
    """Connections of one address; 0 for no limit but what all have together, as behind a proxy."""
    heartbeat: NonNegativeFloat = 15.0
    """Seconds between the comments sent to a streaming client that waits; 0 for none."""
    response_headers: bool = True
    """Tell in headers of each answer which worker served it and how it was placed."""
    poll_interval: PositiveFloat = 0.5
    """Seconds between two readings of a worker's health and metrics."""
    connect_timeout: PositiveFloat = 5.0
    """Seconds in which a worker must accept a connection."""
    first_token_timeout: NonNegativeFloat = 120.0
    """Seconds to the first token, or ten times the worker's own slowest of late if that is more, after which a request
    goes to another worker; 0 for no limit."""
    token_timeout: NonNegativeFloat = 30.0
    """Seconds of silence within a stream, or a hundred times the worker's own time between tokens if that is more,
    after which another worker goes on with it; 0 for no limit."""
    silence_timeout: NonNegativeFloat = 5.0
    """Seconds, or three times what its prefill should take if that is more, in which a worker with calls under way must
    say anything, if only to a poll; else it is sent nothing until it does. 0 for no limit."""
    tries: PositiveInt = 3
    """Workers that a request is sent to at most, while they fail; 1 for one only."""
    retry_budget: NonNegativeFloat = 0.1
    """Retries per request over all clients; beyond them, a failure is told to the client."""
    retry_floor: NonNegativeInt = 10
    """Retries that may be made in any case in 10 s."""
    continuation: Literal["ids", "text", "off"] = "ids"
    """How another worker goes on with a stream whose worker failed: by the tokens so far where the engine tells them,
    else by the text; always by the text; or not at all, and the client is told."""
    breaker_failures: NonNegativeInt = 5
    """Of a worker's last 20 calls, how many must have failed, and at least half of them, for it to be left out; 0 to
    leave out none."""
    breaker_cooldown: PositiveFloat = 5.0
    """Seconds for which a worker is left out the first time; then one request tries it."""

    stored_responses: NonNegativeInt = 20_000
    """Stored responses (/v1/responses) of which it is remembered which worker keeps them, and for whom; beyond them,
    whoever has most of them loses its oldest."""
    background_responses: bool = False
    """Serve responses with `background`, which engines compute after they have answered; a client's limits and its bill
    hold until they have."""

    drain_timeout: NonNegativeFloat = 25.0
    """Seconds that calls under way have to end after SIGTERM or Ctrl-C, while new ones are refused; then they are cut.
    A second signal cuts them at once."""
    state: Path | None = None
    """A directory in which what must survive a restart is saved: debts, service, what the workers hold, and the key of
    the prompt hashes; without one, nothing survives."""
    state_interval: PositiveFloat = 5.0
    """Seconds between two times that it is saved; it is also saved at the end."""
    state_fresh: PositiveFloat = 600.0
    """Seconds after which a saved state is too old to be loaded."""
    journal: Path | None = None
    """A file to which every decision is appended, for `d2lpm replay`; it holds the key of the prompt hashes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages that go to standard error."""
    access_log: bool = False
    """Log every request: its address, method, path and status."""

    @model_validator(mode="after")
    def _knows_clients(self) -> "Settings":
        if self.clients is not None and not {Source.KEY, Source.HEADER} & set(self.identity):
            raise ValueError("clients: nobody could be one of them, for identity has neither key nor header")
        return self

    def without_addresses(self) -> dict[str, JsonValue]:
        """What may change a decision, for `model_validate`: not where anything is, and no secret."""
        return self.model_dump(mode="json", exclude=set(ADDRESSES))

    def host_names(self) -> frozenset[bytes] | None:
        """What a Host header may name, in lower case and without a port; None for anything.

        By default it is checked on loopback addresses: a page whose name its owner lets resolve to such an address (DNS
        rebinding) is for its reader's browser of the same origin as the router, and could read every answer.
        """
        if "*" in self.allowed_hosts or not (self.allowed_hosts or is_loopback(self.host)):
            return None
        own = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset(name.encode() for name in (*OWN_NAMES, own.lower(), *self.allowed_hosts))

    def aliases(self) -> Mapping[str, str]:
        """Models by their other names."""
        return {name: model for name, _, model in (text.partition("=") for text in self.alias)}

    def parameters(self) -> Mapping[str, object]:
        """The policy parameters, by the name of their group."""
        return {name: getattr(self, name) for name in PARAMETERS}
