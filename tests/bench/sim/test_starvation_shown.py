"""What the metrics show of a starved crowd, in virtual time: they reveal what the queue's service gap does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from bench.lab.frame.felt_loads import SMALL, WORKERS, crowd
from bench.sim.scenario import Scenario
from bench.sim.simulation import Simulation
from router.core.model.commands import Command
from router.core.model.events import Event
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters
from router.core.scheduler import Scheduler
from router.telemetry.turn_report import RoundReport, WaitReport, round_report, wait_report

CLIENTS = 120
SECONDS = 80.0
UNENDING_ROUNDS = DlpmHomeParameters(round_seconds=0.0, overdue_after=0.0, head_start=2000.0)
HALF = 7
"""The index of the sample at half of the time."""
STARVING = [("dlpm_home", UNENDING_ROUNDS), ("d2lpm", None)]


@dataclass(frozen=True, slots=True)
class Shown:
    """The figures at one time."""

    gap: float
    """The largest gap of any queue."""
    lags: dict[str, float]
    unserved: list[str]
    """Clients that were not served for longer than a fair round."""
    rounds: RoundReport
    waits: WaitReport

    @property
    def lag(self) -> float:
        """The largest lag."""
        return max(self.lags.values())


def shown(scheduler: Scheduler, now: float) -> Shown:
    fairness = scheduler.fairness
    turns = {client: fairness.turns.client_turns(client, now) for client in scheduler.weights}
    rounds = round_report(fairness.turns.rounds(scheduler.fleet.rate_of_all(), now))
    queues = [None] if scheduler.policy.properties.pooled else [state.worker.id for state in scheduler.fleet]
    return Shown(
        max(fairness.gap(queue) for queue in queues),
        {client: each.lag for client, each in turns.items()},
        [client for client, each in turns.items() if rounds.fair_s and each.unserved_even > rounds.fair_s],
        rounds,
        wait_report(list(turns.values()), fairness.turns.longest_waits(now), rounds.fair_s),
    )


class Watcher:
    """Samples the scheduler at the given times."""

    def __init__(self, times: Sequence[float]) -> None:
        self.scheduler: Scheduler | None = None
        self.seen: list[Shown] = []
        self._times = list(times)

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002
        if self._times and now >= self._times[0] and self.scheduler is not None:
            self._times.pop(0)
            self.seen.append(shown(self.scheduler, now))


@cache
def looks(policy: str, parameters: DlpmHomeParameters | None = None) -> Sequence[Shown]:
    """Return a sample for every five seconds, and one at the end."""
    watcher = Watcher([*range(5, int(SECONDS), 5), SECONDS - 0.1])
    given = () if parameters is None else (parameters,)
    workload = crowd(CLIENTS).workload
    simulation = Simulation(Scenario(policy, workload, (SMALL,) * WORKERS, SECONDS, parameters=given), [watcher])
    watcher.scheduler = simulation.scheduler
    simulation.run()
    return watcher.seen


@pytest.mark.parametrize(("policy", "parameters"), STARVING)
def test_a_starved_crowd_shows_in_the_figures(policy: str, parameters: DlpmHomeParameters | None) -> None:
    """Unserved clients fall behind for many rounds and the round does not end, while the queue's gap, which does not
    compare them, is 0.
    """
    seen = looks(policy, parameters)
    half, end = seen[HALF], seen[-1]
    assert {each.gap for each in seen} == {0.0}
    assert end.waits.unserved_clients == len(end.unserved) > CLIENTS / 2
    assert all(end.lags[client] > half.lags[client] > 0 for client in {*half.unserved} & {*end.unserved})
    assert end.lag > 1.4 * half.lag > 0
    assert (end.waits.unserved_rounds or 0) > 10
    assert (end.waits.waiting_rounds or 0) > 10
    assert end.rounds.current_s > 0.9 * SECONDS
    assert end.rounds.unserved > CLIENTS / 2


def test_a_served_crowd_shows_in_the_figures() -> None:
    """By default nobody is unserved for two rounds, rounds end within one and a half fair ones, and lags shrink once
    the prefixes of all are cached.
    """
    seen = looks("dlpm_home")
    half, end = seen[HALF], seen[-1]
    for each in (half, end):
        assert each.rounds.fair_s is not None
        assert each.rounds.clients > 0.9 * CLIENTS
        assert max(each.rounds.current_s, each.rounds.last_s or 0.0) < 1.5 * each.rounds.fair_s
        assert (each.waits.unserved_rounds or 0) < 2
        assert each.waits.lately_rounds is not None
        assert each.waits.lately_rounds < 3
    assert end.lag < half.lag
    starved = [looks(policy, parameters)[-1].lag for policy, parameters in STARVING]
    assert end.lag < 0.5 * min(starved)
