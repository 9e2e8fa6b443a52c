"""Workers as the Kubernetes API names them: the ready addresses of EndpointSlices, listed once and then watched.

A headless Service has the API server keep one or more EndpointSlices, with the Service's labels. Each ready address in
them is a worker.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.config.addresses import WorkerAddress
from router.errors import ConfigError
from router.upstream.discovery.sources import WARN_SECONDS, Workers

log = logging.getLogger(__name__)

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its token, its namespace and the certificate of the API."""
PORT_NAME: Final = "http"
"""The port of a Service at which its workers serve, if it has several."""
ROLE_LABEL: Final = "d2lpm-role"
"""The label of a Service that says which role its workers have."""
ANSWER_SECONDS: Final = 10.0
"""Seconds in which the API must answer a call."""
WATCH_SECONDS: Final = 240
"""Seconds after which the API ends a watch, so that one whose connection has died unseen does not last."""
PAUSE_SECONDS: Final = 1.0
"""Seconds between a failure and the next call."""
LONGEST_ID: Final = 64
LENIENT: Final = ConfigDict(extra="ignore", frozen=True)


class KubernetesApi(NamedTuple):
    """How to reach the API."""

    url: str
    namespace: str
    token: Path | None = None
    """File with the bearer token; read for each call, as it is renewed. None: without a token."""
    certificate: Path | None = None
    """File with the certificate of the authority of the API; None for the usual ones."""

    async def client(self, answer_seconds: float) -> httpx.AsyncClient:
        """Return a client with this timeout for each answer. Raises OSError if the certificate is unreadable."""
        verify: ssl.SSLContext | bool = True
        if self.certificate is not None:
            verify = await asyncio.to_thread(ssl.create_default_context, cafile=str(self.certificate))
        return httpx.AsyncClient(base_url=self.url, verify=verify, timeout=answer_seconds, trust_env=False)

    async def headers(self) -> dict[str, str]:
        """Return the headers of a call. Raises OSError if the token cannot be read."""
        if self.token is None:
            return {}
        token = await asyncio.to_thread(self.token.read_text, "utf-8")
        return {"authorization": f"Bearer {token.strip()}"}


def kubernetes_api(
    url: str | None,
    namespace: str | None,
    environment: Mapping[str, str],
    folder: Path = SERVICE_ACCOUNT,
    setting: str = "worker_kubernetes",
) -> KubernetesApi:
    """Return how to reach the API: as a pod does, unless an URL is given, as that of `kubectl proxy`.

    `namespace`: of what is asked for; None for the pod's own. `setting`: which needs the API. Raises ConfigError
    outside of a pod.
    """
    if url is not None:
        return KubernetesApi(url, namespace or "default")
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(f"{setting}: this process is not in a Kubernetes pod; set kubernetes_api to a URL")
    try:
        own = namespace or (folder / "namespace").read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{setting}: {folder / 'namespace'}: {error.strerror}") from None
    at = f"[{host}]" if ":" in host else host
    return KubernetesApi(f"https://{at}:{port}", own, folder / "token", folder / "ca.crt")


class SlicePort(BaseModel):
    model_config = LENIENT
    name: str | None = None
    port: int | None = None


class Conditions(BaseModel):
    model_config = LENIENT
    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(BaseModel):
    model_config = LENIENT
    kind: str = ""
    name: str = ""


class Endpoint(BaseModel):
    model_config = LENIENT
    addresses: tuple[str, ...] = ()
    conditions: Conditions = Conditions()
    target: Annotated[TargetRef, Field(alias="targetRef")] = TargetRef()

    @property
    def is_ready(self) -> bool:
        """Whether calls may be sent there. What is not said counts as ready, as in Kubernetes."""
        return self.conditions.ready is not False and not self.conditions.terminating


class Metadata(BaseModel):
    model_config = LENIENT
    name: str = ""
    version: Annotated[str, Field(alias="resourceVersion")] = ""
    labels: dict[str, str] | None = None


class EndpointSlice(BaseModel):
    """What is read of an EndpointSlice of discovery.k8s.io/v1."""

    model_config = LENIENT
    metadata: Metadata
    family: Annotated[str, Field(alias="addressType")] = "IPv4"
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None

    @property
    def port(self) -> int | None:
        """The port at which the workers serve: that of this name, else the first."""
        ports = [each for each in self.ports or () if each.port is not None]
        named = [each.port for each in ports if each.name == PORT_NAME]
        return named[0] if named else ports[0].port if ports else None


class SliceList(BaseModel):
    """The answer to a list."""

    model_config = LENIENT
    metadata: Metadata
    items: tuple[EndpointSlice, ...] = ()


class WatchEvent(BaseModel):
    """One line of a watch."""

    model_config = LENIENT
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: dict[str, Any]


def workers_of(slices: Iterable[EndpointSlice]) -> Workers:
    """Return the workers that these slices name, sorted by id.

    A pod has one address in the slice of each family; IPv4 counts if it has both.
    """
    found: dict[str, WorkerAddress] = {}
    for each in sorted(slices, key=lambda each: (each.family != "IPv4", each.metadata.name)):
        port, role = each.port, (each.metadata.labels or {}).get(ROLE_LABEL, "both")
        if port is None or each.family not in ("IPv4", "IPv6") or role not in ("both", "prefill", "decode"):
            continue
        for endpoint in each.endpoints or ():
            if endpoint.is_ready and endpoint.addresses:
                worker = _worker(endpoint, port, role)
                found.setdefault(worker.id, worker)
    by_url = {worker.url: worker for worker in found.values()}
    return tuple(sorted(by_url.values(), key=lambda worker: worker.id))


def _worker(endpoint: Endpoint, port: int, role: str) -> WorkerAddress:
    """Return a worker by the name of its pod, or else by its address."""
    address = endpoint.addresses[0]
    at = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    pod = endpoint.target.name if endpoint.target.kind == "Pod" else ""
    id_ = pod if 0 < len(pod) <= LONGEST_ID else f"{address}:{port}"
    return WorkerAddress.model_validate({"url": f"http://{at}", "id": id_, "role": role})


class KubernetesWatch:
    """Reports the workers of one selector, at once and after each change, while the context is entered.

    While the API does not answer, the workers stay as they were.
    """

    def __init__(
        self,
        selector: str,
        api: KubernetesApi,
        on_workers: Callable[[str, Workers], None],
        pause: float = PAUSE_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`selector`: of the labels of EndpointSlices; `on_workers` takes the name of this source and its workers.

        `pause`: seconds between a failure and the next call, which `sleep` awaits.
        """
        self.name: Final = f"kubernetes {selector}"
        self._selector = selector
        self._api = api
        self._on_workers = on_workers
        self._pause = pause
        self._sleep = sleep
        self._slices: dict[str, EndpointSlice] = {}
        self._version = ""
        """That of the last change that was seen."""
        self._failed = False
        """Whether the last call failed."""
        self._warned_at = -WARN_SECONDS
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Report the workers once, if the API answers, so that the first call finds them; then watch."""
        self._http = await self._stack.enter_async_context(await self._api.client(ANSWER_SECONDS))
        await self._guarded(self._list)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop watching."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._stack.aclose()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began, version = clock(), self._version
            await self._guarded(self._watch if version else self._list)
            # A watch that ends at once would otherwise be begun again without end, as behind a proxy that allows none.
            if self._failed or (version and clock() - began < self._pause):
                await self._sleep(self._pause)

    async def _guarded(self, call: Callable[[], Any]) -> None:
        """Make a call. If it fails, the log says so once a minute, and all is listed again."""
        self._failed = False
        try:
            await call()
        except (httpx.HTTPError, OSError, ValueError) as error:
            self._failed, self._version = True, ""
            now = asyncio.get_running_loop().time()
            if now >= self._warned_at + WARN_SECONDS:
                self._warned_at = now
                said = type(error).__name__ if isinstance(error, ValidationError) or not str(error) else str(error)
                log.warning("%s: %s; the workers stay as they were", self.name, said.splitlines()[0])

    async def _list(self) -> None:
        """Ask for all slices."""
        params, headers = {"labelSelector": self._selector}, await self._api.headers()
        answer = await self._http.get(self._path, params=params, headers=headers)
        answer.raise_for_status()
        listed = SliceList.model_validate_json(answer.content)
        self._slices = {each.metadata.name: each for each in listed.items}
        self._version = listed.metadata.version
        self._report()

    async def _watch(self) -> None:
        """Follow the changes since the last one that was seen, until the API ends the watch."""
        params = {
            **{"labelSelector": self._selector, "watch": "true", "allowWatchBookmarks": "true"},
            **{"resourceVersion": self._version, "timeoutSeconds": str(WATCH_SECONDS)},
        }
        timeout = httpx.Timeout(ANSWER_SECONDS, read=WATCH_SECONDS + ANSWER_SECONDS)
        headers = await self._api.headers()
        async with self._http.stream("GET", self._path, params=params, headers=headers, timeout=timeout) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                event = WatchEvent.model_validate_json(line)
                if event.type == "ERROR":  # the version is too old: list again
                    self._version = ""
                    return
                self._apply(event)

    def _apply(self, event: WatchEvent) -> None:
        changed = EndpointSlice.model_validate(event.object)
        self._version = changed.metadata.version
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        else:
            self._slices[changed.metadata.name] = changed
        self._report()

    def _report(self) -> None:
        self._on_workers(self.name, workers_of(self._slices.values()))

    @property
    def _path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._api.namespace}/endpointslices"
