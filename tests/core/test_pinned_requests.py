"""Some requests may only go to one worker; `test_conformance` and `test_theorem` include such requests, too."""

from dataclasses import replace

import pytest

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.health import HealthRules
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Refusal
from router.core.model.events import Failed, Fault, Returned, WorkerAnswered
from router.core.model.request import ClientId, WorkerId
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters, DlpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import ONE_AT_A_TIME, Scene

W = ("w1", "w2")
SMALL = (DlpmParameters(quantum=100.0, head_start=0.0), DlpmHomeParameters(quantum=100.0, head_start=0.0))
BREAKING = SchedulerSettings(
    window=FixedWindow(requests=1),
    health=HealthRules(failures=1, cooldown=10.0, silence=30.0),
    waiting=WaitingLimits(time_to_live=20.0),
)
"""A failure opens a breaker for ten seconds."""
POLICIES = ("dlpm_home", "pooled_fcfs", "rpm", "d2lpm", "rr+fcfs", "least_requests+vtc", "cache_aware+lpm", "preble")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_request_waits_for_its_worker(policy: str) -> None:
    """A pinned request waits for its own worker, whatever room another one has."""
    scene = Scene(policy, *SMALL, workers=W, settings=ONE_AT_A_TIME)
    first, second = scene.arrive("ann", "a", only="w2"), scene.arrive("ann", "b", only="w2")
    assert scene.order == [first]
    assert scene.worker_of(first) == "w2"
    scene.finish(first)
    assert scene.worker_of(second) == "w2"


@pytest.mark.parametrize("policy", ["dlpm_home", "pooled_fcfs"])
def test_a_pinned_request_delays_no_other_worker(policy: str) -> None:
    """A pinned request holds up no one else, by order of arrival or by its client's deficit: a worker with room is
    refilled without it.
    """
    scene = Scene(policy, *SMALL, workers=W, settings=ONE_AT_A_TIME)
    scene.arrive("ann", "a", only="w1")
    running = scene.arrive("bob", "a long prompt of his, for which he is in debt", limit=50)
    waiting = scene.arrive("cyd", "c", only="w1")
    later = scene.arrive("bob", "more")
    scene.start(running)
    scene.finish(running)
    assert scene.worker_of(later) == "w2"
    assert waiting not in scene.order


def test_the_client_of_a_pinned_request_is_not_backlogged_in_the_pool() -> None:
    """Service of others at other workers makes no gap to the client, although its request counts as waiting."""
    scene = Scene("dlpm_home", *SMALL, workers=W, settings=ONE_AT_A_TIME)
    scene.arrive("ann", "a", only="w1")
    scene.arrive("cyd", "c", only="w1")
    for letter in "bdefgh":
        scene.arrive("bob", letter, limit=50)
    for _ in range(4):
        scene.serve(scene.order[-1], 50)
    scheduler = scene.scheduler
    assert scheduler.backlog.of_client(ClientId("cyd")) == 1
    assert scheduler.fairness.gap(None) == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_request_is_rejected_if_its_worker_leaves(policy: str) -> None:
    """A pinned request is rejected whether it waits at that time or arrives later; other requests go elsewhere."""
    scene = Scene(policy, *SMALL, workers=W, settings=ONE_AT_A_TIME)
    scene.arrive("ann", "a", only="w1")
    waiting = scene.arrive("ann", "b", only="w1")
    scene.leave("w1")
    late = scene.arrive("ann", "c", only="w1")
    assert scene.refusals == dict.fromkeys((waiting, late), Refusal.NO_WORKER)
    other = scene.arrive("bob", "d")
    assert scene.worker_of(other) == "w2"


def break_off(scene: Scene, worker: str) -> None:
    """Let a call fail at a worker, whose breaker opens."""
    scene.feed(Failed(scene.arrive("zoe", "z", only=worker), accepted=True, fault=Fault.BROKEN))
    assert WorkerId(worker) in scene.scheduler.fleet.ejected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_request_waits_for_its_ejected_worker(policy: str) -> None:
    """A pinned request waits until the time of its worker's open breaker is over, whether it arrives meanwhile or was
    queued before. Then the policy chooses it like any other.
    """
    scene = Scene(policy, *SMALL, workers=W, settings=BREAKING)
    running = scene.arrive("zoe", "z", only="w1")
    queued = scene.arrive("ann", "a", only="w1")
    scene.feed(Failed(running, accepted=True, fault=Fault.BROKEN))
    late = scene.arrive("bob", "b", only="w1")
    scene.wait(9.9)
    assert not scene.refusals
    assert not {queued, late} & scene.dispatched.keys()
    scene.wait(0.2)
    assert scene.worker_of(queued) == "w1"
    scene.serve_all()
    assert scene.worker_of(late) == "w1"
    scene.serve_all()
    assert scene.scheduler.live == scene.scheduler.waiting == 0


@pytest.mark.parametrize("queued", [True, False])
def test_a_pinned_request_waits_no_longer_than_others(queued: bool) -> None:
    """Its time to live counts from its arrival."""
    scene = Scene("rr+fcfs", workers=W, settings=replace(BREAKING, waiting=WaitingLimits(time_to_live=5.0)))
    running = scene.arrive("zoe", "z", only="w1")
    request = scene.arrive("ann", "a", only="w1") if queued else None
    scene.feed(Failed(running, accepted=True, fault=Fault.BROKEN))
    request = request or scene.arrive("ann", "a", only="w1")
    scene.wait(4.9)
    assert not scene.refusals
    scene.wait(0.2)
    assert scene.refusals == {request: Refusal.EXPIRED}
    assert scene.scheduler.waiting == 0


def test_pinned_requests_that_wait_for_an_ejected_worker_count_in_the_queue() -> None:
    """A client with too many of them has the next one refused."""
    settings = replace(BREAKING, waiting=WaitingLimits(client_requests=2, time_to_live=20.0))
    scene = Scene("dlpm_home", *SMALL, workers=W, settings=settings)
    break_off(scene, "w1")
    first, _, third = (scene.arrive("ann", each, only="w1") for each in "abc")
    assert scene.refusals == {third: Refusal.CLIENT_FULL}
    scene.cancel(first)
    fourth = scene.arrive("ann", "d", only="w1")
    assert fourth not in scene.refusals
    scene.wait(10.1)
    scene.serve_all()
    assert scene.scheduler.live == 0


def test_a_pinned_request_waits_for_no_worker_that_leaves_while_it_is_ejected() -> None:
    """It is refused as soon as its worker has left, and a later one at once."""
    scene = Scene("rr+fcfs", workers=W, settings=BREAKING)
    break_off(scene, "w1")
    early = scene.arrive("ann", "a", only="w1")
    assert not scene.refusals
    scene.leave("w1")
    late = scene.arrive("ann", "b", only="w1")
    assert scene.refusals == dict.fromkeys((early, late), Refusal.NO_WORKER)


def test_a_pinned_request_waits_for_no_silent_worker() -> None:
    """Nobody knows whether a silent worker will ever answer."""
    scene = Scene("rr+fcfs", workers=W, settings=replace(BREAKING, health=HealthRules(silence=5.0)))
    scene.arrive("zoe", "z", only="w1")
    for _ in range(8):
        scene.wait(1.0)
        scene.feed(WorkerAnswered(WorkerId("w2")))
    assert set(scene.scheduler.fleet.ejected) == {"w1"}
    request = scene.arrive("ann", "a", only="w1")
    assert scene.refusals == {request: Refusal.NO_WORKER}


def test_a_pinned_request_without_room_waits_for_its_worker_that_is_ejected_meanwhile() -> None:
    """It was not tried there, so it goes there once the worker is back."""
    settings = replace(BREAKING, window=FixedWindow(requests=2))
    scene = Scene("rr+fcfs", workers=W, settings=settings)
    running, request = scene.arrive("zoe", "z", only="w1"), scene.arrive("ann", "a", only="w1")
    scene.feed(Returned(request, accepted=False, fault=Fault.FULL))
    del scene.dispatched[request]
    scene.feed(Failed(running, accepted=True, fault=Fault.BROKEN))
    assert not scene.refusals
    scene.wait(10.1)
    assert scene.worker_of(request) == "w1"
