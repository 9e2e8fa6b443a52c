"""The fleet's workers by id: their addresses, what polls found out about them, and the calls sent to them."""

import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from router.api.body.edits import AddedFields
from router.core.fleet.health import DEFAULT_SILENCE_RULES, SilenceRules, SilenceTimeout
from router.core.model.request import RequestId, WorkerId
from router.errors import NoWorker
from router.upstream.accepted_fields import AcceptedFields
from router.upstream.http_client import UNLIMITED, IdleTimeouts, WorkerClient, WorkerResponse
from router.upstream.kv_endpoints import KvPublisher

log = logging.getLogger(__name__)


NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(slots=True)
class WorkerEndpoint:
    """One worker: its address and what polls have found out about it."""

    id: WorkerId
    url: str
    api_key: str | None = field(default=None, repr=False)
    healthy: bool = False
    models: frozenset[str] = frozenset()
    """The names it last listed; kept while it is down, so that a call for them is refused as busy, not as unknown."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """For each of these names that is an adapter, its base model."""
    cards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each of these names, what the worker says of it in its list of models."""
    vocabulary: int | None = None
    """The number of token ids of its model; None if the engine does not report it or checks ids itself."""
    embeds: bool = False
    """True if the engine reports that it computes embeddings only."""
    context_tokens: int | None = None
    """The most tokens of prompt and answer together; None if the engine does not report it."""
    fields: AcceptedFields = field(default_factory=AcceptedFields)
    """Which of the fields that the router adds to calls it accepts."""
    sources: tuple[KvPublisher, ...] = ()
    """Where it publishes its KV events, if the settings say so; if empty, the worker is asked."""

    @property
    def authorization(self) -> dict[str, str]:
        """The header with the worker's own key; a client's key is never sent to a worker."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


class WorkerDirectory:
    """All workers by id, and the connections to them, which are closed when the context is left."""

    def __init__(
        self,
        endpoints: Iterable[WorkerEndpoint],
        connect_timeout: float,
        patience: SilenceRules = DEFAULT_SILENCE_RULES,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`connect_timeout`: seconds within which a worker must accept a connection.

        `patience`: how long a worker may send nothing after that. `aliases`: model names that the router translates,
        by alias.
        """
        self.aliases: Mapping[str, str] = dict(aliases or {})
        self._connect_timeout = connect_timeout
        self._patience_rules = patience
        self._endpoints: dict[WorkerId, WorkerEndpoint] = {}
        self._silence_timeouts: dict[WorkerId, SilenceTimeout] = {}
        self._clients: dict[WorkerId, WorkerClient] = {}
        for endpoint in endpoints:
            self.add(endpoint)

    @property
    def endpoints(self) -> Sequence[WorkerEndpoint]:
        """The current workers, in the order in which they were added."""
        return tuple(self._endpoints.values())

    def __getitem__(self, worker: WorkerId) -> WorkerEndpoint:
        """Raises KeyError for an unknown worker."""
        return self._endpoints[worker]

    def add(self, endpoint: WorkerEndpoint) -> None:
        """Add a worker, whose id must be unused."""
        self._endpoints[endpoint.id] = endpoint
        self._silence_timeouts[endpoint.id] = SilenceTimeout(self._patience_rules)
        self._clients[endpoint.id] = WorkerClient(endpoint.url, self._connect_timeout)

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker that has no call in flight, and close the connections to it."""
        del self._endpoints[worker], self._silence_timeouts[worker]
        self._clients.pop(worker).close()

    def context_tokens(self, worker: WorkerId) -> int | None:
        """The most tokens of prompt and answer together at a worker; None if its engine does not report it."""
        return self._endpoints[worker].context_tokens

    def knows_model(self, model: str) -> bool:
        """True if any worker, healthy or not, lists this model, or if no worker has listed any model yet."""
        known = False
        for endpoint in self._endpoints.values():
            if model in endpoint.models:
                return True
            known = known or bool(endpoint.models)
        return not known

    def vocabulary(self, model: str) -> int | None:
        """The smallest vocabulary among the workers of a model, in token ids; None if none reports it."""
        sizes = [endpoint.vocabulary for endpoint in self._endpoints.values() if model in endpoint.models]
        return min([size for size in sizes if size is not None], default=None)

    def any_model(self) -> str:
        """Return the model for a call that names none: the one with most healthy workers, adapters excluded.

        Raises NoWorker if no worker is healthy.
        """
        served = Counter(
            model
            for endpoint in self._endpoints.values()
            if endpoint.healthy
            for model in sorted(endpoint.models - endpoint.parents.keys())
        )
        if not served:
            raise NoWorker("No worker is alive.", reason="rejected-no-endpoints")
        return served.most_common(1)[0][0]

    def mark_unreachable(self, worker: WorkerId) -> None:
        """Mark a worker that refused a connection as down, until it answers a poll."""
        if self._endpoints[worker].healthy:
            log.warning("worker %s refuses connections; its queue is reassigned", worker)
            self._endpoints[worker].healthy = False

    async def __aenter__(self) -> Self:
        """Connections are opened when they are needed."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all idle connections."""
        for client in self._clients.values():
            client.close()

    def silence_timeout(self, worker: WorkerId) -> SilenceTimeout:
        """Return how long a worker may be silent, learned from how fast it answers; the caller reports its times."""
        return self._silence_timeouts[worker]

    def accepted_fields(self, worker: WorkerId, path: str) -> AddedFields:
        """Return the fields that the router may add to a call to this path of a worker."""
        return self._endpoints[worker].fields[path]

    def fields_refused(self, worker: WorkerId, path: str, fields: AddedFields) -> None:
        """Stop adding these fields to calls to this path of a worker, which has refused them."""
        names = ", ".join(sorted(each.value for each in fields))
        log.warning("worker %s refuses %s on %s; the router no longer adds it there", worker, names, path)
        self._endpoints[worker].fields.refuse(path, fields)

    def forward(
        self,
        worker: WorkerId,
        path: str,
        body: bytes,
        request: RequestId,
        timeouts: IdleTimeouts = UNLIMITED,
        *,
        method: str = "POST",
        content_type: str = "application/json",
        passed: Mapping[str, str] = NO_HEADERS,
    ) -> Awaitable[WorkerResponse]:
        """Send a call to a worker and return when its answer begins. `passed`: the client's headers for the worker.

        Raises WorkerUnreachable if there is no answer, and WorkerHung if the worker is silent beyond its timeout.
        """
        endpoint = self._endpoints[worker]
        headers = {**passed, "content-type": content_type, "x-request-id": request, **endpoint.authorization}
        return self._clients[worker].send(method, path, headers, body, timeouts)
