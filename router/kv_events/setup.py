"""Builds the optional KV-event subscriber, and the prompt tokenizer; a no-op if the extra is not installed."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from router.channel.client import SchedulerClient
from router.channel.host import SchedulerHost
from router.config.settings import Settings
from router.core.kv_blocks.kv_events import EventsReport
from router.core.model.block_key import BlockHasher
from router.core.model.request import WorkerId
from router.errors import ConfigError
from router.kv_events.tokenize import PromptTokenizer, Tokenizer
from router.upstream.connections import WorkerConnections
from router.upstream.directory import WorkerDirectory

if TYPE_CHECKING:
    from router.kv_events.subscriber import KvEventSubscriber

log = logging.getLogger(__name__)

EXTRAS: Final = ("zmq", "msgpack", "tokenizers", "jinja2")
"""The modules that the two optional extras install."""
MIN_EXPECTED_WORKERS: Final = 8
"""If not all workers are known at the start, the limit on prefixes is divided among at least this many."""


class KvEvents:
    """Follows the workers' KV events while the context is entered; without the extra, it follows none."""

    def __init__(self, subscriber: "KvEventSubscriber | None" = None) -> None:
        self._subscriber = subscriber

    def report(self) -> Mapping[WorkerId, EventsReport]:
        """Return the state of every worker that publishes KV events."""
        return {} if self._subscriber is None else self._subscriber.report()

    async def __aenter__(self) -> Self:
        """Start following."""
        if self._subscriber is not None:
            await self._subscriber.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop following."""
        if self._subscriber is not None:
            await self._subscriber.__aexit__(*error)


def build_kv_events(
    settings: Settings, directory: WorkerDirectory, scheduler_host: SchedulerHost, secret: bytes
) -> KvEvents:
    """Build the subscriber, unless the settings switch it off.

    It observes requests only once some worker is found to publish events.
    """
    if settings.kv_events == "off":
        return KvEvents()
    try:
        from router.kv_events.stream import StreamLimits  # noqa: PLC0415 - they need an optional extra
        from router.kv_events.subscriber import BlockFillObserver, KvEventSubscriber  # noqa: PLC0415
    except ModuleNotFoundError as error:
        _check_extra(error)
        log.info("KV events are not followed: the extra d2lpm-router[events] is not installed")
        return KvEvents()
    expected_workers = MIN_EXPECTED_WORKERS if settings.worker_dns or settings.workers_file is not None else 1
    limits = StreamLimits(blocks=settings.prefix_limit // max(expected_workers, len(settings.workers())))

    def observe_requests() -> None:
        scheduler_host.attach(BlockFillObserver(subscriber.filled))

    subscriber = KvEventSubscriber(directory, scheduler_host.feed, BlockHasher(secret), limits, observe_requests)
    scheduler_host.attach(subscriber)
    return KvEvents(subscriber)


def build_prompt_tokenizer(
    settings: Settings, connections: WorkerConnections, scheduler_client: SchedulerClient, secret: bytes
) -> PromptTokenizer:
    """Build the tokenizer of a front. Raises ConfigError if the settings name a tokenizer that cannot be used.

    It finds nothing while no worker's KV events are followed.
    """
    tokenizer = None if settings.tokenizer is None or settings.kv_events == "off" else _tokenizer(settings.tokenizer)

    def observe_calls() -> None:
        scheduler_client.attach(prompt_tokenizer)

    hasher, budget = BlockHasher(secret), settings.token_budget
    prompt_tokenizer = PromptTokenizer(connections, hasher, tokenizer, budget, observe_calls)
    return prompt_tokenizer


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        from router.kv_events.local_tokenizer import LocalTokenizer  # noqa: PLC0415 - it needs an optional extra
    except ModuleNotFoundError as error:
        _check_extra(error)
        raise ConfigError("tokenizer: needs the extra d2lpm-router[tokens]") from None
    return LocalTokenizer(folder)


def _check_extra(error: ModuleNotFoundError) -> None:
    """Raise the error again unless it is about a module of the extras."""
    if error.name is None or error.name.partition(".")[0] not in EXTRAS:
        raise error
