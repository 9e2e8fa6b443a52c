"""The workers of the fleet by id: their addresses, and what polls found out about them. Fronts get a copy."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.api.body.edits import AddedFields, Addition
from router.channel.messages import WorkerCard, WorkerChanged, WorkerRemoved
from router.core.model.request import WorkerId
from router.upstream.accepted_fields import AcceptedFields
from router.upstream.kv_endpoints import KvPublisher

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerEndpoint:
    """One worker: its address and what polls have found out about it."""

    id: WorkerId
    url: str
    api_key: str | None = field(default=None, repr=False)
    healthy: bool = False
    assumed: bool = False
    """Whether it is only assumed to be healthy, because it was in an earlier run and has not been polled since."""
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
    block_tokens: int | None = None
    """Tokens in a block of its cache while its KV events are followed, else None."""
    sources: tuple[KvPublisher, ...] = ()
    """Where it publishes its KV events, if the settings say so; if empty, the worker is asked."""

    @property
    def authorization(self) -> dict[str, str]:
        """The header with the worker's own key; a client's key is never sent to a worker."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def card(self) -> WorkerCard:
        """Return what fronts need to know."""
        refused = {path: frozenset([each.value for each in fields]) for path, fields in self.fields.refused.items()}
        return WorkerCard(
            self.id,
            self.url,
            self.api_key,
            self.healthy,
            self.models,
            dict(self.parents),
            self.vocabulary,
            self.embeds,
            self.context_tokens,
            self.fields.engine,
            self.fields.version,
            refused,
            self.block_tokens,
        )


class WorkerDirectory:
    """All workers by id. Whoever changes an endpoint calls `publish`."""

    def __init__(
        self,
        endpoints: Iterable[WorkerEndpoint] = (),
        aliases: Mapping[str, str] | None = None,
        announce: Callable[[WorkerChanged | WorkerRemoved], None] = lambda change: None,  # noqa: ARG005
    ) -> None:
        """`aliases`: model names that the router translates, by alias; `announce`: reports a change to the fronts."""
        self.aliases: Mapping[str, str] = dict(aliases or {})
        self._endpoints: dict[WorkerId, WorkerEndpoint] = {}
        self._published: dict[WorkerId, WorkerCard] = {}
        self._announce = announce
        for endpoint in endpoints:
            self.add(endpoint)

    @property
    def endpoints(self) -> Sequence[WorkerEndpoint]:
        """The current workers, in the order in which they were added."""
        return tuple(self._endpoints.values())

    def __getitem__(self, worker: WorkerId) -> WorkerEndpoint:
        """Raises KeyError for an unknown worker."""
        return self._endpoints[worker]

    def publish(self, endpoint: WorkerEndpoint) -> None:
        """Report an endpoint to the fronts, if anything has changed that they need to know.

        Of an endpoint that has not been polled yet in this run, they still know what they learned in an earlier one.
        """
        if endpoint.assumed:
            return
        if (card := endpoint.card()) != self._published.get(endpoint.id):
            self._published[endpoint.id] = card
            self._announce(WorkerChanged(card))

    def add(self, endpoint: WorkerEndpoint) -> None:
        """Add a worker, whose id must be unused."""
        self._endpoints[endpoint.id] = endpoint
        self.publish(endpoint)

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker that has no request in flight."""
        del self._endpoints[worker]
        self._published.pop(worker, None)
        self._announce(WorkerRemoved(worker))

    def mark_unreachable(self, worker: WorkerId) -> None:
        """Mark a worker that refused a connection as down, until it answers a poll. Ignored if it was removed."""
        endpoint = self._endpoints.get(worker)
        if endpoint is not None and endpoint.healthy:
            log.warning("worker %s refuses connections; its queue is reassigned", worker)
            endpoint.healthy = endpoint.assumed = False
            self.publish(endpoint)

    def refuse_fields(self, worker: WorkerId, path: str, fields: Iterable[str]) -> None:
        """Stop adding these fields to calls to this path of a worker, which has refused them."""
        endpoint = self._endpoints.get(worker)
        refused: AddedFields = frozenset(map(Addition, fields))
        if endpoint is not None and not refused <= endpoint.fields.refused.get(path, frozenset()):
            names = ", ".join(sorted(each.value for each in refused))
            log.warning("worker %s refuses %s on %s; the router no longer adds it there", worker, names, path)
            endpoint.fields.refuse(path, refused)
            self.publish(endpoint)
