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
from router.config.checks import HEADER_NAME, NAMESPACE, ORIGIN, SESSION_LABEL, alias_pair, number_or, one_model_each
from router.config.policy_names import NAMED, known_policy
from router.core.policies.registry import ORDERS, PARAMETERS, PLACEMENTS

LEASE_NAME: Final = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
OWN_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
"""Host names by which a machine addresses itself."""
ADDRESSES: Final = frozenset(
    {
        *("config", "clients", "state", "journal", "tokenizer", "workers_file"),
        *("host", "port", "admin_host", "admin_port", "allowed_hosts", "cors_origins", "trusted_proxy", "processes"),
        *("tls_cert", "tls_key", "admin_key", "hash_secret", "worker_api_key"),
        *("worker", "prefill", "decode", "worker_dns", "worker_kubernetes", "emulate"),
        *("kubernetes_api", "kubernetes_namespace"),
        *("cluster", "cluster_store", "cluster_address", "cluster_secret_file"),
        *("cluster_tls_cert", "cluster_tls_key", "cluster_tls_ca"),
    }
)
"""Settings that locate something or give access to it. They change no scheduling decision."""

if TYPE_CHECKING:
    PolicyGroups = BaseModel
else:
    PolicyGroups = create_model("PolicyGroups", **{name: (kind, kind()) for name, kind in PARAMETERS.items()})


def revealed(value: object) -> object:
    """Return what JSON can express of a setting's value: a secret in the clear, a path as text.

    Only for what other users cannot read.
    """
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


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
    cors_origins: tuple[Annotated[str, ORIGIN], ...] = ()
    """Origin of web pages that can call the router and read its answers, such as https://chat.example; repeatable, *
    allows any. Without it, browsers keep the answers from pages of other origins."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port to listen on; 0 picks a free one."""
    admin_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """TCP port for operators only. Metrics, /fairness, /sessions, /workers, /explain, the page /ui and the operator API
    are then served there and nowhere else, and the first five need no key. 0 picks a free one. Without this port they
    are at `port`, and need `admin_key` unless `host` is a loopback address."""
    admin_host: str | None = None
    """Address on which `admin_port` listens; by default that of `host`."""
    tls_cert: Path | None = None
    """PEM file with the router's certificate and its chain of intermediate certificates. All ports then serve https. It
    is reloaded when it changes."""
    tls_key: Path | None = None
    """PEM file with the private key of `tls_cert`."""
    processes: Annotated[PositiveInt | Literal["auto"], number_or("auto")] = 1
    """Number of processes. 1: one does everything. 2 or more: one schedules and the others are fronts, which accept
    clients and relay answers. auto: one for each core. Each front has an equal part of the limits on connections and
    held bytes."""
    cluster: Annotated[SecretStr | None, AfterValidator(cluster_lease)] = None
    """Share clients and workers with other routers, as one fair router. valkey://HOST:PORT/NAME or
    redis://HOST:PORT/NAME (with TLS valkeys:// or rediss://): the store, and the name of the cluster. One replica
    schedules for all of them. If the URL has a password, set it in the environment or the file, not as a flag.
    kubernetes: a Lease in the pod's namespace elects that replica."""
    cluster_store: Annotated[SecretStr | None, AfterValidator(cluster_url)] = None
    """With `cluster` kubernetes: the store of the state, valkey://HOST:PORT/NAME as above. The Lease is called NAME,
    too."""
    cluster_address: Annotated[str, AfterValidator(host_and_port)] = "127.0.0.1:0"
    """HOST:PORT at which the fronts of other replicas reach the scheduler of this one while it leads."""
    cluster_secret_file: Path | None = None
    """File with a secret that all replicas of the cluster share, and by which they authenticate each other. Without it,
    `cluster_address` must be a loopback address."""
    cluster_tls_cert: Path | None = None
    """PEM file with this replica's certificate and its chain up to `cluster_tls_ca`. Replicas then encrypt their
    connections and accept only peers with such a certificate. It is read again for each connection."""
    cluster_tls_key: Path | None = None
    """PEM file with the private key of `cluster_tls_cert`."""
    cluster_tls_ca: Path | None = None
    """PEM file with the certificate of the cluster's own authority, which must sign nothing but its replicas."""
    worker: Annotated[tuple[WorkerAddress, ...], AfterValidator(distinct)] = ()
    """URL of a vLLM or SGLang server; repeatable. In YAML also {url, api_key, id, kv_events, kv_replay, kv_topic, rank,
    group, role}."""
    prefill: tuple[WorkerAddress, ...] = ()
    """URL of a worker that computes prompts and hands them to decode workers; repeatable. The requests for a model with
    such workers are computed in two parts. In YAML, entries can have the form of those of `worker`."""
    decode: tuple[WorkerAddress, ...] = ()
    """URL of a worker that computes the answers to prompts from prefill workers; repeatable. In YAML, entries can have
    the form of those of `worker`."""
    handoff_seconds: Annotated[float, Field(ge=1)] = 20.0
    """Maximum age in seconds of a prefilled prompt when it is sent to a decode worker; an older one is prefilled again.
    Keep it at least 5 s below the lease of the prefill workers (vLLM: kv_lease_duration, 30 s): after that, vLLM
    answers with wrong text."""
    pd_fallback: bool = True
    """Let decode workers compute whole requests while a model has no living prefill worker; otherwise its requests are
    refused. SGLang's decode servers cannot compute whole requests."""
    connector: Literal["nixl", "mooncake"] = "nixl"
    """What transfers KV caches between vLLM's prefill and decode workers. In YAML, a worker's entry can set it for that
    worker, and with Mooncake also the `bootstrap_port` of a prefill worker (8998)."""
    worker_api_key: Annotated[SecretStr | None, Field(min_length=1), AfterValidator(bearer_key)] = None
    """API key sent to workers that have no key of their own. Prefer the environment or the file to a flag."""
    alias: Annotated[tuple[Annotated[str, AfterValidator(alias_pair)], ...], AfterValidator(one_model_each)] = ()
    """Additional name for a model, as NAME=MODEL; repeatable. Workers receive the model's own name."""
    worker_dns: tuple[Annotated[str, AfterValidator(name_url)], ...] = ()
    """URL such as http://vllm:8000 whose host name has one address per worker; repeatable. A worker is drained when its
    address disappears."""
    worker_kubernetes: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Label selector, such as app=vllm, of headless Services in Kubernetes; repeatable. Each of their ready pods is a
    worker, at the Service's port named http, else at its first port. The router watches the EndpointSlices."""
    kubernetes_api: Annotated[str, AfterValidator(root_url)] | None = None
    """URL of the Kubernetes API, such as that of a kubectl proxy; by default the one that the pod is given."""
    kubernetes_namespace: Annotated[str, NAMESPACE] | None = None
    """Namespace of the Services that `worker_kubernetes` selects; by default the router's own."""
    workers_file: Path | None = None
    """YAML file with a list of workers, in the form of `worker`. It is reloaded when it changes: a worker that it no
    longer lists is drained, and a file with a mistake changes nothing."""
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
    """Admission window of each worker. learned: the smallest load that keeps the engine busy, learned from its answers
    and metrics. fixed: `max_inflight` and `max_unstarted_tokens`. off: no limit, so the engine alone orders
    requests."""
    max_inflight: PositiveInt = 1024
    """Maximum number of requests in flight at one worker."""
    max_unstarted_tokens: PositiveInt = 16384
    """Maximum number of uncached input tokens, summed over those requests in flight at one worker that have no first
    token yet."""
    max_queued: NonNegativeInt = 5000
    """Maximum number of requests that wait in the router. Beyond it, a request of the client with the most waiting
    requests relative to its weight is refused (429)."""
    max_queued_bytes: PositiveInt = 256 * 1024 * 1024
    """Maximum size in bytes of the bodies of all waiting requests. Beyond it, requests are refused as with
    `max_queued`."""
    max_queued_per_client: NonNegativeInt = 0
    """Maximum number of waiting requests of one client, even if nobody else waits; 0: no such limit."""
    max_queued_bytes_per_client: NonNegativeInt = 0
    """Maximum size in bytes of the bodies of one client's waiting requests; 0: no such limit."""
    queue_ttl: PositiveFloat = 300.0
    """Seconds for which a request can wait in the router before it is refused (429)."""

    sessions: Literal["off", "labels", "prefix", "both"] = "off"
    """Admit agent sessions to the KV cache of the fleet, so that their contexts do not evict each other. labels: calls
    name their session. prefix: a prompt continues an answer to the same client. both: by the label, or by the prefix
    where there is none."""
    session_labels: Annotated[tuple[Annotated[str, SESSION_LABEL], ...], Field(min_length=1)] = (
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
    """Seconds without a call after which a session gives way to any session that waits; fewer if its worker has no
    work."""
    session_idle_after_turn: NonNegativeFloat = 5.0
    """The same as `session_idle` after an answer that ended the turn instead of asking for a tool, or after a session's
    only call."""
    session_turn: NonNegativeFloat = 2.0
    """Turn of a session, as a multiple of what its context costs to compute. After it, the session gives way to one of
    a client with less service; before, to one of a client with far less."""
    session_growth: NonNegativeInt = 2000
    """Tokens reserved for a session in addition to its context."""
    session_grace: NonNegativeInt = 4000
    """Calls with fewer input tokens belong to no session."""
    session_limit: PositiveInt = 20_000
    """Maximum number of sessions that are remembered. Those without a call and without a place in a KV cache are
    forgotten first."""
    client_limit: PositiveInt = 1000
    """Number of idle clients whose full record is kept. Of twenty times as many others, only the debt is kept."""
    admin_key: Annotated[SecretStr | None, Field(min_length=16), AfterValidator(bearer_key)] = None
    """Bearer token of the operator API, at least 16 characters. Without it, the operator API is off."""
    admin_on_public: bool = False
    """Serve the operator API at `port` even if `host` is not a loopback address."""
    identity: Annotated[tuple[IdentitySource, ...], Field(min_length=1)] = DEFAULT_ORDER
    """Sources of a client's name, in order of precedence; repeatable."""
    trusted_header: tuple[Annotated[str, HEADER_NAME], ...] = ()
    """Header that names the client, set by a proxy in front; repeatable."""
    trusted_proxy: tuple[Annotated[str, AfterValidator(network)], ...] = LOOPBACK
    """Address, or network such as 10.0.0.0/8, from which `trusted_header` is accepted; repeatable."""
    clients: Path | None = None
    """YAML file with keys, weights and limits of clients and groups (see `d2lpm keys`), reloaded when it changes.
    Without it, keys name clients but are not checked."""
    usage_days: PositiveInt = 62
    """Number of days (UTC) for which usage is kept by client and model, for /v1/usage and the operator's /usage."""
    isolate: Literal["none", "client", "group"] = "none"
    """Keep the cached prefixes of each client or each group apart, so that nobody can infer from response times what
    others sent. Prefixes are then shared only within a client or group."""

    hash_secret: Annotated[SecretStr | None, Field(min_length=16)] = None
    """Key of the prompt hashes, at least 16 characters. By default it is read from `state`, or drawn at random."""
    prefix_limit: PositiveInt = 4_000_000
    """Maximum number of chunks of prompt text in the prefix tree, over all workers. The least recently used are removed
    first."""
    kv_tokens_default: PositiveInt = 400_000
    """Size in tokens assumed for the prefix cache of a worker whose engine does not report it."""
    min_match_tokens: NonNegativeInt = 64
    """A common prefix of fewer tokens than this counts as no match."""
    kv_events: Literal["auto", "off"] = "auto"
    """Follow the KV events of workers that publish them, so that their cache contents are known exactly."""
    tokenizer: Path | None = None
    """Folder with the model's tokenizer.json and chat template, to match prompts against KV events by their tokens.
    Without it, the router calls a worker's /tokenize."""
    token_budget: PositiveFloat = 0.05
    """Seconds that tokenizing a prompt can take before the prompt is matched by its bytes instead."""

    body_limit: PositiveInt = 16 * 1024 * 1024
    """Maximum size in bytes of a request body; a longer one is refused (413)."""
    max_held_bytes: PositiveInt = 256 * 1024 * 1024
    """Maximum number of bytes held for all clients: bodies until their calls end, and answers that are not yet sent or
    read. One client (one address where keys are not checked) can hold at most as much as is left free. Beyond that, the
    client is refused (429), or any call is refused (503) if no client holds too much."""
    header_limit: Annotated[int, Field(ge=256)] = 64 * 1024
    """Maximum size in bytes of the request line and headers of a request; more are refused (431)."""
    url_limit: Annotated[int, Field(ge=64)] = 8 * 1024
    """Maximum size in bytes of a URL; a longer one is refused (414)."""
    header_timeout: PositiveFloat = 10.0
    """Seconds within which the headers of a request must be complete, counted from the connection or from their first
    byte."""
    body_timeout: PositiveFloat = 30.0
    """Seconds within which a request body must be complete, extended while it arrives at 16 KiB per second or more."""
    write_timeout: PositiveFloat = 60.0
    """Seconds after which a connection is closed if its client reads nothing of its answer."""
    keep_alive: PositiveFloat = 75.0
    """Seconds for which an idle client connection stays open."""
    max_connections: PositiveInt = 10_000
    """Maximum number of client connections. Beyond it, an idle connection of the address with the most connections is
    closed."""
    max_connections_per_address: NonNegativeInt = 0
    """Maximum number of connections of one address; 0: no such limit, as is needed behind a proxy."""
    heartbeat: NonNegativeFloat = 15.0
    """Seconds between the blank lines that are sent to a streaming client while it waits; 0: none are sent."""
    response_headers: bool = True
    """Add headers to each answer that name its worker and how the request was placed."""
    strict: bool = False
    """Refuse (400) a call whose body sets what the router decides, such as a rank. By default, that field is
    dropped."""
    poll_interval: PositiveFloat = 0.5
    """Seconds between two polls of a worker's health and metrics."""
    connect_timeout: PositiveFloat = 5.0
    """Seconds within which a worker must accept a connection."""
    first_token_timeout: NonNegativeFloat = 120.0
    """Seconds to wait for the first token before a request is sent to another worker; ten times the worker's recent
    maximum if that is longer. 0: no limit."""
    token_timeout: NonNegativeFloat = 30.0
    """Seconds to wait for the next token before another worker continues a stream; a hundred times the worker's time
    between tokens if that is longer. 0: no limit."""
    silence_timeout: NonNegativeFloat = 5.0
    """Seconds within which a worker with requests in flight must send something, if only an answer to a poll; three
    times the expected prefill time if that is longer. A silent worker gets no requests until it answers again. 0: no
    limit."""
    tries: PositiveInt = 3
    """Maximum number of workers that a failing request is sent to; 1: no retries."""
    retry_budget: NonNegativeFloat = 0.1
    """Retries allowed per request, over all clients. Beyond it, the client receives the failure."""
    retry_floor: NonNegativeInt = 10
    """Retries that are allowed in any 10 s, even beyond `retry_budget`."""
    continuation: Literal["ids", "text", "off"] = "ids"
    """How another worker continues a stream whose worker failed. ids: from the token ids so far, or else from the text.
    text: from the text. off: not at all; the client receives the error."""
    breaker_failures: NonNegativeInt = 5
    """A worker's circuit breaker opens once this many of its last 20 calls failed, if these are at least half of them;
    0: never."""
    breaker_cooldown: PositiveFloat = 5.0
    """Seconds for which a circuit breaker stays open at first. Then a single request tries the worker."""

    stored_responses: NonNegativeInt = 20_000
    """Maximum number of stored responses (/v1/responses) whose worker and client are remembered. Beyond it, the oldest
    one of the client with the most is forgotten."""
    background_responses: bool = False
    """Serve `background` responses, which an engine goes on to compute after it has answered. They count against the
    client's limits and bill until they are computed."""

    drain_timeout: NonNegativeFloat = 25.0
    """Seconds that requests in flight have to end after SIGTERM or Ctrl-C, while new ones are refused. A second signal
    ends them at once."""
    drain_delay: NonNegativeFloat = 0.0
    """Seconds after SIGTERM or Ctrl-C during which new requests are still accepted, while /ready already says 503, so
    that load balancers notice before any is refused. `drain_timeout` begins after it."""
    state: Path | None = None
    """Folder for what survives a restart: deficits, service, cache contents and the key of the prompt hashes. Without
    it, nothing survives."""
    state_interval: PositiveFloat = 5.0
    """Seconds between two saves of the state, which is also saved when the router stops."""
    state_fresh: PositiveFloat = 600.0
    """Seconds after which a saved state is too old to be restored. The usage of past days is restored whatever its
    age."""
    journal: Path | None = None
    """File to which every scheduling decision is appended, for `d2lpm replay`. It contains the key of the prompt
    hashes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of the messages on standard error."""
    log_format: Literal["text", "json"] = "text"
    """Format of log messages: lines of text, or one JSON object each."""
    access_log: bool = False
    """Log every call when it ends: client, model, worker, tokens, times and outcome. Calls that failed or were refused
    are warnings, so that `log_level` warning logs only these."""
    otel: bool = False
    """Send traces of calls, and metrics by the GenAI conventions, to an OpenTelemetry collector, by OTLP over HTTP. The
    standard variables (OTEL_EXPORTER_OTLP_ENDPOINT and so on) set its address and the share of calls that is traced.
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
    def _predicts_without_an_oracle(self) -> "Settings":
        if getattr(self.parameters()["brh"], "predictor", None) == "oracle":
            raise ValueError("brh.predictor: oracle needs the true lengths of answers, which only a simulation knows")
        return self

    @model_validator(mode="after")
    def _knows_clients(self) -> "Settings":
        if self.clients is not None and not {IdentitySource.KEY, IdentitySource.HEADER} & set(self.identity):
            raise ValueError("clients: it needs key or header in identity, or no client could be identified")
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
