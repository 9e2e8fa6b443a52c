"""Watches the workers: health, models and load, polled and turned into events."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Self

import httpx

from router.core.model.events import (
    CacheReport,
    Event,
    Evicted,
    WorkerAnswered,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
    WorkReport,
)
from router.core.model.request import Worker, WorkerId
from router.errors import WorkerBroke
from router.upstream.dialects import (
    COMPLETIONS_PATH,
    MODELS_PATH,
    Dialect,
    EngineInfo,
    Load,
    context_tokens,
    detect_dialect,
    out_of_vocabulary_call,
    read_engine_info,
    read_models,
    read_parents,
    read_vocabulary,
)
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.poll_client import fetch, fetch_any_status, polling_client

log = logging.getLogger(__name__)

MISSED_POLLS = 3
"""Polls in a row that a worker may leave unanswered; a refused connection needs no second."""
WARN_SECONDS = 60.0
"""Seconds between two lines in the log about a worker's metrics."""
POLLS_WITHOUT_LOAD = 4
"""Looks at a worker's health, in a row, without a report of its load, from which on the look itself counts as a sign of
life: its metrics are slow, or it tells none."""
POLLS_PER_MODEL_LIST = 20
"""Polls between two readings of the list of models: adapters come and go, but seldom."""


class Poller:
    """Polls every worker for as long as the context is entered, and tells of what changed by events."""

    def __init__(self, fleet: WorkerDirectory, feed: Callable[[Event], None], interval: float) -> None:
        """`interval`: seconds between two polls of a worker."""
        self._feed = feed
        self._probes = {backend.id: WorkerProbe(backend, feed) for backend in fleet.endpoints}
        self._interval = interval
        self._tasks: dict[WorkerId, tuple[asyncio.Task[None], ...]] = {}
        """Of each worker, one that looks at its health and one that reads its load: slow metrics delay nothing."""
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        """Poll each worker once, so that those that are up are known from the first call on; then keep polling."""
        client = polling_client()
        await asyncio.gather(*(probe.poll(client) for probe in self._probes.values()))
        self._client = client
        for worker, probe in self._probes.items():
            self._tasks[worker] = self._start_polling(client, probe, self._interval)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop polling."""
        client, self._client = self._client, None
        tasks = [task for both in self._tasks.values() for task in both]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if client is not None:
            await client.aclose()

    def add(self, backend: WorkerEndpoint) -> None:
        """Poll one more worker, the first time at once if polling has begun."""
        probe = self._probes[backend.id] = WorkerProbe(backend, self._feed)
        if self._client is not None:
            self._tasks[backend.id] = self._start_polling(self._client, probe, 0.0)

    def remove(self, worker: WorkerId) -> None:
        """Poll a worker no more, and tell nothing more of it."""
        del self._probes[worker]
        for task in self._tasks.pop(worker, ()):
            task.cancel()

    def unusable_answers(self) -> Mapping[WorkerId, int]:
        """How many answers about load and cache could not be used, by worker."""
        return {probe.worker: probe.unusable_answers for probe in self._probes.values()}

    async def flush(self, worker: WorkerId) -> None:
        """Have a worker empty its prefix cache, and believe it empty then.

        Raises WorkerBroke where it did not, or cannot.
        """
        if self._client is None:
            raise WorkerBroke(f"Worker {worker} is not polled.")
        await self._probes[worker].flush(self._client)

    def _start_polling(
        self, client: httpx.AsyncClient, probe: "WorkerProbe", pause: float
    ) -> tuple[asyncio.Task[None], ...]:
        acts = (probe.poll_health, probe.poll_load)
        return tuple(asyncio.create_task(self._poll_forever(act, client, pause)) for act in acts)

    async def _poll_forever(self, act: "Poll", client: httpx.AsyncClient, pause: float) -> None:
        """`pause`: seconds before the first time."""
        while True:
            await asyncio.sleep(pause)
            pause = self._interval
            try:
                await act(client)
            except Exception:  # or the worker would keep for ever the health that it had
                log.exception("a poll failed inside the router")


Poll = Callable[[httpx.AsyncClient], Awaitable[None]]
"""One poll."""


class WorkerProbe:
    """What is known of one worker from the polls so far."""

    def __init__(self, backend: WorkerEndpoint, feed: Callable[[Event], None]) -> None:
        self._endpoint = backend
        self._feed = feed
        self._dialect: Dialect | None = None
        self._load_path: str | None = None
        self._cache_path: str | None = None
        self._polls = 0
        self._unanswered = 0
        self._load_readable = True
        """Whether its load could be read the last time, so that to read it is to hear of it."""
        self._polls_since_load = 0
        """Looks since then."""
        self._answers = asyncio.Event()
        """Set while it answers, so that its load is asked for."""
        self.unusable_answers = 0
        """Answers about load and cache that could not be used."""
        self._warned_at = -WARN_SECONDS

    @property
    def worker(self) -> WorkerId:
        return self._endpoint.id

    async def poll(self, client: httpx.AsyncClient) -> None:
        """Ask for all once; tell what changed."""
        await self.poll_health(client)
        if self._answers.is_set():
            await self.poll_load(client)

    async def poll_health(self, client: httpx.AsyncClient) -> None:
        """Ask for its health and its models; tell what changed."""
        models = None
        try:
            if not self._endpoint.healthy or self._polls % POLLS_PER_MODEL_LIST == 0:
                models = await self._read_models(client)
            await self._read_health(client, listed=models is not None)
        except httpx.ConnectError:
            self._on_missed(MISSED_POLLS, "it takes no connection")
        except (httpx.HTTPError, WorkerBroke) as error:
            self._on_missed(1, str(error) or type(error).__name__)
        else:
            self._polls += 1
            self._unanswered = 0
            if models is not None:
                await self._on_models(client, models)
            self._answers.set()
            self._polls_since_load += 1
            if not self._load_readable or self._polls_since_load >= POLLS_WITHOUT_LOAD:
                self._feed(WorkerAnswered(self._endpoint.id))

    async def poll_load(self, client: httpx.AsyncClient) -> None:
        """Ask for its load once it is there, and tell it."""
        await self._answers.wait()
        self._load_readable = await self._read_load(client)

    async def _read_models(self, client: httpx.AsyncClient) -> frozenset[str]:
        body = await self._get(client, MODELS_PATH)
        dialect = detect_dialect(body)
        self._dialect = dialect
        # What was not there the last time may be by now: a proxy before it has started, or it is another version.
        self._load_path = next(iter(dialect.load_readers), None)
        self._cache_path = dialect.cache_path
        self._endpoint.context_tokens = context_tokens(body)
        self._endpoint.parents = read_parents(body)
        return read_models(body)

    async def _on_models(self, client: httpx.AsyncClient, models: frozenset[str]) -> None:
        """A worker joins by its list of models once it is healthy; a new list is told like a new worker."""
        if models != self._endpoint.models or not self._endpoint.healthy:
            about = await self._read_about(client)
            vocabulary = await self._read_vocabulary(client, models, about)
            # Nothing is awaited from here on: a worker that is seen to be healthy is one that is sent calls.
            if not self._endpoint.healthy:
                log.info("worker %s is up and serves %s", self._endpoint.id, ", ".join(sorted(models)))
            self._endpoint.models, self._endpoint.healthy = models, True
            engine = "" if self._dialect is None else self._dialect.name
            self._endpoint.fields.set_engine(engine, about.version)
            self._endpoint.embeds = about.embeds
            self._endpoint.vocabulary = vocabulary
            self._feed(
                WorkerJoined(
                    Worker(
                        self._endpoint.id,
                        models,
                        reorders=about.reorders,
                        engine=engine,
                        batch_tokens=about.batch_tokens,
                        caches=about.caches,
                    )
                )
            )

    async def _read_about(self, client: httpx.AsyncClient) -> EngineInfo:
        if self._dialect is None or self._dialect.info_path is None:
            return EngineInfo()
        try:
            return read_engine_info(await self._get(client, self._dialect.info_path))
        except (httpx.HTTPError, WorkerBroke) as error:
            log.debug("%s: %s", self._endpoint.id, error)
            return EngineInfo()

    async def _read_vocabulary(
        self, client: httpx.AsyncClient, models: frozenset[str], about: EngineInfo
    ) -> int | None:
        """An SGLang tells it nowhere but in the refusal of a call, which computes nothing."""
        if self._dialect is None or not self._dialect.refusal_names_vocabulary or about.embeds or not models:
            return None
        headers = {"content-type": "application/json", **self._endpoint.authorization}
        post = out_of_vocabulary_call(min(models - self._endpoint.parents.keys(), default=min(models)))
        try:
            reply = await fetch_any_status(client, self._endpoint.url + COMPLETIONS_PATH, headers, post=post)
        except (httpx.HTTPError, WorkerBroke) as error:
            log.debug("%s: %s", self._endpoint.id, error)
            return None
        return read_vocabulary(reply.body) if reply.response.status_code == httpx.codes.BAD_REQUEST else None

    async def _read_health(self, client: httpx.AsyncClient, *, listed: bool) -> None:
        """`listed`: whether it has just told its models."""
        if self._dialect is not None and not (listed and self._dialect.health_path == MODELS_PATH):
            await self._get(client, self._dialect.health_path)

    async def _read_load(self, client: httpx.AsyncClient) -> bool:
        """Whether it could be read. Whether it is alive is another question: an engine may keep no metrics."""
        dialect, path = self._dialect, self._load_path
        if dialect is None or path is None:
            return False
        try:
            body = await self._get(client, path)
            load = dialect.load_readers[path](body)
            page = body if path == self._cache_path else None
            self._report_load(load, *await self._read_cache(client, dialect, page))
            return True
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.NOT_FOUND:
                paths = [*dialect.load_readers, None]
                self._load_path = paths[paths.index(path) + 1]
            else:
                self._warn_of_metrics(error)
        except (httpx.HTTPError, WorkerBroke) as error:
            self._warn_of_metrics(error)
        return False

    async def _read_cache(
        self, client: httpx.AsyncClient, dialect: Dialect, page: bytes | None
    ) -> tuple[CacheReport | None, WorkReport | None]:
        """What it tells about its cache and its work, on the page with its load or on another; None where nothing."""
        if self._cache_path is None:
            return None, None
        try:
            told = await self._get(client, self._cache_path) if page is None else page
            return dialect.read_cache(told), dialect.read_work(told)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.NOT_FOUND:
                self._cache_path = None
            else:
                self._warn_of_metrics(error)
        except (httpx.HTTPError, WorkerBroke) as error:
            self._warn_of_metrics(error)
        return None, None

    def _report_load(self, load: Load, cache: CacheReport | None, work: WorkReport | None) -> None:
        self._polls_since_load = 0
        self._feed(
            WorkerReported(self._endpoint.id, load.running, load.waiting, load.kv_tokens, cache, load.places, work)
        )

    def _warn_of_metrics(self, error: Exception) -> None:
        """Its metrics are of no use this time; it is served on."""
        self.unusable_answers += 1
        if time.monotonic() >= self._warned_at + WARN_SECONDS:
            self._warned_at = time.monotonic()
            reason = str(error) or type(error).__name__
            log.warning(
                "worker %s: metrics ignored, %d times so far: %s", self._endpoint.id, self.unusable_answers, reason
            )

    async def flush(self, client: httpx.AsyncClient) -> None:
        """See `Poller.flush`."""
        path = None if self._dialect is None else self._dialect.flush_path
        if path is None:
            raise WorkerBroke(f"Worker {self._endpoint.id} cannot empty its cache.")
        try:
            response = await client.post(self._endpoint.url + path, headers=self._endpoint.authorization)
        except httpx.HTTPError as error:
            raise WorkerBroke(f"Worker {self._endpoint.id} did not answer: {error}") from error
        if response.is_error or b'"success":false' in response.content.replace(b" ", b""):
            said = f"POST {path} was answered with {response.status_code}"
            raise WorkerBroke(f"Worker {self._endpoint.id} did not empty its cache: {said}.")
        self._feed(Evicted(self._endpoint.id))

    async def _get(self, client: httpx.AsyncClient, path: str) -> bytes:
        return await fetch(client, self._endpoint.url + path, self._endpoint.authorization)

    def _on_missed(self, polls: int, why: str) -> None:
        if not self._polls and not self._unanswered:
            log.warning("worker %s is not there yet: %s", self._endpoint.id, why)
        self._unanswered += polls
        self._answers.clear()
        if self._endpoint.healthy and self._unanswered >= MISSED_POLLS:
            log.warning("worker %s is gone; its queue is placed anew: %s", self._endpoint.id, why)
            self._endpoint.healthy = False
            self._feed(WorkerLeft(self._endpoint.id))
