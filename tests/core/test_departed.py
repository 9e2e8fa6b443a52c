"""Workers come and go: a limited number of departed ones is remembered, and nothing is kept of the others."""

from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType

import pytest
from prometheus_client import CollectorRegistry

from router.config.addresses import WorkerAddress
from router.core.fleet.health import Condition
from router.core.model.commands import Command
from router.core.model.events import Event, Evicted, WorkerReported
from router.core.model.request import WorkerId
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters, DlpmHomeParameters, DlpmParameters
from router.core.scheduler_settings import SchedulerSettings
from router.core.snapshot import restore, snapshot
from router.telemetry.cache_alarm import CacheAlarm
from router.telemetry.explain import Explanations
from router.telemetry.metrics.counts import OTHER, ClientLabels
from router.telemetry.metrics.request_metrics import RequestMetrics
from router.upstream.worker_registry import WorkerRegistry
from tests.core.scenario import Scene
from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import scripted_engine

LIMIT = 8
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
"""In which nothing of a worker is looked for."""


def texts(root: object) -> Iterator[tuple[str, str]]:
    """Yield every text that a router object holds, however deep, with the path to it. Containers appear
    by their type.
    """
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        way, each = todo.pop()
        if isinstance(each, str):
            yield way, str(each)
        if isinstance(each, CODE) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            todo += [(way, inner) for pair in each.items() for inner in pair]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            todo += [(way, inner) for inner in each]
        if type(each).__module__.partition(".")[0] == "router":
            todo += [(f"{way}.{name}", getattr(each, name)) for name in fields(each)]


def fields(each: object) -> list[str]:
    """Return the names of an object's attributes, in slots or not, in compiled classes or not."""
    slots = [
        name
        for kind in type(each).__mro__
        for name, value in vars(kind).items()
        if isinstance(value, MemberDescriptorType | GetSetDescriptorType) and not name.startswith("__")
    ]
    return [name for name in {*slots, *getattr(each, "__dict__", ())} if hasattr(each, name)]


def ways_to(root: object, workers: set[str]) -> dict[str, set[str]]:
    """Return the workers' names that are still held, each with where it is held."""
    found: dict[str, set[str]] = {}
    for way, text in texts(root):
        if text in workers:
            found.setdefault(way, set()).add(text)
    return found


class Fleet(Scene):
    """A scene with the observers of a router, in which workers come and go."""

    def __init__(self, policy: str, *parameters: object) -> None:
        self.registry = CollectorRegistry()
        settings = SchedulerSettings(departed_limit=LIMIT)
        self.metrics = RequestMetrics(self.registry, ClientLabels(), workers=LIMIT)
        self.observers: list[RequestMetrics | CacheAlarm] = [self.metrics]
        super().__init__(policy, *parameters, workers=("stays",), settings=settings)
        self.alarm = CacheAlarm(self.scheduler.mirror)
        self.observers.append(self.alarm)

    def feed(self, event: Event) -> list[Command]:
        """Feed the event to the scheduler and the observers."""
        commands = super().feed(event)
        for observer in self.observers:
            observer.observe(self.now, event, commands)
        return commands

    def visit(self, worker: str) -> None:
        """Let a worker join, serve something, and leave while a request runs there."""
        self.join(worker)
        for client, letter in (("ada", "a"), ("bob", "b"), ("ada", "c"), ("cy", "d")):
            self.arrive(client, letter * 4, limit=9, group="g" if client == "cy" else None)
        self.now += 0.1
        self.feed(WorkerReported(WorkerId(worker), 2, 0))
        self.leave(worker)
        self.feed(WorkerReported(WorkerId(worker), 2, 0))
        self.serve_all()
        self.feed(WorkerReported(WorkerId(worker), 0, 0))
        self.feed(Evicted(WorkerId(worker)))


@pytest.mark.parametrize(
    "policy",
    [
        "dlpm_home",
        "d2lpm",
        "rr+vtc",
        "client_rr+vtc_predict",
        "cache_aware+fcfs",
        "preble",
        "consistent_hash+lpm",
        "rpm",
        "brh",
        "dlpm_balance",
        "least_kv+fcfs",
    ],
)
def test_only_the_last_departed_workers_are_remembered(policy: str) -> None:
    """Scheduler, metrics and alarm together remember the last departed workers; workers that left earlier leave no
    trace.
    """
    fleet = Fleet(policy)
    names = [f"worker-{number}" for number in range(200)]
    for name in names:
        fleet.visit(name)
    roots = [fleet.scheduler, fleet.metrics, fleet.alarm]
    assert {way for root in roots for way in ways_to(root, set(names[:-LIMIT]))} == set()
    assert ways_to(fleet.metrics, set(names[-LIMIT:]))


@pytest.mark.parametrize("policy", ["dlpm_balance", "br0", "brh"])
def test_a_departed_worker_that_served_nothing_leaves_no_trace(policy: str) -> None:
    """Nor does a worker whose load was only compared with that of others."""
    fleet = Fleet(policy)
    names = [f"worker-{number}" for number in range(3 * LIMIT)]
    for name in names:
        fleet.join(name, "another model")
        fleet.serve(fleet.arrive("ada", "doc"))
        fleet.leave(name)
    assert ways_to(fleet.scheduler, set(names[:-LIMIT])) == {}


# What is remembered


QUANTA = (DlpmParameters(quantum=100.0), DlpmHomeParameters(quantum=100.0), D2lpmParameters(quantum=100.0))


@pytest.mark.parametrize(("others", "kept"), [(LIMIT - 1, True), (LIMIT, False)])
def test_a_returning_worker_finds_its_clients_debts(others: int, kept: bool) -> None:
    """A worker that returns keeps its clients' debts and is trusted gradually; after too many other departures it is
    new.
    """
    fleet = Fleet("d2lpm", *QUANTA)
    fleet.join("w")
    fleet.leave("stays")
    request = fleet.arrive("ada", "doc", limit=500)
    fleet.serve(request, 500)
    debt = fleet.deficit("ada", "w")
    assert debt.order is not None
    assert debt.order < 0
    fleet.leave("w")
    for number in range(others):
        fleet.join(f"other-{number}")
        fleet.leave(f"other-{number}")
    fleet.join("w")
    condition = fleet.scheduler.fleet[WorkerId("w")].health.condition
    assert condition is (Condition.HALF_OPEN if kept else Condition.CLOSED)
    assert (fleet.deficit("ada", "w") == debt) is kept


@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
def test_workers_from_a_snapshot_are_remembered_like_departed_ones(policy: str) -> None:
    """Workers from a snapshot are trusted as if they had not left; those that do not join are forgotten after too many
    departures.
    """
    fleet = Fleet(policy, *QUANTA)
    fleet.join("gone")
    for letter in "abcd":
        fleet.serve(fleet.arrive("ada", letter * 4, limit=300), 300)
    later = Fleet(policy, *QUANTA)
    later.leave("stays")
    restore(later.scheduler, list(snapshot(fleet.scheduler, fleet.now)), 0.0)
    later.join("stays")
    assert later.scheduler.fleet[WorkerId("stays")].health.condition is Condition.CLOSED
    assert later.deficit("ada", "stays") == fleet.deficit("ada", "stays")
    assert ways_to(later.scheduler, {"gone"})
    for number in range(LIMIT):
        later.join(f"other-{number}")
        later.leave(f"other-{number}")
    assert ways_to(later.scheduler, {"gone"}) == {}


def test_counters_of_a_forgotten_worker_are_kept_in_a_sum() -> None:
    """All forgotten workers are reported as one sum, also a worker that came and went often."""
    fleet = Fleet("rr+fcfs")
    for number in range(3 * LIMIT):
        fleet.visit(f"worker-{number}")
        if number < LIMIT:
            fleet.visit("often")
    counted: dict[str, float] = {}
    families = [family for family in fleet.registry.collect() if family.name == "d2lpm_dispatches"]
    for sample in (sample for family in families for sample in family.samples):
        worker = sample.labels["worker"]
        counted[worker] = counted.get(worker, 0.0) + sample.value
    assert sum(counted.values()) == 4 * (3 * LIMIT + LIMIT)
    assert counted.keys() == {OTHER, "stays", *(f"worker-{number}" for number in range(2 * LIMIT, 3 * LIMIT))}


# Beside the core


async def test_workers_that_an_operator_adds_and_removes_leave_nothing() -> None:
    """No registry, connection, probe or follower keeps such a worker, except the last one for a while."""
    async with scripted_engine() as engine, running_router() as router:
        (roster,) = [each for each in router.scheduler_host._observers if isinstance(each, WorkerRegistry)]
        names = [f"worker-{number}" for number in range(12)]
        for name in names:
            roster.add(WorkerAddress(url=engine.url, id=name))
            await until(lambda worker=name: WorkerId(worker) in router.scheduler.fleet)  # type: ignore[misc]
            async with router.post(chat()) as post:
                await (await engine.call()).answer()
                await post.read()
            roster.remove(name)
            await until(lambda: not router.directory.endpoints)
        observers = [
            each for each in router.scheduler_host._observers if not isinstance(each, RequestMetrics | Explanations)
        ]
        assert [ways_to(each, set(names[:-1])) for each in [*observers, router.directory]] == [{}] * (
            len(observers) + 1
        )
