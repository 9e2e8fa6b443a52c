"""All settings with their types and defaults; `sources` reads their values.

Each field is a flag, an environment variable and a key of the YAML file, and its docstring is its help text. Policy
parameters are not listed here: each class in `PARAMETERS` is a group of settings of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
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

from router.auth.identity import DEFAULT_ORDER, LOOPBACK, IdentitySource
from router.config.addresses import (
    FROZEN,
    KUBERNETES,
    WorkerAddress,
    bearer_key,
    cluster_lease,
    cluster_url,
    distinct,
    host_and_port,
    host_name,
    is_loopback,
    name_url,
    network,
    root_url,
)
from router.config.policy_names import NAMED, known_policy
from router.core.policies.registry import ORDERS, PARAMETERS, PLACEMENTS

ORIGIN: Final = r"^(\*|https?://[^\s/*]+)$"
SESSION_LABEL: Final = r"^(body\.prompt_cache_key|body\.metadata\.user_id|[a-z0-9_-]{1,64})$"
HEADER_NAME: Final = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
LEASE_NAME: Final = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
OWN_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
"""Host names by which a machine addresses itself."""
ADDRESSES: Final = frozenset(
    {
        "config",
        "clients",
        "trusted_proxy",
        "journal",
        "state",
        "host",
        "allowed_hosts",
        "cors_origins",
        "port",
        "admin_port",
        "admin_host",
        "tls_cert",
        "tls_key",
        "processes",
        "cluster",
        "cluster_store",
        "cluster_address",
        "cluster_secret_file",
        "cluster_tls_cert",
        "cluster_tls_key",
        "cluster_tls_ca",
        "worker",
        "worker_api_key",
        "worker_dns",
        "worker_kubernetes",
        "kubernetes_api",
        "kubernetes_namespace",
        "workers_file",
        "prefill",
        "decode",
        "admin_key",
        "emulate",
        "hash_secret",
        "tokenizer",
    }
)
"""Settings that locate something or give access to it. They change no scheduling decision."""

if TYPE_CHECKING:
    PolicyGroups = BaseModel
else:
    PolicyGroups = create_model("PolicyGroups", **{name: (kind, kind()) for name, kind in PARAMETERS.items()})


def number_or(*words: str) -> BeforeValidator:
    """Return a validator that refuses all but these words and numbers from 1 on: the error of a union names types."""

    def check(given: object) -> object:
        if given in words or re.fullmatch("[1-9][0-9]*", str(given)):
            return given
        raise ValueError(f"Input should be {', '.join(words)} or a number from 1 on")

    return BeforeValidator(check)


def revealed(value: object) -> object:
    """Return what JSON can express of a setting's value: a secret in the clear, a path as text.

    Only for what other users cannot read.
    """
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def alias_pair(text: str) -> str:
    """Return the text. Raises ValueError unless it is NAME=MODEL."""
    name, _, model = text.partition("=")
    if not name or not model:
        raise ValueError(f"{text!r} is not NAME=MODEL")
    return text


def one_model_each(aliases: tuple[str, ...]) -> tuple[str, ...]:
    """Return the aliases. Raises ValueError if two have the same name."""
    names = [text.partition("=")[0] for text in aliases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is listed twice")
    return aliases


class Settings(PolicyGroups):
    """Everything an operator can set. Each name in `PARAMETERS` is a field as well, of that group's class."""

    model_config = FROZEN

    config: Path | None = None
    """YAML file with any of these settings. Flags and environment variables override it."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all addresses of this machine."""
    allowed_hosts: tuple[Annotated[str, AfterValidator(host_name)], ...] = ()
    """Host name, without a port, that clients may use in the Host header; repeatable, * allows any. `host`, localhost,
    127.0.0.1 and [::1] are always allowed. If none is set and `host` is not a loopback address, any name is allowed."""
    cors_origins: tuple[Annotated[str, Field(pattern=ORIGIN)], ...] = ()
    """Origin of web pages that can call the router and read its answers, such as https://chat.example; repeatable, *
    allows any. Without it, browsers keep the answers from pages of other origins."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port to listen on; 0 picks a free one."""
    admin_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """TCP port for operators alone: metrics, /fairness, /sessions, /workers, /explain, the page /ui and the operator
    API are then served there and nowhere else, the first five without a key. 0 picks a free one. Without it they are at
    `port`, and need `admin_key` if `host` is not a loopback address."""
    admin_host: str | None = None
    """Address of `admin_port`; by default that of `host`."""
    tls_cert: Path | None = None
    """PEM file with the certificate of the router, and those that lead to a known one: all ports serve https. It is
    read again when it changes."""
    tls_key: Path | None = None
    """PEM file with the private key of `tls_cert`."""
    processes: Annotated[PositiveInt | Literal["auto"], number_or("auto")] = 1
    """Processes that serve: 1 does everything in one; from 2 on, one schedules and the others are fronts, which accept
    clients and relay answers. auto: one for each core. Each front has an equal part of the limits on connections and
    held bytes."""
    cluster: Annotated[SecretStr | None, AfterValidator(cluster_lease)] = None
    """Share clients and workers with other routers as one fair router: valkey://HOST:PORT/NAME or redis://, with TLS
    valkeys:// or rediss://, where NAME is that of the cluster. One of its replicas schedules for all. With a password
    in it, prefer the environment or the file to a flag. kubernetes: a Lease in the pod's namespace says which one."""
    cluster_store: Annotated[SecretStr | None, AfterValidator(cluster_url)] = None
    """With `cluster` kubernetes: the store of the state, valkey://HOST:PORT/NAME as above. NAME is also the Lease's."""
    cluster_address: Annotated[str, AfterValidator(host_and_port)] = "127.0.0.1:0"
    """HOST:PORT at which the fronts of other replicas reach the scheduler of this one while it leads."""
    cluster_secret_file: Path | None = None
    """File with a secret that all replicas of the cluster have. By it they know each other; without it,
    `cluster_address` must be a loopback address."""
    cluster_tls_cert: Path | None = None
    """PEM file with the certificate of this replica, and those that lead to `cluster_tls_ca`: replicas then encrypt
    what they tell each other, and accept nobody without such a certificate. It is read again for each connection."""
    cluster_tls_key: Path | None = None
    """PEM file with the private key of `cluster_tls_cert`."""
    cluster_tls_ca: Path | None = None
    """PEM file with the certificate of the authority of this cluster, which must sign nothing but its replicas."""
    worker: Annotated[tuple[WorkerAddress, ...], AfterValidator(distinct)] = ()
    """URL of a vLLM or SGLang server; repeatable. In YAML also {url, api_key, id, kv_events, kv_replay, kv_topic, rank,
    group, role}."""
    prefill: tuple[WorkerAddress, ...] = ()
    """URL of a worker that computes prompts and hands them to decode workers; repeatable. A model with such workers has
    its requests computed in two parts. In YAML an entry can be as in `worker`."""
    decode: tuple[WorkerAddress, ...] = ()
    """URL of a worker that computes answers to the prompts of prefill workers; repeatable. In YAML an entry can be as
    in `worker`."""
    handoff_seconds: Annotated[float, Field(ge=1)] = 20.0
    """Greatest age of a prefilled prompt that is sent to a decode worker; then it is prefilled again. At least 5 s less
    than the lease of the prefill workers (vLLM: kv_lease_duration, 30 s), after which vLLM answers with wrong text."""
    pd_fallback: bool = True
    """Let decode workers compute whole requests while a model has no living prefill worker. If not, its requests are
    refused. SGLang's decode servers cannot."""
    connector: Literal["nixl", "mooncake"] = "nixl"
    """What carries KV caches between the vLLM workers that compute prompts and those that compute answers. In YAML a
    worker's entry can say it, too, and the `bootstrap_port` of one that computes prompts (Mooncake: 8998)."""
    worker_api_key: Annotated[SecretStr | None, Field(min_length=1), AfterValidator(bearer_key)] = None
    """API key sent to workers that have no key of their own. Prefer the environment or the file to a flag."""
    alias: Annotated[tuple[Annotated[str, AfterValidator(alias_pair)], ...], AfterValidator(one_model_each)] = ()
    """Additional name for a model, as NAME=MODEL; repeatable. Workers receive the model's own name."""
    worker_dns: tuple[Annotated[str, AfterValidator(name_url)], ...] = ()
    """URL such as http://vllm:8000 whose host name has one address per worker; repeatable. A worker whose
    address is gone is drained."""
    worker_kubernetes: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Selector such as app=vllm of the labels of a headless Service of Kubernetes, each ready pod of which is a worker;
    repeatable. Its port named http counts, else its first. The router watches the EndpointSlices."""
    kubernetes_api: Annotated[str, AfterValidator(root_url)] | None = None
    """URL of the API of Kubernetes, such as that of kubectl proxy; by default the one that a pod is given."""
    kubernetes_namespace: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")] | None = None
    """Namespace of the Services of `worker_kubernetes`; by default the router's own."""
    workers_file: Path | None = None
    """YAML file with a list of workers, in the form of `worker`. It is read again when it changes: a worker that is
    gone is drained, and a file with a mistake changes nothing."""
    ranks: Annotated[Literal["auto", "off"] | PositiveInt, number_or("auto", "off")] = "auto"
    """Data-parallel ranks behind each URL, each of which is a worker. auto: as the engine reports. off: a URL is one
    worker, and its engine chooses the rank."""
    barrier: Literal["auto", "off"] = "auto"
    """Which ranks step together. auto: those of one URL, unless its engine says that they do not, and those that name
    the same `group`. off: none."""
    discovery_interval: PositiveFloat = 5.0
    """Seconds between two lookups of `worker_dns` and `workers_file`."""
    emulate: Annotated[int, Field(ge=0, le=64)] = 0
    """Emulated workers to start, for a trial without a GPU; they answer with made-up text."""

    policy: Annotated[
        str,
        AfterValidator(known_policy),
        Field(
            description=f"Scheduling policy: {', '.join(NAMED)}; or PLACEMENT+ORDER, with placement "
            f"{', '.join(PLACEMENTS)} and order {', '.join(ORDERS)}. Unset, it is dlpm_balance if ranks step together."
        ),
    ] = "dlpm_home"
    extend_weight: PositiveFloat = 1.0
    """Cost units that a client is charged per input token that is not in the prefix cache (w_e)."""
    output_weight: NonNegativeFloat = 2.0
    """Cost units that a client is charged per output token (w_q)."""
    seed: int = 0
    """Seed of the random numbers that policies draw."""

    window: Literal["learned", "fixed", "off"] = "learned"
    """Admission window of each worker. learned: as little in flight as keeps the engine busy, learned from its answers
    and metrics. fixed: `max_inflight` and `max_unstarted_tokens`. off: no limit, so the engine alone orders
    requests."""
    max_inflight: PositiveInt = 1024
    """Requests in flight at one worker, at most."""
    max_unstarted_tokens: PositiveInt = 16384
    """Uncached input tokens, at most, of the requests in flight at one worker that have no first token yet."""
    max_queued: NonNegativeInt = 5000
    """Requests that wait in the router, at most. Beyond it, the client with most waiting for its weight is refused
    (429)."""
    max_queued_bytes: PositiveInt = 256 * 1024 * 1024
    """Bytes of the bodies of all waiting requests, at most; beyond it as with `max_queued`."""
    max_queued_per_client: NonNegativeInt = 0
    """Waiting requests of one client, at most, however few others wait; 0 for no limit per client."""
    max_queued_bytes_per_client: NonNegativeInt = 0
    """Bytes of the bodies of one client's waiting requests, at most; 0 for no limit per client."""
    queue_ttl: PositiveFloat = 300.0
    """Seconds that a request can wait in the router before it is refused (429)."""

    sessions: Literal["off", "labels", "prefix", "both"] = "off"
    """Admit agent sessions to the KV cache of the fleet, so that their contexts do not evict each other. labels: calls
    name their session. prefix: a prompt continues an answer to the same client. both: by the label, or by the prefix
    where there is none."""
    session_labels: Annotated[tuple[Annotated[str, Field(pattern=SESSION_LABEL)], ...], Field(min_length=1)] = (
        "x-claude-code-session-id",
        "session-id",
        "session_id",
        "x-session-affinity",
        "x-opencode-session",
        "x-dynamo-session-id",
        "x-smg-routing-key",
        "x-session-id",
        "body.prompt_cache_key",
        "body.metadata.user_id",
    )
    """Header that names a call's session, or body.prompt_cache_key, or body.metadata.user_id for what follows _session_
    in it; repeatable, in order of precedence."""
    session_fill: Annotated[float, Field(gt=0, le=1)] = 0.92
    """Share of each worker's KV cache in which sessions get places. Their contexts can grow beyond it."""
    session_idle: NonNegativeFloat = 40.0
    """Seconds without a call after which a session gives way to any that waits; fewer if its worker has no work."""
    session_idle_after_turn: NonNegativeFloat = 5.0
    """The same after an answer that ended the turn instead of asking for a tool, or after a session's only call."""
    session_turn: NonNegativeFloat = 2.0
    """Turn of a session, as a multiple of what its context costs to compute. After it, the session gives way to one of
    a client with less service; before, to one of a client with far less."""
    session_growth: NonNegativeInt = 2000
    """Tokens reserved for a session beside its context."""
    session_grace: NonNegativeInt = 4000
    """Calls with fewer input tokens belong to no session."""
    session_limit: PositiveInt = 20_000
    """Sessions that are remembered; those without a call and without room in a KV cache are forgotten first."""
    client_limit: PositiveInt = 1000
    """Idle clients whose full record is kept. For twenty times as many more, only their debt is kept."""
    admin_key: Annotated[SecretStr | None, Field(min_length=16), AfterValidator(bearer_key)] = None
    """Bearer token of the operator API, 16 characters or more. Without it, the operator API is off."""
    admin_on_public: bool = False
    """Serve the operator API at `port` even if `host` is not a loopback address."""
    identity: Annotated[tuple[IdentitySource, ...], Field(min_length=1)] = DEFAULT_ORDER
    """Sources of a client's name, in order of precedence; repeatable."""
    trusted_header: tuple[Annotated[str, Field(pattern=HEADER_NAME)], ...] = ()
    """Header that names the client, set by a proxy in front; repeatable."""
    trusted_proxy: tuple[Annotated[str, AfterValidator(network)], ...] = LOOPBACK
    """Address, or network such as 10.0.0.0/8, from which `trusted_header` is accepted; repeatable."""
    clients: Path | None = None
    """YAML file with keys, weights and limits of clients and groups (see `d2lpm keys`), read again when it
    changes. Without it, keys name clients but are not checked."""
    usage_days: PositiveInt = 62
    """Days (UTC) for which usage is kept by client and model, for /v1/usage and the operator's /usage."""
    isolate: Literal["none", "client", "group"] = "none"
    """Keep the cached prefixes of each client, or of each group, apart, so that timing does not reveal what others
    sent. Prefixes are then shared only within a client or group."""

    hash_secret: Annotated[SecretStr | None, Field(min_length=16)] = None
    """Key of the prompt hashes, 16 characters or more. By default it is read from `state`, or drawn at random."""
    prefix_limit: PositiveInt = 4_000_000
    """Chunks of prompt text in the prefix tree, over all workers; the least recently used are removed first."""
    kv_tokens_default: PositiveInt = 400_000
    """Tokens assumed for the prefix cache of a worker whose engine does not report its size."""
    min_match_tokens: NonNegativeInt = 64
    """Tokens below which a common prefix counts as no match."""
    kv_events: Literal["auto", "off"] = "auto"
    """Follow the KV events of workers that publish them, so that their cache contents are known exactly."""
    tokenizer: Path | None = None
    """Folder with the model's tokenizer.json and chat template, to match prompts against KV events by their tokens.
    Without it, the router calls a worker's /tokenize."""
    token_budget: PositiveFloat = 0.05
    """Seconds that tokenizing a prompt can take before the prompt is matched by its bytes instead."""

    body_limit: PositiveInt = 16 * 1024 * 1024
    """Bytes of a request body, at most; a longer one is refused (413)."""
    max_held_bytes: PositiveInt = 256 * 1024 * 1024
    """Bytes held for all clients, at most: bodies until their calls end, and answers not yet sent or read. One client
    (one address where keys are not checked) can hold as much as is left free; beyond it, that client is refused (429),
    or the call is refused (503) if no client holds too much."""
    header_limit: Annotated[int, Field(ge=256)] = 64 * 1024
    """Bytes of a request's request line and headers, at most; more are refused (431)."""
    url_limit: Annotated[int, Field(ge=64)] = 8 * 1024
    """Bytes of a URL, at most; a longer one is refused (414)."""
    header_timeout: PositiveFloat = 10.0
    """Seconds in which the headers of a request must be complete, from the connection or from their first byte on."""
    body_timeout: PositiveFloat = 30.0
    """Seconds in which a request body must be complete, extended while it arrives at 16 KiB per second or more."""
    write_timeout: PositiveFloat = 60.0
    """Seconds for which a client can fail to read its answer before the connection is closed."""
    keep_alive: PositiveFloat = 75.0
    """Seconds for which a client's idle connection stays open."""
    max_connections: PositiveInt = 10_000
    """Client connections, at most. Beyond it, an idle connection of the address with most of them is closed."""
    max_connections_per_address: NonNegativeInt = 0
    """Connections of one address, at most; 0 for no limit per address, as behind a proxy."""
    heartbeat: NonNegativeFloat = 15.0
    """Seconds between the comments sent to a streaming client that waits; 0 for none."""
    response_headers: bool = True
    """Add headers to each answer that name its worker and how the request was placed."""
    poll_interval: PositiveFloat = 0.5
    """Seconds between two polls of a worker's health and metrics."""
    connect_timeout: PositiveFloat = 5.0
    """Seconds in which a worker must accept a connection."""
    first_token_timeout: NonNegativeFloat = 120.0
    """Seconds to the first token after which a request goes to another worker, or ten times the worker's recent maximum
    if that is longer; 0 for no limit."""
    token_timeout: NonNegativeFloat = 30.0
    """Seconds without a token after which another worker continues a stream, or a hundred times the worker's time
    between tokens if that is longer; 0 for no limit."""
    silence_timeout: NonNegativeFloat = 5.0
    """Seconds in which a worker with requests in flight must send anything, even an answer to a poll, or three times
    the expected prefill if that is longer. A silent worker is sent nothing until it answers again; 0 for no limit."""
    tries: PositiveInt = 3
    """Workers that a failing request is sent to, at most; 1 for no retry."""
    retry_budget: NonNegativeFloat = 0.1
    """Retries per request, over all clients. Beyond it, a failure is passed to the client."""
    retry_floor: NonNegativeInt = 10
    """Retries allowed in any 10 s, whatever `retry_budget` says."""
    continuation: Literal["ids", "text", "off"] = "ids"
    """How another worker continues a stream whose worker failed. ids: from the token ids so far, else from the text.
    text: from the text. off: it does not, and the client receives the error."""
    breaker_failures: NonNegativeInt = 5
    """Failures among a worker's last 20 calls, and at least half of them, that open its circuit breaker; 0 for
    never."""
    breaker_cooldown: PositiveFloat = 5.0
    """Seconds for which a circuit breaker stays open the first time; then one request tries the worker."""

    stored_responses: NonNegativeInt = 20_000
    """Stored responses (/v1/responses) whose worker and client are remembered. Beyond it, the client with most of them
    loses its oldest."""
    strict: bool = False
    """Refuse (400) a call whose body chooses what the router chooses, such as a rank, instead of dropping that
    field."""
    background_responses: bool = False
    """Serve `background` responses, which engines compute after they have answered. They count against the client's
    limits and bill until they are computed."""

    drain_timeout: NonNegativeFloat = 25.0
    """Seconds in which requests in flight can end after SIGTERM or Ctrl-C, while new ones are refused. A second signal
    ends them at once."""
    drain_delay: NonNegativeFloat = 0.0
    """Seconds after SIGTERM or Ctrl-C in which new requests are still accepted, while /ready says 503 already, so that
    load balancers notice before any is refused. `drain_timeout` begins after it."""
    state: Path | None = None
    """Directory for what survives a restart: deficits, service, cache contents and the key of the prompt hashes.
    Without it, nothing survives."""
    state_interval: PositiveFloat = 5.0
    """Seconds between two saves of the state; it is also saved at the end."""
    state_fresh: PositiveFloat = 600.0
    """Seconds after which a saved state is too old to be restored; the usage of past days is restored all the same."""
    journal: Path | None = None
    """File to which every scheduling decision is appended, for `d2lpm replay`. It contains the key of the prompt
    hashes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of the messages on standard error."""
    log_format: Literal["text", "json"] = "text"
    """Format of these messages: lines of text, or one JSON object each."""
    access_log: bool = False
    """Log every call when it has ended: its client, model, worker, tokens, times and outcome. Calls that failed or were
    refused are warnings, so `log_level` warning logs only these."""
    otel: bool = False
    """Send traces of calls, and metrics of the GenAI conventions, to an OpenTelemetry collector, by OTLP over HTTP. The
    standard variables say where it is and what share of the calls is traced: OTEL_EXPORTER_OTLP_ENDPOINT, and so on.
    Needs the extra otel."""

    @model_validator(mode="after")
    def _has_fitting_roles(self) -> "Settings":
        for name, given in (("prefill", self.prefill), ("decode", self.decode)):
            for worker in given:
                if worker.role not in ("both", name):
                    raise ValueError(f"{name}: {worker.id} has the role {worker.role}")
        roles = {worker.role for worker in distinct(self.workers())}
        elsewhere = self.worker_dns or self.worker_kubernetes or self.workers_file or self.emulate
        if roles == {"prefill"} and not elsewhere:
            raise ValueError("prefill: there is no decode worker for these prefill workers; name some with --decode")
        return self

    @model_validator(mode="after")
    def _has_fitting_ports(self) -> "Settings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert: set it together with tls_key; one of them is missing")
        if self.admin_host is not None and self.admin_port is None:
            raise ValueError("admin_host: it needs admin_port, which is not set")
        if self.admin_port and self.admin_port == self.port:
            raise ValueError("admin_port: it is the same as port")
        return self

    @property
    def leads_by_kubernetes(self) -> bool:
        """Whether a Lease of Kubernetes says which replica leads."""
        return self.cluster is not None and self.cluster.get_secret_value() == KUBERNETES

    @property
    def store_url(self) -> str:
        """The URL of the cluster's store, for a router in a cluster."""
        found = self.cluster_store if self.leads_by_kubernetes else self.cluster
        assert found is not None
        return found.get_secret_value()

    @model_validator(mode="after")
    def _has_fitting_cluster(self) -> "Settings":
        if self.cluster is None:
            return self
        if self.leads_by_kubernetes != (self.cluster_store is not None):
            raise ValueError(
                "cluster_store: set it with cluster kubernetes, as a Lease holds no state, and with no other"
            )
        if self.leads_by_kubernetes and not re.fullmatch(LEASE_NAME, urlsplit(self.store_url).path.strip("/")):
            raise ValueError(
                "cluster_store: in Kubernetes, a name has only lower-case letters, digits, dots and dashes"
            )
        if self.state is not None:
            raise ValueError("state: a cluster keeps its state in its store, not in a folder")
        host = urlsplit(f"//{self.cluster_address}").hostname or ""
        if self.cluster_secret_file is None and not is_loopback(host):
            raise ValueError("cluster_address: it is not a loopback address, so cluster_secret_file is needed")
        if len({path is None for path in (self.cluster_tls_cert, self.cluster_tls_key, self.cluster_tls_ca)}) > 1:
            raise ValueError(
                "cluster_tls_cert: set it together with cluster_tls_key and cluster_tls_ca; one is missing"
            )
        return self

    @model_validator(mode="after")
    def _knows_clients(self) -> "Settings":
        if self.clients is not None and not {IdentitySource.KEY, IdentitySource.HEADER} & set(self.identity):
            raise ValueError("clients: it needs key or header in identity, or no client could be identified")
        return self

    def workers(self) -> tuple[WorkerAddress, ...]:
        """Return the workers that the settings name, each with its role."""
        prefill = [worker.model_copy(update={"role": "prefill"}) for worker in self.prefill]
        decode = [worker.model_copy(update={"role": "decode"}) for worker in self.decode]
        return (*self.worker, *prefill, *decode)

    def without_addresses(self) -> dict[str, JsonValue]:
        """Return the settings that can change a scheduling decision, for `model_validate`: no addresses and no
        secrets.
        """
        return self.model_dump(mode="json", exclude=set(ADDRESSES))

    def host_names(self, host: str | None = None) -> frozenset[bytes] | None:
        """Return the host names that a Host header can contain, in lower case and without a port; None for any.

        `host`: the address of the port; by default that of the port for clients.

        On loopback addresses the check is on by default, against DNS rebinding: a web page whose own name resolves to
        a loopback address has, for the browser, the same origin as the router, and could read every answer.
        """
        at = host or self.host
        if "*" in self.allowed_hosts or not (self.allowed_hosts or is_loopback(at)):
            return None
        own = f"[{at}]" if ":" in at else at
        return frozenset(name.encode() for name in (*OWN_NAMES, own.lower(), *self.allowed_hosts))

    def aliases(self) -> Mapping[str, str]:
        """Return the model of each alias."""
        return {name: model for name, _, model in (text.partition("=") for text in self.alias)}

    def parameters(self) -> Mapping[str, object]:
        """Return the policy parameters by the name of their group."""
        return {name: getattr(self, name) for name in PARAMETERS}
