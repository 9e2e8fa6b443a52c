"""Rounds, waits and lags in /fairness and /metrics, with many clients over HTTP before two emulated workers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import process_count
from tests.support.running import COMPLETIONS, TIMEOUT_S, RunningRouter, emulated_workers, running_router

CLIENTS: Final = [f"c{number}" for number in range(16)]
LENGTH: Final = 8000
"""Bytes of each client's own prefix."""
ENGINE: Final = ("--hardware", "a100-mistral-7b", "--speed", "1", "--max-running", "2")
"""Slow enough that calls wait."""
OUTPUT_OF_A_CALL: Final = 40.0
"""What the 20 tokens of an answer cost."""
WITHOUT_END: Final = {"quantum": 1e9, "round_seconds": 0.0, "overdue_after": 0.0, "head_start": 2000.0}
"""With the longest match first, the first clients are served until they have used up a quantum."""


class Crowd:
    """Clients that always have one open call each."""

    def __init__(self, router: RunningRouter) -> None:
        self._router = router
        self._going = True
        self.answered: Counter[str] = Counter()

    async def call(self, client: str) -> None:
        while self._going:
            prompt = f"{client} ".ljust(LENGTH, "x") + str(self.answered[client])
            body = {"model": "m", "prompt": prompt, "max_tokens": 20, "user": client, "stream": True}
            await self._router.post(body, COMPLETIONS).read()
            self.answered[client] += 1

    def stop(self) -> None:
        """Let open calls end and start no more."""
        self._going = False


@asynccontextmanager
async def crowd(**settings: Any) -> AsyncIterator[tuple[RunningRouter, Crowd]]:
    with emulated_workers(2, *ENGINE) as urls:
        async with running_router(*urls, **settings) as router, asyncio.TaskGroup() as calls:
            clients = Crowd(router)
            for client in CLIENTS:
                calls.create_task(clients.call(client))
            yield router, clients
            clients.stop()


async def report_when(router: RunningRouter, true: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """Return the first report that fulfils the condition."""
    async with asyncio.timeout(TIMEOUT_S):
        while not true(report := await router.fairness()):  # noqa: ASYNC110 - nobody is there to set an event
            await asyncio.sleep(0.05)
    return dict(report)


async def scraped(router: RunningRouter) -> dict[str, float]:
    """Return each sample by its name and label values."""
    async with router.http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {
            " ".join([sample.name, *sample.labels.values()]): sample.value
            for family in families
            for sample in family.samples
        }


async def test_starved_clients_are_reported_while_the_service_gap_shows_nothing() -> None:
    """The report shows unserved clients, their lag, and a round that does not end.

    The gap counts clients that are backlogged all the time, which those with one open call are not. By two fronts, the
    next call of one may come before its last one is known to have ended.
    """
    async with crowd(dlpm_home=WITHOUT_END) as (router, _):
        report = await report_when(router, lambda entry: (entry["waits"]["unserved_rounds"] or 0) > 2)
        samples = await scraped(router)
        later = await router.fairness()
    starved = [entry for entry in report["clients"].values() if entry["service"]["cost"] == 0.0]
    served = [entry for entry in report["clients"].values() if entry["service"]["cost"] > 0.0]
    assert starved
    assert served
    most = 0.0 if process_count() == 1 else OUTPUT_OF_A_CALL
    assert max(entry["service_gap"] for entry in report["workers"].values()) <= most
    assert report["service_lag"] == max(entry["service_lag"] for entry in starved) > 0.0
    assert min(entry["unserved_s"] for entry in starved) > report["rounds"]["fair_s"]
    assert report["waits"]["unserved_clients"] >= len(starved)
    assert report["waits"]["waiting_rounds"] > 2
    assert report["rounds"]["unserved"] >= len(starved)
    assert report["rounds"]["current_s"] > report["rounds"]["fair_s"]
    assert sum(entry["share"] for entry in report["clients"].values()) == pytest.approx(1.0)
    assert {entry["share"] for entry in starved} == {0.0}
    still_starved = [entry for entry in later["clients"].values() if entry["service"]["cost"] == 0.0]
    assert samples["d2lpm_unserved_clients"] >= len(still_starved)  # a starved client may be served before the scrape
    assert samples["d2lpm_longest_unserved_rounds"] > 1
    assert samples["d2lpm_service_lag_cost_units"] > 0.0
    assert samples["d2lpm_round_clients open"] <= len(CLIENTS)


def all_is_computed(report: Mapping[str, Any]) -> bool:
    """Return whether both workers have reported as computed what was charged; a later poll brings the last of it."""
    charged = [entry["work"]["charged_of_computed"] for entry in report["workers"].values()]
    return bool(charged == pytest.approx([1.0] * 2, abs=0.1))


async def test_every_client_is_served_in_each_round() -> None:
    """By default no client is left out, and charged tokens match computed ones."""
    async with crowd() as (router, clients):
        await report_when(router, lambda _: min(clients.answered[client] for client in CLIENTS) >= 3)
        clients.stop()
        report = await report_when(router, lambda entry: entry["rounds"]["clients"] == 0 and all_is_computed(entry))
    assert report["rounds"]["last_s"] is not None
    assert report["waits"]["unserved_s"] == 0.0
    assert max(entry["service_lag"] for entry in report["clients"].values()) == report["service_lag"]
