"""Builds the optional KV-event subscriber and prompt tokenizer; a no-op if the extra is not installed."""

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
"""The modules that the two optional extras install."""
MIN_EXPECTED_WORKERS: Final = 8
"""If not all workers are known at the start, the limit on prefixes is divided among at least this many."""


class KvEvents:
    """The subscriber and the tokenizer, running while the context is entered; without them, it knows nothing."""

    def __init__(self, parts: "tuple[KvEventSubscriber, PromptTokenizer] | None" = None) -> None:
        self._parts = parts

    async def keys(self, path: str, body: bytes, model: str) -> tuple[BlockKey, ...]:
        return await self._parts[1].keys(path, body, model) if self._parts else ()

    def report(self) -> Mapping[WorkerId, EventsReport]:
        return self._parts[0].report() if self._parts else {}

    def outcomes(self) -> Mapping[str, int]:
        """How often the token ids of a call were looked for, by outcome."""
        return {str(outcome): count for outcome, count in self._parts[1].outcomes.items()} if self._parts else {}

    async def __aenter__(self) -> Self:
        """Start both parts."""
        async with AsyncExitStack() as stack:
            for part in self._parts or ():
                await stack.enter_async_context(part)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop both parts."""
        await self._stack.aclose()


def build_kv_events(
    settings: Settings, directory: WorkerDirectory, scheduler_host: SchedulerHost, secret: bytes
) -> KvEvents:
    """Build the parts that the settings ask for. Raises ConfigError if the tokenizer cannot be used.

    Both observe requests only once some worker is found to publish events.
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
    expected_workers = MIN_EXPECTED_WORKERS if settings.worker_dns or settings.workers_file is not None else 1
    limits = StreamLimits(blocks=settings.prefix_limit // max(expected_workers, len(settings.worker)))

    def observe_requests() -> None:
        scheduler_host.attach(BlockFillObserver(subscriber.filled), prompt_tokenizer)

    subscriber = KvEventSubscriber(directory, scheduler_host.feed, hasher, limits, observe_requests)
    prompt_tokenizer = PromptTokenizer(directory, hasher, subscriber.block_sizes, tokenizer, settings.token_budget)
    scheduler_host.attach(subscriber)
    return KvEvents((subscriber, prompt_tokenizer))


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
