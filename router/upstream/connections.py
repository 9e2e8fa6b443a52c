"""The workers as one front knows them: a copy of the directory, and the connections to them."""

from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Self

from router.api.body.edits import AddedFields, Addition
from router.channel.messages import WorkerCard, WorkerChanged, WorkerRemoved
from router.core.model.request import RequestId, Role, WorkerId
from router.errors import NoWorker
from router.upstream.accepted_fields import AcceptedFields
from router.upstream.http_client import UNLIMITED, IdleTimeouts, WorkerClient, WorkerResponse
from router.upstream.ranks.pinning import rank_header

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(slots=True)
class ConnectedWorker:
    """One worker and the connections to it."""

    card: WorkerCard
    accepted: Mapping[str, AddedFields]
    """The fields that the router may add to a call, by the call's path."""
    client: WorkerClient
    fingerprint: str | None = None
    """The `system_fingerprint` of its last streamed answer, empty if that had none; None until there is one."""

    @property
    def authorization(self) -> dict[str, str]:
        """The header with the worker's own key; a client's key is never sent to a worker."""
        return {} if self.card.api_key is None else {"authorization": f"Bearer {self.card.api_key}"}

    def forward(
        self,
        path: str,
        body: bytes,
        request: RequestId,
        timeouts: IdleTimeouts = UNLIMITED,
        *,
        method: str = "POST",
        content_type: str = "application/json",
        passed: Mapping[str, str] = NO_HEADERS,
        once: bool = False,
    ) -> Awaitable[WorkerResponse]:
        """Send a call to the worker and return when its answer begins. `passed`: the client's headers for the worker;
        `once`: the worker must never see it twice.

        Raises WorkerUnreachable if there is no answer, and WorkerHung if the worker is silent beyond its timeout.
        """
        headers = {**passed, "content-type": content_type, "x-request-id": request, **self.authorization}
        if self.card.rank is not None:
            headers |= rank_header(self.card.engine, path, self.card.rank)
        return self.client.send(method, path, headers, body, timeouts, once=once)


class ServedModel(NamedTuple):
    """What the workers that list a model have in common."""

    vocabulary: int | None = None
    """The smallest vocabulary, in token ids; None if no worker reports its own."""
    block_sizes: frozenset[int] = frozenset()
    """Block sizes, in tokens, of the workers whose KV events are followed."""
    rank_engines: frozenset[str] = frozenset()
    """The engines of which several ranks are behind one URL."""
    has_roles: bool = False
    """Whether any worker computes prompts or answers only."""
    decodes_alone: bool = True
    """Whether those that compute answers can compute whole requests."""


UNLISTED: Final = ServedModel()


class WorkerConnections:
    """All workers by id. Connections are opened when they are needed, and closed when the context is left."""

    def __init__(self, connect_timeout: float, aliases: Mapping[str, str] | None = None) -> None:
        """`connect_timeout`: seconds within which a worker must accept a connection.

        `aliases`: model names that the router translates, by alias.
        """
        self.aliases: Mapping[str, str] = dict(aliases or {})
        self._connect_timeout = connect_timeout
        self._workers: dict[WorkerId, ConnectedWorker] = {}
        self.by_id: Final[Mapping[WorkerId, ConnectedWorker]] = self._workers
        """The workers. Read-only."""
        self._models: dict[str, ServedModel] = {}
        """The models that any worker lists, as far as they were asked for since the workers last changed."""

    def apply(self, change: WorkerChanged | WorkerRemoved) -> None:
        """Add, update or remove a worker. Nothing is in flight at one that is removed."""
        self._models.clear()
        if isinstance(change, WorkerRemoved):
            if (gone := self._workers.pop(change.worker, None)) is not None:
                self._close_unused(gone.client)
            return
        card = change.card
        accepted = AcceptedFields(card.engine, card.version, _fields(card.refused_fields)).by_path
        known = self._workers.get(card.id)
        if known is None:
            client = self._client(card.url)
            self._workers[card.id] = ConnectedWorker(card, accepted, client)
        else:
            if not card.healthy or card.version != known.card.version:
                known.fingerprint = None  # the engine may have restarted with other settings
            known.card, known.accepted = card, accepted

    def _client(self, url: str) -> WorkerClient:
        """Return the client of a URL, which all its ranks use."""
        clients = (worker.client for worker in self._workers.values() if worker.card.url == url)
        return next(clients, None) or WorkerClient(url, self._connect_timeout)

    def _close_unused(self, client: WorkerClient) -> None:
        if all(worker.client is not client for worker in self._workers.values()):
            client.close()

    def served(self, model: str) -> ServedModel | None:
        """Return the model as the workers serve it, whether or not they are healthy; None if no worker lists it.

        While no worker has listed any model, every model is `UNLISTED`.
        """
        if (served := self._models.get(model)) is not None:
            return served
        cards = [worker.card for worker in self._workers.values() if model in worker.card.models]
        if not cards:
            return None if any(worker.card.models for worker in self._workers.values()) else UNLISTED
        vocabularies = [card.vocabulary for card in cards if card.vocabulary is not None]
        sizes = frozenset([card.block_tokens for card in cards if card.block_tokens is not None])
        ranked = frozenset([card.engine for card in cards if card.has_ranks])
        apart = any(card.role is not Role.BOTH for card in cards)
        alone = all(card.connector is None or card.connector.decodes_alone for card in cards)
        served = self._models[model] = ServedModel(min(vocabularies, default=None), sizes, ranked, apart, alone)
        return served

    def any_model(self) -> str:
        """Return the model for a call that names none: the one with most healthy workers, adapters excluded.

        Raises NoWorker if no worker is healthy.
        """
        served = Counter(
            model
            for worker in self._workers.values()
            if worker.card.healthy
            for model in sorted(worker.card.models - worker.card.parents.keys())
        )
        if not served:
            raise NoWorker("No worker is alive.", reason="rejected-no-endpoints")
        return served.most_common(1)[0][0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all idle connections."""
        for worker in self._workers.values():
            worker.client.close()


def _fields(refused: Mapping[str, Iterable[str]]) -> dict[str, AddedFields]:
    return {path: frozenset(map(Addition, names)) for path, names in refused.items()}
