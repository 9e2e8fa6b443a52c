"""The scheduler remembers a bounded number of clients, and forgives no debt by forgetting its client."""

from collections import deque

import pytest

from router.core.fleet.window import FixedWindow
from router.core.known_clients import RecentClients
from router.core.model.request import ClientId
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters, DlpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import Scene
from tests.support.running import chat, running_router
from tests.support.scripted_engine import scripted_engine

LIMIT = 20
DEBTS = 30
STRANGERS = 300
SETTINGS = SchedulerSettings(client_limit=LIMIT, debtor_limit=DEBTS, window=FixedWindow(requests=3))
SMALL = (DlpmParameters(quantum=70.0), DlpmHomeParameters(quantum=70.0, worker_quantum=110.0))
POLICIES = ("dlpm_home", "d2lpm", "vtc", "lcf", "vtc_predict", "client_rr+dlpm", "rpm", "preble")


def entries(of: object, client: str, seen: set[int] | None = None) -> int:
    """Count the containers inside an object with keys or members that are clients with this prefix."""
    seen = set() if seen is None else seen
    if id(of) in seen or isinstance(of, str | bytes | int | float | type(None)):
        return 0
    seen.add(id(of))
    inner: list[object] = []
    count = 0
    if isinstance(of, dict):
        inner = [*of.keys(), *of.values()]
    elif isinstance(of, list | tuple | set | frozenset | deque):
        inner = [*of]
    elif type(of).__module__.startswith("router."):
        slots = [name for kind in type(of).__mro__ for name in getattr(kind, "__slots__", ())]
        inner = [*getattr(of, "__dict__", {}).values(), *(getattr(of, name) for name in slots if hasattr(of, name))]
    for each in inner:
        count += isinstance(each, str) and each.startswith(client)
        count += entries(each, client, seen)
    return count


def crowd(scene: Scene, first: int) -> None:
    """Let strangers arrive one after the other while others wait; each is served once."""
    for number in range(first, first + STRANGERS):
        scene.now += 1.0
        request = scene.arrive(f"stranger{number}.", "xy", limit=5)
        if running := list(scene.scheduler.attempts):
            scene.serve(running[0], 5)
        assert request in scene.requests


@pytest.mark.parametrize("policy", POLICIES)
def test_entries_of_strangers_are_bounded(policy: str) -> None:
    """After twice as many strangers the scheduler holds no more entries of them."""
    scene = Scene(policy, *SMALL, workers=("w1", "w2"), settings=SETTINGS)
    counts = []
    for turn in range(3):
        crowd(scene, turn * STRANGERS)
        counts.append(entries_after(scene))
        assert len(scene.scheduler.weights) <= LIMIT + 10
        assert len(scene.scheduler.ledger.accounts) <= LIMIT + 10
    assert counts[2] <= counts[1] * 1.1 + 10, counts
    total = scene.scheduler.ledger.forgotten
    for account in scene.scheduler.ledger.accounts.values():
        total = total.plus(account.served)
    assert total.output == 5 * 3 * STRANGERS


def entries_after(scene: Scene) -> int:
    """Count the entries of strangers when nothing runs any more. What has a limit of its own is left out: estimates and
    usage by day.
    """
    scene.serve_all()
    scheduler = scene.scheduler
    watched = (scheduler.weights, scheduler.ledger, scheduler.fairness, scheduler.policy, scheduler.backlog)
    limited = {id(scheduler.estimates), id(scheduler.estimates.outputs), id(scheduler.ledger.usage)}
    return sum(entries(part, "stranger", {*limited}) for part in watched)


@pytest.mark.parametrize("policy", ["dlpm_home", "d2lpm"])
def test_a_debt_outlives_its_client(policy: str) -> None:
    """A client that comes back after many others finds its debt, minus the refills since."""
    settings = SchedulerSettings(client_limit=LIMIT, debtor_limit=STRANGERS, window=FixedWindow(requests=1))
    scene = Scene(policy, *SMALL, workers=("w1",), settings=settings)
    first = scene.arrive("ann", "xxxx", limit=5000)
    scene.start(first)
    waiting = scene.arrive("bob", "yy")
    scene.progress(first, 5000)
    scene.finish(first, 5000)
    owed = scene.deficit("ann").order
    assert owed is not None
    assert owed < -9000
    for number in range(STRANGERS):
        scene.arrive(f"stranger{number}", "z")
        scene.serve(waiting)
        waiting = next(iter(scene.scheduler.attempts))
    assert ClientId("ann") not in scene.scheduler.weights
    kept = scene.deficit("ann").order
    assert kept is not None
    assert owed <= kept < -1000


def test_a_busy_client_is_remembered() -> None:
    """A client with a request in flight is remembered, however long ago it came."""
    clients = RecentClients(2)
    for number in range(100):
        clients.touch(ClientId(f"c{number}"))
        assert ClientId("c0") not in clients.to_forget(lambda client: client == "c0")
    assert len(clients) <= 4


async def test_service_of_forgotten_clients_stays_counted() -> None:
    """The report and the metrics count it as service of other clients, so that no count decreases."""
    async with scripted_engine() as engine, running_router(engine.url, client_limit=1) as router:
        for user in ("ann", "bob", "cy"):
            async with router.post(chat(user=user)) as post:
                await (await engine.call()).answer(completion=7)
                await post.read()
        await router.until_all_ended()
        report = await router.fairness()
        assert list(report["clients"]) == ["user-cy"]
        assert report["forgotten"]["output"] == 14
        async with router.http.get("/metrics") as response:
            assert 'd2lpm_service_tokens_total{client="other",kind="output"} 14.0' in await response.text()
