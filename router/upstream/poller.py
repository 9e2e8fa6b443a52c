"""Polls the workers' health, models and load, and turns changes into events for the scheduler."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Self

import httpx

from router.api.handoff.mooncake import read_engine_ids
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
from router.core.model.request import Connector, Role, Worker, WorkerId
from router.errors import WorkerBroke
from router.upstream.dialects import (
    COMPLETIONS_PATH,
    MODELS_PATH,
    SGLANG,
    Dialect,
    EngineInfo,
    ReportedLoad,
    context_tokens,
    detect_dialect,
    out_of_vocabulary_call,
    pages_by_rank,
    read_cards,
    read_engine_info,
    read_models,
    read_parents,
    read_vocabulary,
    reported_ranks,
)
from router.upstream.directory import WorkerDirectory, WorkerEndpoint, bootstrap_url
from router.upstream.flag_rules import Finding, WorkerPart, connector_finding, connector_of, role_finding, tier_findings
from router.upstream.poll_client import fetch, fetch_any_status, polling_client
from router.upstream.ranks.barrier_health import BarrierHealth
from router.upstream.ranks.rank_rules import RankRules

log = logging.getLogger(__name__)

MISSED_POLLS = 3
"""Polls in a row that a worker must leave unanswered to count as down; one refused connection is enough."""
WARN_SECONDS = 60.0
"""Least time between two log lines about a worker's metrics."""
POLLS_WITHOUT_LOAD = 4
"""Health polls in a row without a load report after which an answered health poll itself counts as a sign of life: the
worker's metrics are slow, or it has none."""
BOOTSTRAP_PORT = 8998
"""Where a vLLM with Mooncake listens for decode workers unless VLLM_MOONCAKE_BOOTSTRAP_PORT says otherwise."""
BOOTSTRAP_REMEDY = "set its bootstrap_port, or start it with MooncakeConnector and the kv_role kv_producer"
POLLS_PER_MODEL_LIST = 20
"""Health polls between two readings of the list of models: adapters come and go, but rarely."""


class Poller:
    """Polls every worker while the context is entered, and feeds an event to the scheduler for each change."""

    def __init__(
        self,
        directory: WorkerDirectory,
        feed: Callable[[Event], None],
        interval: float,
        rules: RankRules = RankRules(),  # noqa: B008 - frozen
    ) -> None:
        """`interval`: seconds between two polls of a worker; `rules`: which ranks are workers of their own."""
        self._directory = directory
        self._rules = rules
        self._health = BarrierHealth(directory, feed)
        self._probes: dict[WorkerId, WorkerProbe] = {}
        """By worker, ranks excluded: one for each URL."""
        for endpoint in directory.endpoints:
            if endpoint.server is None:
                self._probes[endpoint.id] = self._probe(endpoint)
        self._interval = interval
        self._tasks: dict[WorkerId, tuple[asyncio.Task[None], ...]] = {}
        """For each worker a task that polls its health and one that polls its load, so that slow metrics do not delay
        the health poll."""
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        """Poll each worker once, so that the first call finds the workers that are up; then keep polling."""
        client = polling_client()
        await asyncio.gather(*(probe.poll(client) for probe in self._probes.values()))
        self._client = client
        for worker, probe in self._probes.items():
            self._tasks[worker] = self._start_polling(client, probe, self._interval)
        for seen, change in tier_findings([part_of(each) for each in self._directory.endpoints if each.healthy]):
            log.warning("%s; %s", seen, change)
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

    async def poll_once(self, workers: Collection[WorkerId], seconds: float) -> None:
        """Poll these workers once, for at most so many seconds, before the context is entered."""
        if not workers:
            return
        async with polling_client() as client:
            probes = dict.fromkeys(self._probe_of(worker) for worker in workers)
            polls = [asyncio.create_task(probe.poll_health(client)) for probe in probes]
            await asyncio.wait(polls, timeout=seconds)
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    def add(self, endpoint: WorkerEndpoint) -> None:
        """Poll one more worker, the first time at once if the context is entered."""
        probe = self._probes[endpoint.id] = self._probe(endpoint)
        if self._client is not None:
            self._tasks[endpoint.id] = self._start_polling(self._client, probe, 0.0)

    def remove(self, worker: WorkerId) -> None:
        """Stop polling a worker and its ranks; no event about them follows."""
        self._probes.pop(worker).stop()
        for each in self._directory.behind(worker):
            self._health.forget(each.id)
        for task in self._tasks.pop(worker, ()):
            task.cancel()

    def removed(self) -> None:
        """Go on without a worker that was removed from the directory."""
        self._health.complete()

    def unusable_answers(self) -> Mapping[WorkerId, int]:
        """The number of answers about load and cache that could not be used, by worker."""
        probes = self._probes.values()
        return {each.id: probe.unusable_answers for probe in probes for each in (probe.endpoint, *probe.ranks)}

    def mark_unreachable(self, worker: WorkerId) -> None:
        """Report a worker that refused a connection as gone, with all ranks of its URL, until it answers a poll."""
        for each in self._directory.mark_unreachable(worker):
            self._health.feed(WorkerLeft(each))

    async def flush(self, worker: WorkerId) -> None:
        """Have a worker empty its prefix cache, and report that to the scheduler.

        Raises WorkerBroke if the worker does not, or cannot.
        """
        if self._client is None:
            raise WorkerBroke(f"Worker {worker} is not polled.")
        await self._probe_of(worker).flush(self._client)

    def _probe(self, endpoint: WorkerEndpoint) -> "WorkerProbe":
        if not endpoint.ranks:  # a group waits also for those that have never answered
            endpoint.barrier = self._rules.barrier_of(endpoint.id, endpoint.group, several=False, lockstep=None)
        return WorkerProbe(endpoint, self._health.feed, self._directory, self._rules)

    def _probe_of(self, worker: WorkerId) -> "WorkerProbe":
        return self._probes[self._directory[worker].server or worker]

    def _start_polling(
        self, client: httpx.AsyncClient, probe: "WorkerProbe", pause: float
    ) -> tuple[asyncio.Task[None], ...]:
        polls = (probe.poll_health, probe.poll_load)
        return tuple(asyncio.create_task(self._poll_forever(poll, client, pause)) for poll in polls)

    async def _poll_forever(self, poll: "Poll", client: httpx.AsyncClient, pause: float) -> None:
        """`pause`: seconds before the first poll."""
        while True:
            await asyncio.sleep(pause)
            pause = self._interval
            try:
                await poll(client)
            except Exception:  # if polling stopped, the worker would keep its last health for ever
                log.exception("a poll failed inside the router")


def part_of(endpoint: WorkerEndpoint) -> WorkerPart:
    """Return which part of requests a worker computes."""
    return WorkerPart(endpoint.role, endpoint.connector, endpoint.models)


Poll = Callable[[httpx.AsyncClient], Awaitable[None]]
"""Polls a worker once."""


class WorkerProbe:
    """Polls one URL and remembers what the polls so far have shown. Its ranks, if it has several, are workers, too."""

    def __init__(
        self, endpoint: WorkerEndpoint, feed: Callable[[Event], None], directory: WorkerDirectory, rules: RankRules
    ) -> None:
        """`directory`: reports a changed endpoint to the fronts, before they are sent calls for it."""
        self._endpoint = endpoint
        self._feed = feed
        self._publish: Callable[[WorkerEndpoint], None] = directory.publish
        self._directory = directory
        self._set_ranks: Callable[[WorkerEndpoint, Iterable[int]], None] = directory.set_ranks
        self._rules = rules
        self._info = EngineInfo()
        self._named_port = endpoint.bootstrap_port
        self._engines: Mapping[int, str] = {}
        """As `_read_transfer_engines` returns them."""
        self._joined: dict[WorkerId, WorkerJoined] = {}
        """The last join events of the workers behind the URL, while they are up."""
        self._ignored_ranks: frozenset[int] = frozenset()
        """Ranks that were named in the log because they are not used."""
        self._dialect: Dialect | None = None
        self._load_path: str | None = None
        self._cache_path: str | None = None
        self._polls = 0
        self._unanswered = 0
        self._load_readable = True
        """True if the last load poll succeeded; then load reports are the signs of life, not health polls."""
        self._polls_since_load = 0
        """Health polls since the last load report."""
        self._answers = asyncio.Event()
        """Set while the worker answers health polls; its load is polled only then."""
        self.unusable_answers = 0
        """Answers about load and cache that could not be used."""
        self._warned_at = -WARN_SECONDS
        self._unfit: Finding | None = None
        """Why it is not used although it answers, as last logged."""

    def stop(self) -> None:
        """Report nothing more, even if a poll is under way."""
        self._feed = lambda _: None
        self._publish = lambda _: None
        self._set_ranks = lambda _server, _ranks: None

    @property
    def endpoint(self) -> WorkerEndpoint:
        """The URL as a whole."""
        return self._endpoint

    @property
    def ranks(self) -> tuple[WorkerEndpoint, ...]:
        """Its ranks, if they are workers of their own."""
        return self._endpoint.ranks

    async def poll(self, client: httpx.AsyncClient) -> None:
        """Poll health, models and load once, and feed events for what changed."""
        await self.poll_health(client)
        if self._answers.is_set():
            await self.poll_load(client)

    async def poll_health(self, client: httpx.AsyncClient) -> None:
        """Poll the worker's health and, now and then, its models; feed events for what changed."""
        models = None
        try:
            if not self._endpoint.healthy or self._endpoint.assumed or self._polls % POLLS_PER_MODEL_LIST == 0:
                models = await self._read_models(client)
            await self._read_health(client, listed=models is not None)
        except httpx.ConnectError:
            self._on_missed(MISSED_POLLS, "it refuses connections")
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
                for rank in self.ranks:
                    self._feed(WorkerAnswered(rank.id))
                self._feed(WorkerAnswered(self._endpoint.id))

    async def poll_load(self, client: httpx.AsyncClient) -> None:
        """Wait until the worker is up, then read its load and report it."""
        await self._answers.wait()
        self._load_readable = await self._read_load(client)

    async def _read_models(self, client: httpx.AsyncClient) -> frozenset[str]:
        body = await self._get(client, MODELS_PATH)
        dialect = detect_dialect(body)
        self._dialect = dialect
        # Forget paths that answered 404: a proxy in front may have started since, or the engine was upgraded.
        self._load_path = next(iter(dialect.load_readers), None)
        self._cache_path = dialect.cache_path
        self._endpoint.context_tokens = context_tokens(body)
        self._endpoint.parents = read_parents(body)
        self._endpoint.cards = read_cards(body)
        self._publish(self._endpoint)
        return read_models(body)

    async def _on_models(self, client: httpx.AsyncClient, models: frozenset[str]) -> None:
        """Report a worker that has become healthy, or whose list of models or engines has changed, as joined."""
        known = self._endpoint.healthy and not self._endpoint.assumed
        if models != self._endpoint.models or not known or await self._has_other_engines(client):
            info = await self._read_engine_info(client)
            vocabulary = await self._read_vocabulary(client, models, info)
            reported = await self._read_ranks(client, info)
            engines = await self._read_transfer_engines(client, info)
            # No await from here on: when anyone sees the endpoint as healthy, the scheduler must know the worker.
            if not self._take_role(models, info, engines):
                return
            if not self._endpoint.healthy:
                log.info("worker %s is up and serves %s", self._endpoint.id, ", ".join(sorted(models)))
            self._endpoint.models, self._endpoint.healthy, self._endpoint.assumed = models, True, False
            engine = "" if self._dialect is None else self._dialect.name
            self._endpoint.fields.set_engine(engine, info.version)
            self._endpoint.embeds = info.embeds
            self._endpoint.vocabulary = vocabulary
            self._info = info
            self._join(reported)

    def _take_role(self, models: frozenset[str], info: EngineInfo, engines: Mapping[int, str]) -> bool:
        """Note which part of requests the worker computes. Returns False if it cannot do that."""
        endpoint = self._endpoint
        role = endpoint.named_role if info.role is Role.BOTH else info.role
        connector = connector_of(role, self._dialect, endpoint.named_connector)
        part = WorkerPart(role, connector, models)
        others = [each for each in self._directory.endpoints if each.healthy and each.id != endpoint.id]
        unfit = role_finding(endpoint.named_role, self._dialect, info) or connector_finding(part, map(part_of, others))
        if unfit is None and (role, connector) == (Role.PREFILL, Connector.MOONCAKE) and not engines:
            unfit = Finding(f"does not answer at its bootstrap port {self._bootstrap_port(info)}", BOOTSTRAP_REMEDY)
        if unfit is not None and unfit != self._unfit:
            log.error("worker %s is not used: it %s; %s", endpoint.id, *unfit)
        self._unfit = unfit
        if unfit is not None:
            return False
        endpoint.role, endpoint.connector = role, connector
        endpoint.bootstrap_port = self._bootstrap_port(info)
        self._engines = engines
        return True

    def _bootstrap_port(self, info: EngineInfo) -> int:
        return self._named_port or info.bootstrap_port or BOOTSTRAP_PORT

    async def _read_transfer_engines(self, client: httpx.AsyncClient, info: EngineInfo) -> Mapping[int, str]:
        """Return the ids of a prefill worker's engines by rank, for decode workers with Mooncake; none if there are
        none.
        """
        endpoint = self._endpoint
        if endpoint.named_role is not Role.PREFILL or endpoint.named_connector is not Connector.MOONCAKE:
            return {}
        if self._dialect is SGLANG:
            return {}
        try:
            return read_engine_ids(
                await fetch(client, f"{bootstrap_url(endpoint.url, self._bootstrap_port(info))}/query", {})
            )
        except (httpx.HTTPError, WorkerBroke) as error:
            log.debug("%s: %s", endpoint.id, error)
            return {}

    async def _has_other_engines(self, client: httpx.AsyncClient) -> bool:
        """Return whether a prefill worker was started anew between two polls: decode workers must be told its new ids,
        as they wait in vain for an engine that is gone.
        """
        engines = await self._read_transfer_engines(client, self._info)
        return bool(engines) and engines != self._engines

    def _join(self, reported: frozenset[int] | None) -> None:
        """Report the URL as joined, or it and its ranks. A rank that the engine no longer has has left.

        `reported`: the ranks of the engine; None if it does not say, so that they are those that were known before.
        """
        endpoint = self._endpoint
        if reported is None and endpoint.ranks:
            reported = frozenset([rank.rank for rank in endpoint.ranks if rank.rank is not None])
        used = self._rules.used(reported) if self._asks_for_ranks else frozenset[int]()
        self._name_ranks(reported, used)
        if used or endpoint.ranks:
            self._set_ranks(endpoint, used)
        for each in endpoint.ranks or (endpoint,):
            each.transfer_engine = self._engines.get(each.rank or 0)
            each.barrier = self._rules.barrier_of(
                endpoint.id, endpoint.group, several=bool(endpoint.ranks), lockstep=self._info.lockstep
            )
        if endpoint.ranks:
            endpoint.barrier = None
        self._publish(endpoint)
        workers = [self._worker(each) for each in (*endpoint.ranks, endpoint)]
        gone = self._joined.keys() - {worker.id for worker in workers}
        # First who joins, so that what waits for those that leave, or serve less now, finds another worker.
        for worker in workers:
            self._joined[worker.id] = WorkerJoined(worker)
            self._feed(self._joined[worker.id])
        for left in gone:
            self._leave(left)

    def _worker(self, endpoint: WorkerEndpoint) -> Worker:
        info = self._info
        return Worker(
            endpoint.id,
            endpoint.models,
            reorders=info.reorders,
            engine=endpoint.fields.engine,
            batch_tokens=info.batch_tokens,
            caches=info.caches,
            rank=endpoint.rank,
            barrier=endpoint.barrier,
            takes=endpoint.takes,
            role=endpoint.role,
            connector=endpoint.connector or Connector.NIXL,
        )

    def _leave(self, worker: WorkerId) -> None:
        self._joined.pop(worker, None)
        self._feed(WorkerLeft(worker))

    def _name_ranks(self, reported: frozenset[int] | None, used: frozenset[int]) -> None:
        """Log the ranks that the settings name and the engine lacks, and those that have left."""
        missing = self._rules.out_of_range(reported)
        if missing and missing != self._ignored_ranks:
            named = ", ".join(map(str, sorted(missing)))
            log.warning("worker %s has no rank %s: it is not used", self._endpoint.id, named)
        self._ignored_ranks = missing
        for rank in self.ranks:
            if rank.rank not in used:
                log.warning("worker %s is gone: its engine no longer has this rank", rank.id)

    @property
    def _asks_for_ranks(self) -> bool:
        """Whether it matters which ranks the engine has, and the engine may say so."""
        labelled = self._dialect is not None and bool(self._dialect.rank_label)
        return labelled and self._rules.ranks != "off" and self._endpoint.rank is None

    async def _read_ranks(self, client: httpx.AsyncClient, info: EngineInfo) -> frozenset[int] | None:
        """Return the engine's data-parallel ranks; None if it does not say, or nobody wants to know."""
        dialect = self._dialect
        if dialect is None or not self._asks_for_ranks:
            return None
        if info.ranks is not None or dialect.cache_path is None:
            return info.ranks
        try:
            return reported_ranks(await self._get(client, dialect.cache_path), dialect.rank_label)
        except (httpx.HTTPError, WorkerBroke) as error:
            log.debug("%s: %s", self._endpoint.id, error)
            return None

    async def _read_engine_info(self, client: httpx.AsyncClient) -> EngineInfo:
        if self._dialect is None or self._dialect.info_path is None:
            return EngineInfo()
        try:
            return read_engine_info(await self._get(client, self._dialect.info_path))
        except (httpx.HTTPError, WorkerBroke) as error:
            log.debug("%s: %s", self._endpoint.id, error)
            return EngineInfo()

    async def _read_vocabulary(self, client: httpx.AsyncClient, models: frozenset[str], info: EngineInfo) -> int | None:
        """Return the vocabulary size, which SGLang reveals only in its refusal of a call; the call computes nothing."""
        if self._dialect is None or not self._dialect.refusal_names_vocabulary or info.embeds or not models:
            return None
        if info.role is not Role.BOTH:
            return None  # alone, it may not even refuse it
        headers = {"content-type": "application/json", **self._endpoint.authorization}
        post = out_of_vocabulary_call(min(models - self._endpoint.parents.keys(), default=min(models)))
        try:
            reply = await fetch_any_status(client, self._endpoint.url + COMPLETIONS_PATH, headers, post=post)
        except (httpx.HTTPError, WorkerBroke) as error:
            log.debug("%s: %s", self._endpoint.id, error)
            return None
        return read_vocabulary(reply.body) if reply.response.status_code == httpx.codes.BAD_REQUEST else None

    async def _read_health(self, client: httpx.AsyncClient, *, listed: bool) -> None:
        """`listed`: whether the worker has just answered with its list of models."""
        if self._dialect is not None and not (listed and self._dialect.health_path == MODELS_PATH):
            await self._get(client, self._dialect.health_path)

    async def _read_load(self, client: httpx.AsyncClient) -> bool:
        """Read the load and report it; return whether it could be read.

        A failure does not count as a missed poll: an engine may be up and keep no metrics.
        """
        dialect, path = self._dialect, self._load_path
        if dialect is None or path is None:
            return False
        try:
            body = await self._get(client, path)
            read = dialect.load_readers[path]
            page = body if path == self._cache_path else None
            if not self._follows_ranks(dialect, path, body):
                self._report_load(read(body), *await self._read_cache(client, dialect, page))
                return True
            if page is None and self._cache_path is not None:
                page = await self._read_cache_page(client)
            self._report_ranks(dialect, read, path, body, page)
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

    def _follows_ranks(self, dialect: Dialect, path: str, body: bytes) -> bool:
        """Return whether the URL has several ranks, after a look at whether they have changed."""
        # An engine that reports its ranks elsewhere, or is asked for none, is not looked at with every poll.
        if path == dialect.cache_path and self._info.ranks is None and self._asks_for_ranks and self._joined:
            reported = reported_ranks(body, dialect.rank_label)
            if reported is not None and self._rules.used(reported) != frozenset(rank.rank for rank in self.ranks):
                self._join(reported)
        return bool(self.ranks)

    def _report_ranks(
        self, dialect: Dialect, read: Callable[[bytes], ReportedLoad], path: str, body: bytes, page: bytes | None
    ) -> None:
        """Report the load of each rank, and that the URL answers. `page`: the answer about the cache."""
        self._polls_since_load = 0
        label = dialect.rank_label
        loads = pages_by_rank(path, body, label)
        caches = {} if page is None or self._cache_path is None else pages_by_rank(self._cache_path, page, label)
        for rank in self.ranks:
            if rank.rank not in loads:
                self._feed(WorkerAnswered(rank.id))
                continue
            load, cache, work = read(loads[rank.rank]), None, None
            if (own := caches.get(rank.rank)) is not None:
                cache, work = dialect.read_cache(own), dialect.read_work(own)
                if dialect.counts_prompts_by_rank is False:
                    cache = replace(cache, computed_tokens=None, hit_tokens=None)
            self._feed(WorkerReported(rank.id, load.running, load.waiting, load.kv_tokens, cache, load.places, work))
        self._feed(WorkerAnswered(self._endpoint.id))

    async def _read_cache_page(self, client: httpx.AsyncClient) -> bytes | None:
        """Return the answer about the cache; None if there is none."""
        assert self._cache_path is not None
        try:
            return await self._get(client, self._cache_path)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.NOT_FOUND:
                self._cache_path = None
            else:
                self._warn_of_metrics(error)
        except (httpx.HTTPError, WorkerBroke) as error:
            self._warn_of_metrics(error)
        return None

    async def _read_cache(
        self, client: httpx.AsyncClient, dialect: Dialect, page: bytes | None
    ) -> tuple[CacheReport | None, WorkReport | None]:
        """Return what the worker reports about its cache and its work, each None if nothing.

        `page` is the answer with the load, if the cache is reported on the same page.
        """
        if page is None and self._cache_path is not None:
            page = await self._read_cache_page(client)
        if page is None:
            return None, None
        try:
            return dialect.read_cache(page), dialect.read_work(page)
        except WorkerBroke as error:
            self._warn_of_metrics(error)
            return None, None

    def _report_load(self, load: ReportedLoad, cache: CacheReport | None, work: WorkReport | None) -> None:
        self._polls_since_load = 0
        self._feed(
            WorkerReported(self._endpoint.id, load.running, load.waiting, load.kv_tokens, cache, load.places, work)
        )

    def _warn_of_metrics(self, error: Exception) -> None:
        """Count and log an unusable answer; the worker stays in service."""
        self.unusable_answers += 1
        if time.monotonic() >= self._warned_at + WARN_SECONDS:
            self._warned_at = time.monotonic()
            reason = str(error) or type(error).__name__
            log.warning(
                "worker %s: metrics ignored, %d times so far: %s", self._endpoint.id, self.unusable_answers, reason
            )

    async def flush(self, client: httpx.AsyncClient) -> None:
        """Have the worker empty its prefix cache. Raises WorkerBroke if it does not, or cannot."""
        path = None if self._dialect is None else self._dialect.flush_path
        if path is None:
            raise WorkerBroke(f"Worker {self._endpoint.id} cannot empty its cache.")
        try:
            response = await client.post(self._endpoint.url + path, headers=self._endpoint.authorization)
        except httpx.HTTPError as error:
            raise WorkerBroke(f"Worker {self._endpoint.id} did not answer: {error}") from error
        if response.is_error or b'"success":false' in response.content.replace(b" ", b""):
            answer = f"POST {path} was answered with {response.status_code}"
            raise WorkerBroke(f"Worker {self._endpoint.id} did not empty its cache: {answer}.")
        for rank in self.ranks:
            self._feed(Evicted(rank.id))
        self._feed(Evicted(self._endpoint.id))

    async def _get(self, client: httpx.AsyncClient, path: str) -> bytes:
        return await fetch(client, self._endpoint.url + path, self._endpoint.authorization)

    def _on_missed(self, polls: int, reason: str) -> None:
        if not self._polls and not self._unanswered:
            log.warning("worker %s is not up yet: %s", self._endpoint.id, reason)
        self._unanswered += polls
        self._answers.clear()
        if self._endpoint.healthy and self._unanswered >= MISSED_POLLS:
            log.warning("worker %s is down; its queue is reassigned: %s", self._endpoint.id, reason)
            self._endpoint.healthy = self._endpoint.assumed = False
            self._publish(self._endpoint)
            for each in (*self.ranks, self._endpoint):
                self._leave(each.id)
