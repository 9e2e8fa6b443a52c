"""Weights, in virtual time: backlogged clients share by weight, also after one of them was away."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import pytest

from bench.report.records import Result
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.parts.prompts import EMPTY, Prompt, random_tokens
from bench.workloads.parts.traffic import Call, Client, Ending
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters

WEIGHTS = (1.0, 2.0, 4.0)
AT_ONCE = 48
"""Open calls of each client: more than its share of what two workers run."""
AWAY, BACK = 60.0, 90.0


@dataclass(frozen=True, slots=True)
class Backlogged:
    """Clients with these weights that always have calls waiting; the last of them may be away for a while."""

    leaves: bool = False

    def clients(self, seed: int) -> Sequence[Client]:
        return [Client(f"c{weight:.0f}", self._calls(Random(f"{seed} {weight}"), weight), weight) for weight in WEIGHTS]

    def _calls(self, random: Random, weight: float) -> Iterator[Call]:
        return (self._call(random, weight, 0.0) for _ in range(AT_ONCE))

    def _call(self, random: Random, weight: float, at: float) -> Call:
        prompt = Prompt(EMPTY, random_tokens(random, random.randint(200, 600)))
        output = random.randint(50, 150)

        def then(_call: Call, ending: Ending) -> Iterator[Call]:
            away = self.leaves and weight == WEIGHTS[-1] and AWAY <= ending.at < BACK
            yield self._call(random, weight, BACK if away else ending.at)

        return Call(at, prompt, output, output, then=then)


def shares(result: Result, begin: float, end: float) -> list[float]:
    """Return the service of each client per weight in this time, over the mean of all."""
    within = [sample for sample in result.timeline if begin <= sample.time <= end]
    first, last = within[0].service, within[-1].service
    per_weight = [(last[client] - first[client]) / weight for client, weight in result.weights.items()]
    mean = sum(per_weight) / len(per_weight)
    return [share / mean for share in per_weight]


def run(policy: str, workload: Backlogged, seconds: float, seed: int = 0, *parameters: object) -> Result:
    workers = (WorkerSpec(max_running=16),) * 2
    return Simulation(Scenario(policy, workload, workers, seconds, seed=seed, parameters=parameters)).run()


@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
def test_backlogged_clients_are_served_by_weight(policy: str) -> None:
    """Each client gets its share within five per cent."""
    result = run(policy, Backlogged(), 320.0)
    assert shares(result, 20.0, 320.0) == pytest.approx([1.0, 1.0, 1.0], abs=0.05)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
def test_a_returning_client_gets_its_share_again(policy: str, seed: int) -> None:
    """Thirty seconds after its return, neither the service it missed nor its deficit shows any more."""
    result = run(policy, Backlogged(leaves=True), 300.0, seed)
    assert shares(result, BACK + 30.0, 300.0) == pytest.approx([1.0, 1.0, 1.0], abs=0.05)


def test_shares_hold_within_half_a_minute() -> None:
    """With rounds of a second, shares hold in any thirty seconds while all clients wait, and directly after a
    return.
    """
    result = run("dlpm_home", Backlogged(leaves=True), 122.0, 0, DlpmHomeParameters(quantum=2_000.0))
    for begin in (15.0, 20.0, 25.0, 30.0, BACK, BACK + 1.0):
        assert shares(result, begin, begin + 30.0) == pytest.approx([1.0, 1.0, 1.0], abs=0.05)


@dataclass(frozen=True, slots=True)
class Team(Backlogged):
    """A client of weight 1, and ten members of a group of weight 1."""

    def clients(self, seed: int) -> Sequence[Client]:
        members = [Client(f"m{n}", self._some(Random(f"{seed} {n}"), 6), group="team") for n in range(10)]
        return [Client("single", self._some(Random(f"{seed} single"), AT_ONCE)), *members]

    def _some(self, random: Random, calls: int) -> Iterator[Call]:
        return (self._call(random, 1.0, 0.0) for _ in range(calls))


@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
def test_a_group_is_served_like_one_client(policy: str) -> None:
    """The ten keys of a group of weight 1 together get what a key of weight 1 gets, and each gets a tenth of it."""
    result = run(policy, Team(), 160.0)
    within = [sample.service for sample in result.timeline if sample.time >= 20.0]
    served = {client: within[-1][client] - within[0][client] for client in result.weights}
    single = served.pop("single")
    assert sum(served.values()) / single == pytest.approx(1.0, abs=0.1)
    assert [each / single for each in served.values()] == pytest.approx([0.1] * 10, abs=0.03)
