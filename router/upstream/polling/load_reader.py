"""Reads what one URL reports of its load, its prefix cache and its work."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final

from router.core.model.events import CacheReport, WorkReport
from router.errors import WorkerBroke
from router.upstream.dialects import Dialect, ReportedLoad, pages_by_rank, reported_ranks
from router.upstream.directory import WorkerEndpoint
from router.upstream.polling.poll_client import OtherStatus, PollClient

log = logging.getLogger(__name__)

WARN_SECONDS: Final = 60.0
"""Least time between two log lines about a worker's metrics."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine, or one of its ranks, reports."""

    load: ReportedLoad
    cache: CacheReport | None = None
    work: WorkReport | None = None


@dataclass(frozen=True, slots=True)
class LoadPages:
    """The answers of one poll of the load. The methods raise WorkerBroke where an answer cannot be read."""

    dialect: Dialect
    load_path: str
    load: bytes
    cache_path: str | None
    cache: bytes | None
    """The answer about the cache, which may be the one about the load; None if there is none."""

    @property
    def ranks(self) -> frozenset[int] | None:
        """The data-parallel ranks named in the metrics; None if they name none, or another answer tells of the load."""
        return reported_ranks(self.load, self.dialect.rank_label) if self.load_path == self.cache_path else None

    def read_load(self) -> ReportedLoad:
        """Return the load of the whole URL."""
        return self.dialect.load_readers[self.load_path](self.load)

    def read_cache(self) -> tuple[CacheReport | None, WorkReport | None]:
        """Return the cache and the work of the whole URL, each None if it reports nothing about them."""
        if self.cache is None:
            return None, None
        return self.dialect.read_cache(self.cache), self.dialect.read_work(self.cache)

    def by_rank(self) -> Mapping[int, LoadReport]:
        """Return the report of each rank that the answer names."""
        read, label = self.dialect.load_readers[self.load_path], self.dialect.rank_label
        loads = pages_by_rank(self.load_path, self.load, label)
        caches: Mapping[int, bytes] = {}
        if self.cache is not None and self.cache_path is not None:
            caches = pages_by_rank(self.cache_path, self.cache, label)
        return {rank: self._of_rank(read(page), caches.get(rank)) for rank, page in loads.items()}

    def _of_rank(self, load: ReportedLoad, page: bytes | None) -> LoadReport:
        if page is None:
            return LoadReport(load)
        cache = self.dialect.read_cache(page)
        if not self.dialect.counts_prompts_by_rank:
            cache = replace(cache, computed_tokens=None, hit_tokens=None)
        return LoadReport(load, cache, self.dialect.read_work(page))


class LoadReader:
    """Reads the load of one URL, at the paths that answer, and counts what cannot be used."""

    def __init__(self, endpoint: WorkerEndpoint) -> None:
        self._endpoint = endpoint
        self._dialect: Dialect | None = None
        self._load_path: str | None = None
        self._cache_path: str | None = None
        self._warned_at = -WARN_SECONDS
        self.unusable_answers = 0
        """Answers about load and cache that could not be used."""

    def speak(self, dialect: Dialect) -> None:
        """Try the paths of this dialect, also those that were not found before: a proxy in front may have started
        since, or the engine was upgraded.
        """
        self._dialect = dialect
        self._load_path = next(iter(dialect.load_readers), None)
        self._cache_path = dialect.cache_path

    async def read(self, client: PollClient) -> LoadPages | None:
        """Return the answers about load and cache; None if there is none about the load.

        A failure does not count as a missed poll: an engine may be up and keep no metrics.
        """
        dialect, path = self._dialect, self._load_path
        if dialect is None or path is None:
            return None
        try:
            load = await self._get(client, path)
        except OtherStatus as error:
            if error.answered == HTTPStatus.NOT_FOUND:
                paths = [*dialect.load_readers, None]
                self._load_path = paths[paths.index(path) + 1]
            else:
                self.warn(error)
            return None
        except WorkerBroke as error:
            self.warn(error)
            return None
        cache = load if path == self._cache_path else await self._read_cache_page(client)
        return LoadPages(dialect, path, load, self._cache_path, cache)

    async def _read_cache_page(self, client: PollClient) -> bytes | None:
        """Return the answer about the cache; None if there is none."""
        if self._cache_path is None:
            return None
        try:
            return await self._get(client, self._cache_path)
        except OtherStatus as error:
            if error.answered == HTTPStatus.NOT_FOUND:
                self._cache_path = None
            else:
                self.warn(error)
        except WorkerBroke as error:
            self.warn(error)
        return None

    async def _get(self, client: PollClient, path: str) -> bytes:
        return await client.fetch(self._endpoint.url + path, self._endpoint.authorization)

    def warn(self, error: Exception) -> None:
        """Count and log an unusable answer; the worker stays in service."""
        self.unusable_answers += 1
        if time.monotonic() >= self._warned_at + WARN_SECONDS:
            self._warned_at = time.monotonic()
            reason = str(error) or type(error).__name__
            log.warning(
                "worker %s: metrics ignored, %d times so far: %s", self._endpoint.id, self.unusable_answers, reason
            )
