"""Refills that are held back for those whose calls run, told as conversations, and in virtual time."""

from collections.abc import Mapping

import pytest

from bench.lab.frame.felt_loads import Load, chat_flood, cold_flood
from bench.lab.sweeps.felt import figures
from bench.report.summary import summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from router.core.fleet.service_rate import FIRST_SECONDS_PER_TOKEN
from router.core.model.request import RequestId
from router.core.policies.dlpm.dlpm_home import DlpmHomeParameters
from tests.core.scenario import CHUNK_TOKENS, Scene

HEAVY = 40
"""Chunks of each prompt of a flood: a quantum is less."""
SECONDS = HEAVY * CHUNK_TOKENS * FIRST_SECONDS_PER_TOKEN
"""What one of them takes of the engine."""


def flooded(talk: Scene, *, weight: float = 1.0) -> tuple[RequestId, RequestId]:
    """Hon's call runs, and flo has used up its credit; returns hon's call, and flo's that waits if it has to."""
    hon = talk.arrive("hon", "h" * 10, weight=weight)
    talk.start(hon)
    for letter in "ab":  # with its first credit, and by a refill
        flo = talk.arrive("flo", letter * HEAVY)
        talk.start(flo)
    return hon, talk.arrive("flo", "c" * HEAVY)


def scene(isolation: float = 1.0, workers: tuple[str, ...] = ("w1",)) -> Scene:
    return Scene("dlpm_home", DlpmHomeParameters(1000, isolation=isolation), workers=workers)


@pytest.mark.parametrize(("weight", "times"), [(1.0, 2.0), (2.0, 3.0)])
def test_a_flood_waits_while_those_with_credit_have_as_much_of_the_engine(weight: float, times: float) -> None:
    """The time that what the last refill let in takes, and that much more for each client of weight 1 that runs."""
    talk = scene()
    _, waiting = flooded(talk, weight=weight)
    assert waiting not in talk.dispatched
    assert talk.wake_at == pytest.approx(times * SECONDS)
    talk.wait(times * SECONDS - 1e-6)
    assert waiting not in talk.dispatched
    talk.wait(2e-6)
    assert waiting in talk.dispatched


def test_a_hold_ends_with_the_last_call_that_it_is_for() -> None:
    """Nobody is left whom the flood could slow."""
    talk = scene()
    hon, waiting = flooded(talk)
    talk.finish(hon)
    assert waiting in talk.dispatched


def test_a_hold_ends_when_those_with_credit_have_used_it_up() -> None:
    """From then on they would need a refill themselves."""
    talk = scene()
    hon, waiting = flooded(talk)
    talk.progress(hon, 100)
    assert waiting not in talk.dispatched
    talk.progress(hon, 1000)
    assert waiting in talk.dispatched


def test_without_isolation_a_refill_never_waits() -> None:
    """As in Algorithm 1."""
    talk = scene(0.0)
    _, waiting = flooded(talk)
    assert waiting in talk.dispatched


def test_a_worker_that_idles_waits_for_no_refill() -> None:
    """Nobody runs there who could be slowed."""
    talk = scene()
    _, waiting = flooded(talk)
    talk.join("w2")
    assert talk.worker_of(waiting) == "w2"


def test_a_client_alone_is_never_held() -> None:
    """However much it has running, and however far it is in debt."""
    talk = scene()
    calls = [talk.arrive("flo", letter * HEAVY) for letter in "abc"]
    for call in calls:
        assert call in talk.dispatched
        talk.start(call)


def test_debts_stay_while_anything_is_in_flight() -> None:
    """A flood that leaves no queue behind owes what it took from those that it slowed."""
    talk = scene(0.0)
    hon, _ = flooded(talk)
    owed = talk.deficit("flo").order
    talk.serve(talk.arrive("eve", "e"))
    assert talk.deficit("flo").order == owed
    for call in [call for call in talk.order if call.startswith("flo")]:
        talk.finish(call)
    talk.finish(hon)
    talk.serve(talk.arrive("eve", "f"))
    assert talk.deficit("flo").order == 1000


@pytest.mark.parametrize("isolation", [-0.1, 0.01, 1.1])
def test_isolation_is_zero_or_a_share(isolation: float) -> None:
    """Below the least, the noise of what is measured would decide."""
    with pytest.raises(ValueError, match="isolation"):
        DlpmHomeParameters(isolation=isolation)


def felt(load: Load, isolation: float, *, seconds: float = 60.0) -> Mapping[str, float]:
    parameters = (DlpmHomeParameters(isolation=isolation),)
    scenario = Scenario("dlpm_home", load.workload, (WorkerSpec(),) * 2, seconds, 20.0, parameters=parameters)
    result = Simulation(scenario).run()
    measured = figures(result, summarise(result))
    return {name: value for name, value in measured.items() if isinstance(value, float | int)}


def test_a_flood_of_cold_prompts_takes_no_more_than_its_share() -> None:
    """Honest clients get nearly their fair share, and their tokens in less than half of the time, at no loss."""
    load, isolation = cold_flood(32), DlpmHomeParameters().isolation
    held, free = felt(load, isolation), felt(load, 0.0)
    assert free["least/fair"] < 0.4
    assert held["least/fair"] > 0.9
    assert held["TPOT"] < free["TPOT"] / 2
    assert held["service/s"] > free["service/s"]


def test_a_flood_of_chats_takes_no_more_than_its_share() -> None:
    """Where those that run make nearly as much of the engines as all together."""
    load = chat_flood(64)
    held, free = felt(load, DlpmHomeParameters().isolation), felt(load, 0.0)
    assert free["least/fair"] < 0.75
    assert held["least/fair"] > 0.9
    assert held["service/s"] > 0.95 * free["service/s"]


def test_little_is_held_back_for_few_streams() -> None:
    """That would leave most of the engines idle."""
    load = chat_flood(4)
    held, free = felt(load, DlpmHomeParameters().isolation), felt(load, 0.0)
    assert held["service/s"] > 0.97 * free["service/s"]
