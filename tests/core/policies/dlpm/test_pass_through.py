"""`dlpm_home` dispatches a request that need not wait exactly as if it had entered the pool."""

from random import Random
from typing import cast

import pytest

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.health import HealthRules
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command
from router.core.model.events import Event, Fault, Returned
from router.core.model.request import Request, RequestId
from router.core.policies.base import Choice, PolicyFactory
from router.core.policies.context import Parameters, PolicyContext
from router.core.policies.dlpm.dlpm_home import DlpmHome
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, MODEL, Scene

STEPS = 800
WORKERS = ("w1", "w2", "w3", "w4")
SETTINGS = SchedulerSettings(
    waiting=WaitingLimits(requests=4, time_to_live=10.0),
    window=FixedWindow(requests=3, unstarted_tokens=8 * CHUNK_TOKENS),
    prefix_limit=200,
    match_minimum=CHUNK_TOKENS,
    health=HealthRules(failures=1, cooldown=0.5, silence=2.0),
)
SMALL_QUANTUM = DlpmHomeParameters(
    quantum=100.0, worker_quantum=300.0, home_loss=CHUNK_TOKENS, home_patience=100.0, load_ratio=1.0, load_slack=0
)
NO_HOME_WAIT = DlpmHomeParameters(quantum=1e4, home_loss=0, home_patience=1e-20)


class Wrapped:
    """Passes on every call to the policy that is tested."""

    def __init__(self, context: PolicyContext) -> None:
        self._policy = DlpmHome(context)

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)


class AllEnterPool(Wrapped):
    """Lets each request enter the pool, even an empty one."""

    def enqueue(self, request: Request, now: float) -> None:
        self._policy.enqueue(request, now)
        self._policy.queue_newcomer(now)


class CountingPolicy(Wrapped):
    """Counts the requests that passed through and the others."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.passed_through = self.chosen = 0

    def next(self, now: float) -> Choice | None:
        alone = self._policy._newcomer is not None
        choice = self._policy.next(now)
        self.chosen += choice is not None
        self.passed_through += alone and choice is not None
        return choice


class Twins(Scene):
    """Lets two schedulers handle the same events."""

    def __init__(self, parameters: DlpmHomeParameters) -> None:
        self.twin = Scheduler(cast(PolicyFactory, AllEnterPool), SETTINGS, Parameters(parameters), Random(0))
        super().__init__("dlpm_home", parameters, workers=(), settings=SETTINGS)
        self.scheduler = Scheduler(cast(PolicyFactory, CountingPolicy), SETTINGS, Parameters(parameters), Random(0))

    def feed(self, event: Event) -> list[Command]:
        commands = super().feed(event)
        assert commands == self.twin.handle(event, self.now)
        assert facts(self.scheduler, self.now) == facts(self.twin, self.now)
        return commands


def facts(scheduler: Scheduler, now: float) -> object:
    """Return counters, fairness figures in the order in which they are kept, and the waiting requests."""
    fairness, quantum = scheduler.fairness, scheduler.policy.properties.gap_quantum or 0.0
    return (
        list(scheduler.policy.saved()),
        [(client, scheduler.backlog.of_client(client), fairness.waits(client)) for client in scheduler.weights],
        (fairness.jain(now), fairness.gap(None), fairness.bound(None, quantum)),
        (scheduler.waiting, scheduler.policy.next_deadline, scheduler.prefixes.watched),
    )


def step(scene: Twins, random: Random) -> None:
    """Let one random event happen, most often an arrival or an answer."""
    running = list(scene.scheduler.attempts)
    some = random.choice(running) if running else RequestId("unknown")
    worker = random.choice(WORKERS)
    match random.choices(range(9), (10, 6, 4, 1, 1, 1, 0.5, 0.5, 3))[0]:
        case 0:
            arrive(scene, random)
        case 1 if running:
            scene.serve(some, random.randrange(20), answer=random.choice("xyz") * random.randint(1, 9))
        case 2:
            scene.start(some)
        case 3 if running:
            scene.feed(Returned(some, accepted=random.random() < 0.5, fault=random.choice(list(Fault))))
        case 4 if scene.requests:
            scene.cancel(random.choice(list(scene.requests)[-6:]))
        case 5:
            scene.evict(worker, random.choice([None, CHUNK_TOKENS, 4 * CHUNK_TOKENS]))
        case 6:
            scene.leave(worker)
        case 7:
            models = random.choice([(MODEL,), (MODEL, "qwen")])
            scene.join(worker, *models, reorders=worker == "w4")
        case 8 if random.random() < 0.5:
            scene.wait(random.choice([0.01, 0.5, 4.0]))
        case _:
            scene.now += random.choice([0.01, 0.6, 2.5])  # the timer rings after whatever is next


def arrive(scene: Twins, random: Random) -> None:
    scene.arrive(
        client := random.choice("abcde"),
        random.choice("xyz") * random.randint(0, 6) + random.choice("pq") * random.randint(0, 3) + "!",
        limit=random.choice([0, 20]),
        weight=random.choice([1.0, 1.0, 2.0]),
        model=random.choice([MODEL, MODEL, "qwen"]),
        streamed=random.random() < 0.8,
        group="team" if client in "de" else None,
    )


@pytest.mark.parametrize("parameters", [SMALL_QUANTUM, NO_HOME_WAIT], ids=["small quantum", "no home wait"])
@pytest.mark.parametrize("seed", range(8))
def test_passing_through_equals_entering_the_pool(parameters: DlpmHomeParameters, seed: int) -> None:
    """For any events, commands, deficits and fairness figures are equal to the last bit; and many requests do pass
    through.
    """
    scene, random = Twins(parameters), Random(seed)
    for worker in WORKERS[:3]:
        scene.join(worker, MODEL, "qwen")
    for _ in range(STEPS):
        step(scene, random)
    policy = cast(object, scene.scheduler.policy)
    assert isinstance(policy, CountingPolicy)
    assert 10 < policy.passed_through < policy.chosen
