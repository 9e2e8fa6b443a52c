"""The workers of the fleet by id: their addresses, and what polls found out about them. Fronts get a copy."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final
from urllib.parse import urlsplit

from router.api.body.edits import AddedFields, Addition
from router.channel.messages import WorkerCard, WorkerChanged, WorkerRemoved
from router.core.model.request import BarrierId, Connector, Role, Takes, WorkerId
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
    named_role: Role = Role.BOTH
    """Its role by the settings."""
    named_connector: Connector = Connector.NIXL
    """By the settings: what carries KV caches, if it is a vLLM with a role."""
    role: Role = Role.BOTH
    """As its engine reports it, else by the settings."""
    connector: Connector | None = None
    """What carries KV caches from or to it, if it has a role."""
    bootstrap_port: int | None = None
    """Where decode workers ask it for prompts, at the host of its URL."""
    transfer_engine: str | None = None
    """The id by which decode workers with Mooncake know it."""
    group: str | None = None
    """The group that the settings name for its ranks."""
    rank: int | None = None
    """Its data-parallel rank; None if its URL has one engine, or it is the URL as a whole."""
    barrier: BarrierId | None = None
    """The group with which it steps, as far as the engine was asked."""
    server: WorkerId | None = None
    """If it is one of several ranks behind a URL, the worker that is this URL as a whole."""
    ranks: tuple["WorkerEndpoint", ...] = ()
    """If it is a URL as a whole, its ranks."""

    @property
    def takes(self) -> Takes:
        """Which calls it serves."""
        if self.server is not None:
            return Takes.PINNED
        return Takes.UNPINNED if self.ranks else Takes.ALL

    @property
    def health_group(self) -> BarrierId | None:
        """The group without which it is of no use; that of its ranks for a URL as a whole."""
        return self.ranks[0].barrier if self.ranks else self.barrier

    def new_rank(self, rank: int) -> "WorkerEndpoint":
        """Return the endpoint of one of its ranks."""
        sources = tuple(each.of_rank(rank) for each in self.sources[:1])
        own = replace(self, id=rank_id(self.id, rank), rank=rank, server=self.id, ranks=())
        own.sources, own.block_tokens = sources, None
        return own

    def share_facts(self) -> None:
        """Copy what polls have found out about the URL to its ranks."""
        for rank in self.ranks:
            for name in OF_THE_URL:
                setattr(rank, name, getattr(self, name))

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
            self.rank if self.server is not None else None,
            self.takes is not Takes.ALL,
            self.role,
            self.connector,
            self.bootstrap_port,
            self.transfer_engine,
        )


def bootstrap_url(url: str, port: int) -> str:
    """Return the URL of the bootstrap server of a worker with this URL, without a path."""
    host = host_of(url)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def host_of(url: str) -> str:
    """Return the host name or address of a worker with this URL."""
    return urlsplit(url).hostname or ""


def rank_id(server: WorkerId, rank: int) -> WorkerId:
    """Return the id of a rank behind a URL. No URL as a whole has such an id."""
    return WorkerId(f"{server}@{rank}")


def server_of(rank: WorkerId) -> WorkerId:
    """Return the URL as a whole by the id of one of its ranks."""
    return WorkerId(rank.rpartition("@")[0])


_OWN: Final = frozenset({"id", "sources", "block_tokens", "rank", "barrier", "server", "ranks", "transfer_engine"})
OF_THE_URL: Final = tuple(each.name for each in fields(WorkerEndpoint) if each.name not in _OWN)
"""The fields that all ranks of a URL have in common."""


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
        endpoint.share_facts()
        for rank in endpoint.ranks:
            self._publish(rank)
        self._publish(endpoint)

    def _publish(self, endpoint: WorkerEndpoint) -> None:
        if (card := endpoint.card()) != self._published.get(endpoint.id):
            self._published[endpoint.id] = card
            self._announce(WorkerChanged(card))

    def add(self, endpoint: WorkerEndpoint) -> None:
        """Add a worker, whose id must be unused."""
        for each in (*endpoint.ranks, endpoint):
            self._endpoints[each.id] = each
        self.publish(endpoint)

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker, and its ranks. None of them has a request in flight."""
        for each in self.behind(worker):
            del self._endpoints[each.id]
            self._published.pop(each.id, None)
            self._announce(WorkerRemoved(each.id))

    def behind(self, worker: WorkerId) -> Sequence[WorkerEndpoint]:
        """Return all workers behind the URL of a worker, ranks first, also those that the engine no longer has; none
        for an unknown worker.
        """
        endpoint = self._endpoints.get(worker)
        if endpoint is None:
            return ()
        server = endpoint.server or worker
        ranks = [each for each in self._endpoints.values() if each.server == server]
        return (*ranks, self._endpoints[server])

    def is_up(self, endpoint: WorkerEndpoint) -> bool:
        """Return whether a worker answers polls, and so do all that step together with it."""
        group = endpoint.health_group
        if group is None or not endpoint.healthy:
            return endpoint.healthy
        return all(each.healthy for each in self._endpoints.values() if each.health_group == group)

    def set_ranks(self, server: WorkerEndpoint, ranks: Iterable[int]) -> None:
        """Set which ranks a URL has. One that it no longer has stays known until the URL is removed."""
        known = {each.rank: each for each in self.behind(server.id) if each.server is not None}
        for gone in known.values():
            gone.healthy, gone.barrier = False, None
        server.ranks = tuple([known.get(rank) or server.new_rank(rank) for rank in sorted(ranks)])
        for gone in known.values():
            if gone not in server.ranks:
                self._publish(gone)
        for rank in server.ranks:
            self._endpoints.setdefault(rank.id, rank)

    def mark_unreachable(self, worker: WorkerId) -> Sequence[WorkerId]:
        """Mark the URL of a worker that refused a connection, or gave no sign of life, as down, until it answers a
        poll. Ignored if it was removed.

        Returns all workers behind the URL.
        """
        behind = self.behind(worker)
        if behind and (server := behind[-1]).healthy:
            log.warning("worker %s cannot be reached; its queue is reassigned", server.id)
            server.healthy = server.assumed = False
            self.publish(server)
        return [each.id for each in behind]

    def refuse_fields(self, worker: WorkerId, path: str, fields: Iterable[str]) -> None:
        """Stop adding these fields to calls to this path of a worker, which has refused them."""
        behind = self.behind(worker)
        endpoint = behind[-1] if behind else None
        refused: AddedFields = frozenset(map(Addition, fields))
        if endpoint is not None and not refused <= endpoint.fields.refused.get(path, frozenset()):
            names = ", ".join(sorted(each.value for each in refused))
            log.warning("worker %s refuses %s on %s; the router no longer adds it there", worker, names, path)
            endpoint.fields.refuse(path, refused)
            self.publish(endpoint)
