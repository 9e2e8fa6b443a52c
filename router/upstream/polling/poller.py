"""Polls the workers' health, models and load, and turns changes into events for the scheduler."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Self

from router.core.model.events import Event, WorkerLeft
from router.core.model.request import WorkerId
from router.errors import WorkerBroke
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.flag_rules import tier_findings
from router.upstream.polling.poll_client import PollClient
from router.upstream.polling.probe import LastSign, WorkerProbe, never, part_of
from router.upstream.ranks.barrier_health import BarrierHealth
from router.upstream.ranks.rank_rules import RankRules

log = logging.getLogger(__name__)

Poll = Callable[[PollClient], Awaitable[None]]
"""Polls a worker once."""


class Poller:
    """Polls every worker while the context is entered, and feeds an event to the scheduler for each change."""

    def __init__(
        self,
        directory: WorkerDirectory,
        feed: Callable[[Event], None],
        interval: float,
        rules: RankRules = RankRules(),  # noqa: B008 - frozen
        last_sign: LastSign = never,
    ) -> None:
        """`interval`: seconds between two polls of a worker; `rules`: which ranks are workers of their own;
        `last_sign`: as in `WorkerProbe`.
        """
        self._directory = directory
        self._rules = rules
        self._last_sign = last_sign
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
        self._client: PollClient | None = None

    async def __aenter__(self) -> Self:
        """Poll each worker once, so that the first call finds the workers that are up; then keep polling."""
        client = PollClient()
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
            client.close()

    async def poll_once(self, workers: Collection[WorkerId], seconds: float) -> None:
        """Poll these workers once, for at most `seconds`, before the context is entered."""
        if not workers:
            return
        async with PollClient() as client:
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
        """Return the number of answers about load and cache that could not be used, by worker."""
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

    def _probe(self, endpoint: WorkerEndpoint) -> WorkerProbe:
        if not endpoint.ranks:  # a group waits also for those that have never answered
            endpoint.barrier = self._rules.barrier_of(endpoint.id, endpoint.group, several=False, lockstep=None)
        return WorkerProbe(endpoint, self._health.feed, self._directory, self._rules, self._last_sign)

    def _probe_of(self, worker: WorkerId) -> WorkerProbe:
        return self._probes[self._directory[worker].server or worker]

    def _start_polling(self, client: PollClient, probe: WorkerProbe, pause: float) -> tuple[asyncio.Task[None], ...]:
        polls = (probe.poll_health, probe.poll_load)
        return tuple(asyncio.create_task(self._poll_forever(poll, client, pause)) for poll in polls)

    async def _poll_forever(self, poll: Poll, client: PollClient, pause: float) -> None:
        """`pause`: seconds before the first poll."""
        while True:
            await asyncio.sleep(pause)
            pause = self._interval
            try:
                await poll(client)
            except Exception:  # if polling stopped, the worker would keep its last health for ever
                log.exception("a poll failed inside the router")
