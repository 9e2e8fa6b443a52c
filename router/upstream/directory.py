"""The workers as they are reached: who they are, what was last seen of them, and the call that goes to one of them."""

import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from router.api.body.edits import AddedFields
from router.core.fleet.health import DEFAULT_SILENCE_RULES, SilenceRules, SilenceTimeout
from router.core.model.request import RequestId, WorkerId
from router.errors import NoWorker
from router.upstream.accepted_fields import AcceptedFields
from router.upstream.http_client import UNLIMITED, IdleTimeouts, WorkerClient, WorkerResponse
from router.upstream.kv_endpoints import KvPublisher

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerEndpoint:
    """One worker as it is reached, and what was last seen of it."""

    id: WorkerId
    url: str
    api_key: str | None = field(default=None, repr=False)
    healthy: bool = False
    models: frozenset[str] = frozenset()
    """The names it last answered to; kept while it is away, so that a call for them is refused as busy, not unknown."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Of these names that are adapters, the models that they are on."""
    vocabulary: int | None = None
    """How many token ids its model knows; None where the engine does not tell, or looks itself."""
    embeds: bool = False
    """Whether it makes embeddings alone, by its own word."""
    context_tokens: int | None = None
    """How long prompt and answer together may be; None where the engine does not tell."""
    fields: AcceptedFields = field(default_factory=AcceptedFields)
    """Which fields of the router's own it accepts."""
    sources: tuple[KvPublisher, ...] = ()
    """Where it publishes its KV events; none where it is to be asked."""

    @property
    def authorization(self) -> dict[str, str]:
        """The worker's own key; a client's never goes to a worker."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


class WorkerDirectory:
    """All workers by id, and the connections to them, which last as long as the context is entered."""

    def __init__(
        self,
        backends: Iterable[WorkerEndpoint],
        connect_timeout: float,
        patience: SilenceRules = DEFAULT_SILENCE_RULES,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`connect_timeout`: seconds in which a worker must accept a connection; `patience`: with its silence then.

        `aliases`: other names of models, which workers do not know.
        """
        self.aliases: Mapping[str, str] = dict(aliases or {})
        self._connect_timeout = connect_timeout
        self._patience_rules = patience
        self._endpoints: dict[WorkerId, WorkerEndpoint] = {}
        self._silence_timeouts: dict[WorkerId, SilenceTimeout] = {}
        self._clients: dict[WorkerId, WorkerClient] = {}
        for backend in backends:
            self.add(backend)

    @property
    def endpoints(self) -> Sequence[WorkerEndpoint]:
        """The workers of this moment, in the order in which they came."""
        return tuple(self._endpoints.values())

    def __getitem__(self, worker: WorkerId) -> WorkerEndpoint:
        """KeyError for one that is not there."""
        return self._endpoints[worker]

    def add(self, backend: WorkerEndpoint) -> None:
        """One more worker, of an id that no other has."""
        self._endpoints[backend.id] = backend
        self._silence_timeouts[backend.id] = SilenceTimeout(self._patience_rules)
        self._clients[backend.id] = WorkerClient(backend.url, self._connect_timeout)

    def remove(self, worker: WorkerId) -> None:
        """Forget a worker at which no call is under way, and close what connects to it."""
        del self._endpoints[worker], self._silence_timeouts[worker]
        self._clients.pop(worker).close()

    def context_tokens(self, worker: WorkerId) -> int | None:
        """How long prompt and answer together may be at a worker; None where its engine does not tell."""
        return self._endpoints[worker].context_tokens

    def knows_model(self, model: str) -> bool:
        """Whether any worker, alive or not, has this model; before one was seen at all, every name may be right."""
        known = False
        for backend in self._endpoints.values():
            if model in backend.models:
                return True
            known = known or bool(backend.models)
        return not known

    def vocabulary(self, model: str) -> int | None:
        """How many token ids the workers of a model know, the least of any; None where none tells."""
        told = [backend.vocabulary for backend in self._endpoints.values() if model in backend.models]
        return min([size for size in told if size is not None], default=None)

    def any_model(self) -> str:
        """The model for a call that names none: that of most living workers, and no adapter. Raises NoWorker."""
        served = Counter(
            model
            for backend in self._endpoints.values()
            if backend.healthy
            for model in sorted(backend.models - backend.parents.keys())
        )
        if not served:
            raise NoWorker("No worker is alive.", reason="rejected-no-endpoints")
        return served.most_common(1)[0][0]

    def mark_unreachable(self, worker: WorkerId) -> None:
        """It takes no connection: it counts as away until it answers a poll."""
        if self._endpoints[worker].healthy:
            log.warning("worker %s takes no connection; its queue is placed anew", worker)
            self._endpoints[worker].healthy = False

    async def __aenter__(self) -> Self:
        """Nothing is opened before it is needed."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    def silence_timeout(self, worker: WorkerId) -> SilenceTimeout:
        """With a worker's silence, by what it has shown of itself; to be told how fast it is."""
        return self._silence_timeouts[worker]

    def accepted_fields(self, worker: WorkerId, path: str) -> AddedFields:
        """Which fields of the router's own may be added to a call to a worker."""
        return self._endpoints[worker].fields[path]

    def fields_refused(self, worker: WorkerId, path: str, fields: AddedFields) -> None:
        """A worker has refused fields that the router added: it is sent none of them any more."""
        names = ", ".join(sorted(each.value for each in fields))
        log.warning("worker %s refuses %s on %s, which the router adds no more", worker, names, path)
        self._endpoints[worker].fields.refuse(path, fields)

    def forward(
        self,
        worker: WorkerId,
        path: str,
        body: bytes,
        request: RequestId,
        silence: IdleTimeouts = UNLIMITED,
        *,
        method: str = "POST",
        content_type: str = "application/json",
    ) -> Awaitable[WorkerResponse]:
        """Send a call to a worker; returns when its answer begins.

        Raises WorkerUnreachable if none does, and WorkerHung if the worker says nothing for longer than it may.
        """
        backend = self._endpoints[worker]
        headers = {"content-type": content_type, "x-request-id": request, **backend.authorization}
        return self._clients[worker].send(method, path, headers, body, silence)
