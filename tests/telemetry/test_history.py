"""How fairness went: what is kept of a report, for how long, and of which clients."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from router.core.model.request import ClientId, WorkerId
from router.telemetry.history import CLIENT_LIMIT, SAMPLE_LIMIT, ClientSample, FairnessHistory, sample
from router.telemetry.report import ClientReport, FairnessReport, Service, WorkerReport
from router.telemetry.turn_report import NO_WAIT

Client = tuple[float, int, int]
"""Cost served, queued and running."""
SOME: Mapping[str, Client] = {"ann": (7.0, 1, 2), "bob": (5.5, 0, 0)}
NOTHING = Service(0, 0, 0, 0.0)


def report(clients: Mapping[str, Client] = SOME, gaps: Mapping[str, float | None] | None = None) -> FairnessReport:
    """A report with these clients, and workers with these gaps."""
    told = {
        ClientId(name): ClientReport(1.0, Service(1, 2, 3, cost), queued, running, None, None, {})
        for name, (cost, queued, running) in clients.items()
    }
    workers = {
        WorkerId(name): WorkerReport("http://w", True, 0, 0, 0, None, None, gap, None)
        for name, gap in (gaps or {}).items()
    }
    waits = replace(NO_WAIT, unserved_rounds=3.5)
    return FairnessReport("dlpm_home", 0.75, told, NOTHING, workers, service_lag=40.0, waits=waits)


class Reports:
    """Reports of one call each, and the time at which each is asked for."""

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


def test_a_sample_says_who_was_served_how_much_and_how_far_apart_they_were() -> None:
    """A worker without a bound has no gap, and is there all the same."""
    told = sample(report(gaps={"w1": 2.5, "w2": None}), 100.0)
    assert (told.time, told.jain) == (100.0, 0.75)
    assert told.clients == {"ann": ClientSample(7.0, 1, 2), "bob": ClientSample(5.5, 0, 0)}
    assert told.gaps == {"w1": 2.5, "w2": None}
    assert (told.service_lag, told.unserved_rounds) == (40.0, 3.5)


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 9.0]), st.integers(0, 2), st.integers(0, 2)), max_size=160))
@example([(float(number % 7), number % 3, number % 2) for number in range(CLIENT_LIMIT + 30)])
def test_of_many_clients_those_that_are_busiest_are_kept(clients: list[Client]) -> None:
    """Nobody who is left out has more waiting and running than one who is kept, nor as much and was served more.

    Of equal ones those that came first stay, so that it is the same ones in each reading.
    """
    every = {f"c{number}": client for number, client in enumerate(clients)}
    kept = sample(report(every), 0.0).clients
    assert len(kept) == min(CLIENT_LIMIT, len(every))
    ranks = {name: (queued + running, cost) for name, (cost, queued, running) in every.items()}
    in_order = sorted(every, key=lambda name: ranks[name], reverse=True)
    assert list(kept) == in_order[: len(kept)]


async def test_readings_are_kept_for_an_hour_oldest_first() -> None:
    """Each has its own time; the first ones go when there are too many."""
    reports = Reports()
    reports.asked = 1
    history = FairnessHistory(reports.read, clock=reports.clock)
    assert history.samples == []
    for _ in range(SAMPLE_LIMIT + 5):
        await history.take_sample()
    assert [each.time for each in history.samples] == [float(7 + number) for number in range(SAMPLE_LIMIT)]


async def test_a_client_that_left_stays_where_it_was() -> None:
    """A reading is of its time; and a list that was handed out does not grow."""
    reports = Reports()
    reports.asked = 1
    history = FairnessHistory(reports.read, clock=reports.clock)
    await history.take_sample()
    before = history.samples
    del reports.clients["ann"]
    await history.take_sample()
    assert [set(each.clients) for each in history.samples] == [{"ann", "bob"}, {"bob"}]
    assert len(before) == 1


async def test_readings_are_taken_while_it_runs_and_one_that_fails_is_left_out() -> None:
    """The next one comes all the same."""
    reports = Reports()
    async with FairnessHistory(reports.read, 0.0, reports.clock) as history, asyncio.timeout(60):
        await reports.enough.wait()
    assert [each.time for each in history.samples][:2] == [2.0, 3.0]
