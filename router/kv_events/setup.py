"""What it takes to know by KV events what workers hold: their subscriber, and the tokens of calls. Or nothing of it."""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from router.channel.host import SchedulerHost
from router.config.settings import Settings
from router.core.kv_blocks.kv_events import EventsReport
from router.core.model.block_key import BlockHasher, BlockKey
from router.core.model.request import WorkerId
from router.errors import ConfigError
from router.kv_events.tokenize import PromptTokenizer, Tokenizer
from router.upstream.directory import WorkerDirectory

if TYPE_CHECKING:
    from router.kv_events.subscriber import KvEventSubscriber

log = logging.getLogger(__name__)

EXTRAS: Final = ("zmq", "msgpack", "tokenizers", "jinja2")
"""What the two optional extras install."""
MIN_EXPECTED_WORKERS: Final = 8
"""Workers among whom the limit on prefixes is divided, at least, where they are not all known at the start."""


class KvEvents:
    """Both parts, for as long as the context is entered; without them, one that knows nothing."""

    def __init__(self, parts: "tuple[KvEventSubscriber, PromptTokenizer] | None" = None) -> None:
        self._parts = parts

    async def keys(self, path: str, body: bytes, model: str) -> tuple[BlockKey, ...]:
        """See `PromptTokenizer.keys`."""
        return await self._parts[1].keys(path, body, model) if self._parts else ()

    def report(self) -> Mapping[WorkerId, EventsReport]:
        """See `KvEventSubscriber.report`."""
        return self._parts[0].report() if self._parts else {}

    def outcomes(self) -> Mapping[str, int]:
        """What came of looking for calls' tokens, and how often."""
        return {str(outcome): count for outcome, count in self._parts[1].outcomes.items()} if self._parts else {}

    async def __aenter__(self) -> Self:
        """Open both."""
        async with AsyncExitStack() as opening:
            for part in self._parts or ():
                await opening.enter_async_context(part)
            self._opened = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close both."""
        await self._opened.aclose()


def build_kv_events(settings: Settings, fleet: WorkerDirectory, scheduler_host: SchedulerHost, secret: bytes) -> KvEvents:
    """The parts that the settings ask for. Raises ConfigError for a tokenizer that cannot be used.

    They hear of requests from the time on at which some worker is found to publish events.
    """
    if settings.kv_events == "off":
        return KvEvents()
    tokenizer = None if settings.tokenizer is None else _tokenizer(settings.tokenizer)
    try:
        from router.kv_events.stream import StreamLimits  # noqa: PLC0415 - they need an optional extra
        from router.kv_events.subscriber import BlockFillObserver, KvEventSubscriber  # noqa: PLC0415
    except ModuleNotFoundError as error:
        _check_extra(error)
        log.info("KV events are not followed: the extra d2lpm-router[events] is not installed")
        return KvEvents()
    hasher = BlockHasher(secret)
    fewest = MIN_EXPECTED_WORKERS if settings.worker_dns or settings.workers_file is not None else 1
    limits = StreamLimits(blocks=settings.prefix_limit // max(fewest, len(settings.worker)))

    def hear_of_requests() -> None:
        scheduler_host.attach(BlockFillObserver(subscriber.filled), tokens)

    subscriber = KvEventSubscriber(fleet, scheduler_host.feed, hasher, limits, hear_of_requests)
    tokens = PromptTokenizer(fleet, hasher, subscriber.block_sizes, tokenizer, settings.token_budget)
    scheduler_host.attach(subscriber)
    return KvEvents((subscriber, tokens))


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        from router.kv_events.local_tokenizer import LocalTokenizer  # noqa: PLC0415 - it needs an optional extra
    except ModuleNotFoundError as error:
        _check_extra(error)
        raise ConfigError("tokenizer: needs the extra d2lpm-router[tokens]") from None
    return LocalTokenizer(folder)


def _check_extra(error: ModuleNotFoundError) -> None:
    """Raise any other module's absence again."""
    if error.name is None or error.name.partition(".")[0] not in EXTRAS:
        raise error
