"""The history of fairness: what is kept of a report, for how long, and of which clients."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from router.core.model.request import ClientId, WorkerId
from router.telemetry.history import CLIENT_LIMIT, SAMPLE_LIMIT, CacheSample, ClientSample, FairnessHistory, sample
from router.telemetry.report import ClientReport, FairnessReport, Service, WorkerCacheReport, WorkerReport
from router.telemetry.turn_report import NO_WAIT

Client = tuple[float, int, int]
"""Cost served, queued and running."""
SOME: Mapping[str, Client] = {"ann": (7.0, 1, 2), "bob": (5.5, 0, 0)}
NOTHING = Service(0, 0, 0, 0.0)


def report(clients: Mapping[str, Client] = SOME, gaps: Mapping[str, float | None] | None = None) -> FairnessReport:
    """A report with these clients, and workers with these gaps."""
    entries = {
        ClientId(name): ClientReport(1.0, Service(1, 2, 3, cost), queued, running, None, None, {})
        for name, (cost, queued, running) in clients.items()
    }
    workers = {
        WorkerId(name): WorkerReport("http://w", True, 0, 0, 0, None, None, gap, None)
        for name, gap in (gaps or {}).items()
    }
    waits = replace(NO_WAIT, unserved_rounds=3.5)
    return FairnessReport("dlpm_home", 0.75, entries, NOTHING, workers, service_lag=40.0, waits=waits)


class Reports:
    """Returns reports, of which the first fails; the clock counts the reads."""

    def __init__(self) -> None:
        self.asked = 0
        self.clients = dict(SOME)
        self.enough = asyncio.Event()

    async def read(self) -> FairnessReport:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("not yet")
        if self.asked == 4:
            self.enough.set()
        return report(self.clients)

    def clock(self) -> float:
        return float(self.asked)


def test_a_sample_has_service_queues_gaps_and_lag() -> None:
    """A worker without a bound is listed with a gap of None."""
    kept = sample(report(gaps={"w1": 2.5, "w2": None}), 100.0)
    assert (kept.time, kept.jain) == (100.0, 0.75)
    assert kept.clients == {"ann": ClientSample(7.0, 1, 2), "bob": ClientSample(5.5, 0, 0)}
    assert kept.gaps == {"w1": 2.5, "w2": None}
    assert (kept.service_lag, kept.unserved_rounds) == (40.0, 3.5)


def test_a_sample_has_what_the_page_draws() -> None:
    """Shares, bounds, requests of all clients, and the hit rates of all workers that are present."""
    one = WorkerCacheReport(9, 9, 2, 100, 40, 30, 10, 0, None, 1.0, False, {})
    workers = {
        WorkerId("w1"): WorkerReport("http://w", True, 0, 0, 0, None, None, 2.5, 9.0, one),
        WorkerId("w2"): WorkerReport("http://w", True, 0, 0, 0, None, None, None, None, replace(one, prompt=50)),
        WorkerId("away"): WorkerReport("http://w", False, 0, 0, 0, None, None, None, None),
    }
    clients = {name: replace(client, share=0.5) for name, client in report().clients.items()}
    kept = sample(replace(report(), clients=clients, workers=workers), 100.0)
    assert kept.bounds == {"w1": 9.0, "w2": None, "away": None}
    assert (kept.queued, kept.running) == (1, 2)
    assert kept.cache == CacheSample(prompt=150, predicted=80, actual=60)
    assert {client.share for client in kept.clients.values()} == {0.5}


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 9.0]), st.integers(0, 2), st.integers(0, 2)), max_size=160))
@example([(float(number % 7), number % 3, number % 2) for number in range(CLIENT_LIMIT + 30)])
def test_the_busiest_clients_are_kept(clients: list[Client]) -> None:
    """Clients with more waiting and running requests are kept, then those with more service.

    Among equals the first are kept, so that each sample keeps the same ones.
    """
    every = {f"c{number}": client for number, client in enumerate(clients)}
    kept = sample(report(every), 0.0).clients
    assert len(kept) == min(CLIENT_LIMIT, len(every))
    ranks = {name: (queued + running, cost) for name, (cost, queued, running) in every.items()}
    in_order = sorted(every, key=lambda name: ranks[name], reverse=True)
    assert list(kept) == in_order[: len(kept)]


async def test_samples_are_kept_for_an_hour_oldest_first() -> None:
    """Each sample has its own time; the oldest are dropped when there are too many."""
    reports = Reports()
    reports.asked = 1
    history = FairnessHistory(reports.read, clock=reports.clock)
    assert history.samples == []
    for _ in range(SAMPLE_LIMIT + 5):
        await history.take_sample()
    assert [each.time for each in history.samples] == [float(7 + number) for number in range(SAMPLE_LIMIT)]


async def test_a_client_that_left_stays_in_earlier_samples() -> None:
    """A sample does not change later, and a list that was returned does not grow."""
    reports = Reports()
    reports.asked = 1
    history = FairnessHistory(reports.read, clock=reports.clock)
    await history.take_sample()
    before = history.samples
    del reports.clients["ann"]
    await history.take_sample()
    assert [set(each.clients) for each in history.samples] == [{"ann", "bob"}, {"bob"}]
    assert len(before) == 1


async def test_samples_are_taken_in_the_background_and_a_failed_one_is_left_out() -> None:
    """After a failed sample, the next one is taken on time."""
    reports = Reports()
    async with FairnessHistory(reports.read, 0.0, reports.clock) as history, asyncio.timeout(60):
        await reports.enough.wait()
    assert [each.time for each in history.samples][:2] == [2.0, 3.0]
