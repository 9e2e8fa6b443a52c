"""Watches one URL: whether it is up, what it serves and with which ranks, and its load."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from math import inf
from typing import Final

from router.core.model.events import Event, Evicted, WorkerAnswered, WorkerJoined, WorkerLeft, WorkerReported
from router.core.model.request import Connector, Role, Worker, WorkerId
from router.errors import WorkerBroke
from router.upstream.dialects import (
    MODELS_PATH,
    Dialect,
    EngineInfo,
    context_tokens,
    detect_dialect,
    read_cards,
    read_models,
    read_parents,
)
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.flag_rules import Finding, WorkerPart, connector_finding, connector_of, role_finding
from router.upstream.polling.engine_facts import ask_info, ask_ranks, ask_transfer_engines, ask_vocabulary
from router.upstream.polling.load_reader import LoadPages, LoadReader, LoadReport
from router.upstream.polling.poll_client import AnswerLate, PollClient, Unconnected
from router.upstream.ranks.rank_rules import RankRules

log = logging.getLogger(__name__)

LastSign = Callable[[WorkerId], float]
"""When a call last showed that a worker lives, on the monotonic clock; -inf for never."""
MISSED_POLLS: Final = 3
"""Polls in a row that a worker must leave unanswered to count as down; one refused connection is enough. One that is
late does not count while the worker's calls show life."""
POLLS_WITHOUT_LOAD: Final = 4
"""Health polls in a row without a load report after which an answered health poll itself counts as a sign of life: the
worker's metrics are slow, or it has none."""
BOOTSTRAP_PORT: Final = 8998
"""Where a vLLM with Mooncake listens for decode workers unless VLLM_MOONCAKE_BOOTSTRAP_PORT says otherwise."""
BOOTSTRAP_REMEDY: Final = "set its bootstrap_port, or start it with MooncakeConnector and the kv_role kv_producer"
POLLS_PER_MODEL_LIST: Final = 20
"""Health polls between two readings of the list of models: adapters come and go, but rarely."""


def never(_: WorkerId) -> float:
    """Return that a worker gave no sign of life, as far as is known."""
    return -inf


def part_of(endpoint: WorkerEndpoint) -> WorkerPart:
    """Return which part of requests a worker computes."""
    return WorkerPart(endpoint.role, endpoint.connector, endpoint.models)


class WorkerProbe:
    """Polls one URL and remembers what the polls so far have shown. Its ranks, if it has several, are workers, too."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        feed: Callable[[Event], None],
        directory: WorkerDirectory,
        rules: RankRules,
        last_sign: LastSign = never,
    ) -> None:
        """`directory`: reports a changed endpoint to the fronts, before they are sent calls for it. `last_sign`: what
        calls have shown.
        """
        self._endpoint = endpoint
        self._feed = feed
        self._publish: Callable[[WorkerEndpoint], None] = directory.publish
        self._directory = directory
        self._set_ranks: Callable[[WorkerEndpoint, Iterable[int]], None] = directory.set_ranks
        self._rules = rules
        self._last_sign = last_sign
        self._info = EngineInfo()
        self._named_port = endpoint.bootstrap_port
        self._engines: Mapping[int, str] = {}
        """As `ask_transfer_engines` returns them."""
        self._joined: dict[WorkerId, WorkerJoined] = {}
        """The last join events of the workers behind the URL, while they are up."""
        self._ignored_ranks: frozenset[int] = frozenset()
        """Ranks that were named in the log because they are not used."""
        self._dialect: Dialect | None = None
        self._loads = LoadReader(endpoint)
        self._polls = 0
        self._unanswered = 0
        self._load_readable = True
        """True if the last load poll succeeded; then load reports are the signs of life, not health polls."""
        self._polls_since_load = 0
        """Health polls since the last load report."""
        self._answers = asyncio.Event()
        """Set while the worker answers health polls; its load is polled only then."""
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
    def unusable_answers(self) -> int:
        """Answers about load and cache that could not be used."""
        return self._loads.unusable_answers

    @property
    def ranks(self) -> tuple[WorkerEndpoint, ...]:
        """Its ranks, if they are workers of their own."""
        return self._endpoint.ranks

    async def poll(self, client: PollClient) -> None:
        """Poll health, models and load once, and feed events for what changed."""
        await self.poll_health(client)
        if self._answers.is_set():
            await self.poll_load(client)

    async def poll_health(self, client: PollClient) -> None:
        """Poll the worker's health and, now and then, its models; feed events for what changed."""
        models, began = None, time.monotonic()
        try:
            if not self._endpoint.healthy or self._endpoint.assumed or self._polls % POLLS_PER_MODEL_LIST == 0:
                models = await self._read_models(client)
            await self._read_health(client, listed=models is not None)
        except Unconnected as error:
            self._on_missed(MISSED_POLLS, str(error))
        except AnswerLate as error:
            if not self._shows_life(began):
                self._on_missed(1, str(error))
        except WorkerBroke as error:
            self._on_missed(1, str(error))
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

    async def poll_load(self, client: PollClient) -> None:
        """Wait until the worker is up, then read its load and report it."""
        await self._answers.wait()
        pages = await self._loads.read(client)
        self._load_readable = pages is not None and self._report_load(pages)

    async def _read_models(self, client: PollClient) -> frozenset[str]:
        body = await self._get(client, MODELS_PATH)
        dialect = detect_dialect(body)
        self._dialect = dialect
        self._loads.speak(dialect)
        self._endpoint.context_tokens = context_tokens(body)
        self._endpoint.parents = read_parents(body)
        self._endpoint.cards = read_cards(body)
        self._publish(self._endpoint)
        return read_models(body)

    async def _on_models(self, client: PollClient, models: frozenset[str]) -> None:
        """Report a worker that has become healthy, or whose list of models or engines has changed, as joined."""
        known = self._endpoint.healthy and not self._endpoint.assumed
        if models != self._endpoint.models or not known or await self._has_other_engines(client):
            endpoint, dialect = self._endpoint, self._dialect
            info = await ask_info(client, endpoint, dialect)
            vocabulary = await ask_vocabulary(client, endpoint, dialect, models, info)
            reported = None
            if dialect is not None and self._asks_for_ranks:
                reported = await ask_ranks(client, endpoint, dialect, info)
            engines = await ask_transfer_engines(client, endpoint, dialect, self._bootstrap_port(info))
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

    async def _has_other_engines(self, client: PollClient) -> bool:
        """Return whether a prefill worker was started again between two polls: decode workers must be told its new ids,
        as they would wait for an engine that is gone.
        """
        port = self._bootstrap_port(self._info)
        engines = await ask_transfer_engines(client, self._endpoint, self._dialect, port)
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

    async def _read_health(self, client: PollClient, *, listed: bool) -> None:
        """`listed`: whether the worker has just answered with its list of models."""
        if self._dialect is not None and not (listed and self._dialect.health_path == MODELS_PATH):
            await self._get(client, self._dialect.health_path)

    def _report_load(self, pages: LoadPages) -> bool:
        """Report the load, of each rank if the URL has several. Returns False if it cannot be read."""
        try:
            self._look_at_ranks(pages)
            if self.ranks:
                self._report_ranks(pages.by_rank())
            else:
                self._report_whole(pages)
        except WorkerBroke as error:
            self._loads.warn(error)
            return False
        self._polls_since_load = 0
        return True

    def _look_at_ranks(self, pages: LoadPages) -> None:
        """Report ranks that have come or gone."""
        # An engine that reports its ranks elsewhere, or is asked for none, is not looked at with every poll.
        if self._info.ranks is None and self._asks_for_ranks and self._joined:
            reported = pages.ranks
            if reported is not None and self._rules.used(reported) != frozenset(rank.rank for rank in self.ranks):
                self._join(reported)

    def _report_ranks(self, reports: Mapping[int, LoadReport]) -> None:
        for rank in self.ranks:
            report = None if rank.rank is None else reports.get(rank.rank)
            self._feed(WorkerAnswered(rank.id) if report is None else _reported(rank.id, report))
        self._feed(WorkerAnswered(self._endpoint.id))

    def _report_whole(self, pages: LoadPages) -> None:
        load = pages.read_load()
        try:
            report = LoadReport(load, *pages.read_cache())
        except WorkerBroke as error:
            self._loads.warn(error)
            report = LoadReport(load)
        self._feed(_reported(self._endpoint.id, report))

    async def flush(self, client: PollClient) -> None:
        """Have the worker empty its prefix cache. Raises WorkerBroke if it does not, or cannot."""
        dialect = self._dialect
        path = None if dialect is None else dialect.flush_path
        if dialect is None or path is None:
            raise WorkerBroke(f"Worker {self._endpoint.id} cannot empty its cache.")
        try:
            reply = await client.fetch_any_status(self._endpoint.url + path, self._endpoint.authorization, post=b"")
        except WorkerBroke as error:
            raise WorkerBroke(f"Worker {self._endpoint.id} did not answer: {error}") from error
        if reply.status >= HTTPStatus.BAD_REQUEST or b'"success":false' in reply.body.replace(b" ", b""):
            answer = f"POST {path} was answered with {reply.status}"
            off = reply.status == HTTPStatus.NOT_FOUND and dialect.flush_needs is not None
            hint = f"; it does so only if it was started with {dialect.flush_needs}" if off else ""
            raise WorkerBroke(f"Worker {self._endpoint.id} did not empty its cache: {answer}{hint}.")
        for rank in self.ranks:
            self._feed(Evicted(rank.id))
        self._feed(Evicted(self._endpoint.id))

    async def _get(self, client: PollClient, path: str) -> bytes:
        return await client.fetch(self._endpoint.url + path, self._endpoint.authorization)

    def _shows_life(self, since: float) -> bool:
        """Return whether calls have shown since then that the worker is only too busy to answer polls in time."""
        workers = (*self.ranks, self._endpoint)
        return self._endpoint.healthy and any(self._last_sign(each.id) > since for each in workers)

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


def _reported(worker: WorkerId, report: LoadReport) -> WorkerReported:
    load = report.load
    return WorkerReported(worker, load.running, load.waiting, load.kv_tokens, report.cache, load.places, report.work)
