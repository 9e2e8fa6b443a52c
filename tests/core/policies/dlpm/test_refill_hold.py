"""Refills are delayed for the sake of clients with running calls."""

from collections.abc import Mapping

import pytest

from bench.lab.frame.felt_loads import Load, chat_flood, cold_flood
from bench.lab.sweeps.felt import figures
from bench.report.summary import summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from router.core.fleet.service_rate import FIRST_SECONDS_PER_TOKEN
from router.core.model.request import RequestId
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters
from router.core.policies.dlpm.refill_hold import SERVICE_HALF_LIFE
from tests.core.scenario import CHUNK_TOKENS, Scene

HEAVY = 40
"""Chunks of each prompt of a flood. A quantum covers less."""
SECONDS = HEAVY * CHUNK_TOKENS * FIRST_SECONDS_PER_TOKEN
"""Seconds of engine time that one such prompt takes."""


def flooded(scene: Scene, *, weight: float = 1.0) -> tuple[RequestId, RequestId]:
    """Let hon's call run and use up flo's deficit. Returns hon's call, and flo's call that waits if it must."""
    hon = scene.arrive("hon", "h" * 10, weight=weight)
    scene.start(hon)
    for letter in "ab":  # with its first credit, and by a refill
        flo = scene.arrive("flo", letter * HEAVY)
        scene.start(flo)
    return hon, scene.arrive("flo", "c" * HEAVY)


def new_scene(isolation: float = 1.0, workers: tuple[str, ...] = ("w1",)) -> Scene:
    return Scene("dlpm_home", DlpmHomeParameters(1000, isolation=isolation), workers=workers)


@pytest.mark.parametrize(("weight", "times"), [(1.0, 2.0), (2.0, 3.0)])
def test_a_flood_waits_while_eligible_clients_get_equal_engine_time(weight: float, times: float) -> None:
    """A flood waits for the time that the last admitted work takes, and as long again per weight of the clients with
    running calls.
    """
    scene = new_scene()
    _, waiting = flooded(scene, weight=weight)
    assert waiting not in scene.dispatched
    assert scene.wake_at == pytest.approx(times * SECONDS)
    scene.wait(times * SECONDS - 1e-6)
    assert waiting not in scene.dispatched
    scene.wait(2e-6)
    assert waiting in scene.dispatched


def test_a_hold_ends_with_the_last_call_that_it_is_for() -> None:
    """The hold ends because no call is left that the flood could slow."""
    scene = new_scene()
    hon, waiting = flooded(scene)
    scene.finish(hon)
    assert waiting in scene.dispatched


def test_a_hold_ends_when_its_clients_deficits_are_used_up() -> None:
    """The hold ends because its clients would now need a refill themselves."""
    scene = new_scene()
    hon, waiting = flooded(scene)
    scene.progress(hon, 100)
    assert waiting not in scene.dispatched
    scene.progress(hon, 1000)
    assert waiting in scene.dispatched


def test_a_client_that_was_served_no_more_than_others_waits_for_nothing() -> None:
    """A burst of calls is no flood: only a client that was served more lately is delayed."""
    scene = new_scene()
    scene.serve(scene.arrive("hon", "x" * 2 * HEAVY))
    _, waiting = flooded(scene)
    assert waiting in scene.dispatched


def test_service_of_long_ago_does_not_count() -> None:
    """A client that once was served as much as the flood is now does not set it free."""
    scene = new_scene()
    scene.serve(scene.arrive("hon", "x" * 2 * HEAVY))
    scene.wait(10 * SERVICE_HALF_LIFE)
    _, waiting = flooded(scene)
    assert waiting not in scene.dispatched


def test_an_accomplice_that_was_served_much_does_not_set_a_flood_free() -> None:
    """The flood is compared with most of the clients that it would slow, not with their mean."""
    scene = new_scene()
    scene.serve(scene.arrive("ally", "y" * 8 * HEAVY))
    scene.start(scene.arrive("ally", "v" * 10))
    scene.start(scene.arrive("eve", "e" * 10))
    _, waiting = flooded(scene)
    assert waiting not in scene.dispatched


def test_without_isolation_a_refill_never_waits() -> None:
    """Refills come at once, as in Algorithm 1."""
    scene = new_scene(0.0)
    _, waiting = flooded(scene)
    assert waiting in scene.dispatched


def test_an_idle_worker_waits_for_no_refill() -> None:
    """A worker without running calls serves the flood at once, since it slows no call."""
    scene = new_scene()
    _, waiting = flooded(scene)
    scene.join("w2")
    assert scene.worker_of(waiting) == "w2"


def test_a_client_alone_is_never_held() -> None:
    """A client alone is served at once, however many calls it has running, and however deep its debt is."""
    scene = new_scene()
    calls = [scene.arrive("flo", letter * HEAVY) for letter in "abc"]
    for call in calls:
        assert call in scene.dispatched
        scene.start(call)


def test_debts_stay_while_anything_is_in_flight() -> None:
    """A flood that leaves no queue behind still owes what it took from the clients that it slowed."""
    scene = new_scene(0.0)
    hon, _ = flooded(scene)
    owed = scene.deficit("flo").order
    scene.serve(scene.arrive("eve", "e"))
    assert scene.deficit("flo").order == owed
    for call in [call for call in scene.order if call.startswith("flo")]:
        scene.finish(call)
    scene.finish(hon)
    scene.serve(scene.arrive("eve", "f"))
    assert scene.deficit("flo").order == 1000


@pytest.mark.parametrize("isolation", [-0.1, 0.01, 1.1])
def test_isolation_is_zero_or_above_a_minimum(isolation: float) -> None:
    """Values below the minimum are rejected, since the noise of the measurements would decide there."""
    with pytest.raises(ValueError, match="isolation"):
        DlpmHomeParameters(isolation=isolation)


def felt(load: Load, isolation: float, *, seconds: float = 60.0) -> Mapping[str, float]:
    parameters = (DlpmHomeParameters(isolation=isolation),)
    scenario = Scenario("dlpm_home", load.workload, (WorkerSpec(),) * 2, seconds, 20.0, parameters=parameters)
    result = Simulation(scenario).run()
    measured = figures(result, summarise(result))
    return {name: value for name, value in measured.items() if isinstance(value, float | int)}


def test_a_flood_of_uncached_prompts_takes_no_more_than_its_share() -> None:
    """Honest clients get nearly their fair share, and their tokens in less than half the time, at no loss of total
    service.
    """
    load, isolation = cold_flood(32), DlpmHomeParameters().isolation
    held, free = felt(load, isolation), felt(load, 0.0)
    assert free["least/fair"] < 0.4
    assert held["least/fair"] > 0.9
    assert held["TPOT"] < free["TPOT"] / 2
    assert held["actual/s"] > free["actual/s"]


def test_a_flood_of_chats_takes_no_more_than_its_share() -> None:
    """The least served client gets over nine tenths of its fair share, at little loss of total service."""
    load = chat_flood(64)
    held, free = felt(load, DlpmHomeParameters().isolation), felt(load, 0.0)
    assert free["least/fair"] < 0.75
    assert held["least/fair"] > 0.9
    assert held["actual/s"] > 0.95 * free["actual/s"]


def test_few_streams_delay_refills_little() -> None:
    """A few streams cause only a short delay, since a long one would leave most of the engines idle."""
    load = chat_flood(4)
    held, free = felt(load, DlpmHomeParameters().isolation), felt(load, 0.0)
    assert held["actual/s"] > 0.97 * free["actual/s"]
