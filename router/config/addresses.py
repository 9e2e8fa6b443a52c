"""Addresses in the settings: of workers, of a cluster's store, and of who may call. Each is checked as it is read."""

import re
from ipaddress import ip_address, ip_network
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    SecretStr,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from router.config.checks import matching
from router.runtime.mistakes import refuse_unknown_keys

FROZEN: Final = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
ZMQ_ENDPOINT: Final = matching(r"(tcp|ipc)://[^\s*]+", "an endpoint such as tcp://host:5557, without *")
WORKER_NAME: Final = matching(r"[A-Za-z0-9._:-]{1,64}", "1 to 64 letters, digits and . _ : -")
STORE_SCHEMES: Final = ("valkey", "redis", "valkeys", "rediss")
CLUSTER_NAME: Final = r"[A-Za-z0-9._-]{1,64}"
KUBERNETES: Final = "kubernetes"
"""In place of a store's URL: the lease of a cluster is an object of Kubernetes."""


def root_url(url: str) -> str:
    """Return the URL without a trailing slash. Raises ValueError unless it is the root of an HTTP server."""
    # The errors do not repeat the URL: it can contain a password.
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its words are about Python's types
        raise ValueError("not a URL like http://host:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or re.search(r"[\s,]", parts.netloc):
        raise ValueError("not a URL like http://host:8000")
    if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError("more than scheme, host and port; the router adds /v1 itself")
    parts.hostname.encode("idna")  # or raises: UnicodeError is a ValueError
    return f"{parts.scheme}://{parts.netloc}"


def name_url(url: str) -> str:
    """Return the URL as `root_url` does. Raises ValueError for https."""
    if (root := root_url(url)).startswith("https"):
        raise ValueError("only http:// can be looked up, because a certificate names a host and not its addresses")
    return root


def network(text: str) -> str:
    """Return the text. Raises ValueError unless it is an IP address or network."""
    ip_network(text)
    return text


def host_name(text: str) -> str:
    """Return the text in lower case. Raises ValueError if it contains a port or a scheme."""
    name = text.lower()
    if not text or "/" in name or (":" in name and not (name.startswith("[") and name.endswith("]"))):
        raise ValueError(f"{text!r} is not a host name without port; an IPv6 address needs brackets")
    return name


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on this address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_and_port(text: str) -> str:
    """Return the text. Raises ValueError unless it is HOST:PORT; an IPv6 address needs brackets."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port is None or parts.netloc != text or parts.username is not None:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return text


def cluster_url(url: SecretStr | None) -> SecretStr | None:
    """Return the URL. Raises ValueError unless it names a store and a cluster there."""
    if url is None:
        return None
    parts = urlsplit(url.get_secret_value())
    # The errors do not repeat the URL: it can contain a password.
    if parts.scheme not in STORE_SCHEMES or not parts.hostname or parts.port == 0 or parts.query or parts.fragment:
        raise ValueError("not a URL like valkey://host:6379/name")
    if not re.fullmatch(CLUSTER_NAME, parts.path.strip("/")):
        raise ValueError("the name of the cluster, after the slash, must be letters, digits, dots and dashes")
    return url


def cluster_lease(where: SecretStr | None) -> SecretStr | None:
    """Return what says where the lease of a cluster is. Raises ValueError unless it is Kubernetes or a store's URL."""
    return where if where is not None and where.get_secret_value() == KUBERNETES else cluster_url(where)


def bearer_key(key: SecretStr | None) -> SecretStr | None:
    """Return the key. Raises ValueError unless it can stand in a header: HTTP clients refuse to send others, and print
    the key when they do. Words with spaces between them are sent by all.
    """
    if key is not None and not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", key.get_secret_value()):
        raise ValueError("a key has only ASCII characters, and no spaces or line ends around it")
    return key


def own_name(url: str, rank: int | None) -> str:
    """Return the id of a worker that has no other."""
    netloc = urlsplit(url).netloc
    return netloc if rank is None else f"{netloc}@{rank}"


class WorkerAddress(BaseModel):
    """The address of one engine. A plain string is its URL."""

    model_config = FROZEN

    url: Annotated[str, AfterValidator(root_url)]
    api_key: Annotated[SecretStr | None, AfterValidator(bearer_key)] = None
    """API key sent to this worker instead of `worker_api_key`."""
    rank: NonNegativeInt | None = None
    """Its data-parallel rank, if each rank has a URL of its own."""
    id: Annotated[str, WORKER_NAME] = Field(default_factory=lambda given: own_name(given["url"], given["rank"]))
    """Name in metrics and headers; by default host and port, and @rank if it has one."""
    kv_events: Annotated[str, ZMQ_ENDPOINT] | None = None
    """Endpoint of its KV events, such as tcp://host:5557; by default the worker is asked for it."""
    kv_replay: Annotated[str, ZMQ_ENDPOINT] | None = None
    """Endpoint that replays past KV events."""
    kv_topic: str = ""
    group: Annotated[str, WORKER_NAME] | None = None
    """Ranks that name the same group step together; none: its ranks wait for no other."""
    role: Literal["both", "prefill", "decode"] = "both"
    """What it computes: prompts and answers, or prompts that it hands over, or answers to these. An SGLang says it
    itself."""
    connector: Literal["nixl", "mooncake"] | None = None
    """What carries KV caches, if it is a vLLM with a role; by default `connector`."""
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of a prefill worker's bootstrap server; by default 8998 for Mooncake, and as an SGLang reports."""

    @field_validator("id", mode="wrap")
    @classmethod
    def _own_name_or_checked(cls, given: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        """Accept the default id unchecked: a plan, a saved state and `d2lpm config` write it, with @rank or [::1]."""
        known = info.data
        is_own = "url" in known and "rank" in known and given == own_name(known["url"], known["rank"])
        return given if is_own else check(given)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: object) -> object:
        refuse_unknown_keys(given, cls.model_fields)
        return {"url": given} if isinstance(given, str) else given


def distinct(workers: tuple[WorkerAddress, ...]) -> tuple[WorkerAddress, ...]:
    """Return the workers. Raises ValueError if two have the same URL or the same id."""
    for worker in workers:
        if sum(worker.url == other.url or worker.id == other.id for other in workers) > 1:
            raise ValueError(f"{worker.id} at {worker.url} is listed twice")
    return workers
