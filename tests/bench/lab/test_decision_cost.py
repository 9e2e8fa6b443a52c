"""The cost of a decision with a long queue, in function calls, whose count is the same on every machine."""

import sys
from types import CodeType, FrameType

import pytest

from bench.lab.micro.decision_cost import Fleet, Setting
from bench.lab.micro.session_cost import SessionFleet, SessionSetting
from router.core.cache.prefix_map import PrefixMap
from router.core.model.request import BarrierId

TURNS = 40


def calls(setting: Setting) -> int:
    """Count the function calls of some arrivals and as many dispatches."""
    return calls_of(Fleet(setting))


def calls_of(fleet: Fleet | SessionFleet, wanted: CodeType | None = None) -> int:
    """Count all calls, or only those of one function."""
    count = 0

    def watch(frame: FrameType, what: str, argument: object) -> None:  # noqa: ARG001 - the profiler's signature
        nonlocal count
        count += what in ("call", "c_call") if wanted is None else what == "call" and frame.f_code is wanted

    sys.setprofile(watch)
    try:
        fleet.turns(TURNS)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("common", [False, True])
def test_a_decision_does_not_cost_more_in_a_larger_fleet(common: bool) -> None:
    """With 24 times the workers it takes at most 1.5 times the calls, also if all of them hold a prefix."""
    small, large = (
        calls(Setting("dlpm_home", 20, 5, workers, 400 * workers, in_flight=8, prefixes=20, common=common))
        for workers in (4, 96)
    )
    assert large <= 1.5 * small


@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
@pytest.mark.parametrize("clients", [5, 200])
def test_a_decision_does_not_cost_more_with_a_longer_queue(policy: str, clients: int) -> None:
    """With a queue a hundred times as long, an arrival and a dispatch take at most 1.5 times the calls."""
    short, long = (calls(Setting(policy, waiting, clients, chunks=5_000)) for waiting in (20, 2_000))
    assert long <= 1.5 * short


@pytest.mark.parametrize("policy", ["br0", "brh", "dlpm_balance"])
def test_a_choice_among_ranks_in_step_does_not_cost_more_with_a_longer_queue(policy: str) -> None:
    """With a queue thirty times as long, an arrival and a dispatch take at most 1.5 times the calls."""
    short, long = (
        calls(Setting(policy, waiting, 5, 16, 8_000, 4, barrier=BarrierId("group"))) for waiting in (100, 3_000)
    )
    assert long <= 1.5 * short


@pytest.mark.parametrize("policy", ["dlpm_home", "dlpm_balance"])
def test_a_pool_searches_the_prefix_tree_once_for_a_request(policy: str) -> None:
    """When it arrives. From then on the pool watches what is held of it, also for what is counted when it is sent."""
    barrier = BarrierId("group") if policy == "dlpm_balance" else None
    fleet = Fleet(Setting(policy, 100, 5, 16, 8_000, 4, barrier=barrier))
    assert calls_of(fleet, PrefixMap._match_in_tokens.__code__) <= TURNS


def test_caches_are_emptied_before_each_event_that_is_measured() -> None:
    """In each turn two events are measured, the arrival and the end, whose dispatch is part of it."""
    fleet, emptied = Fleet(Setting("dlpm_home", 20, 5, 4, 1600, in_flight=8)), 0

    def empty() -> None:
        nonlocal emptied
        emptied += 1

    fleet.turns(TURNS, empty)
    assert emptied == 2 * TURNS


def test_the_gate_adds_at_most_half_to_a_decision() -> None:
    """With agent sessions of which many wait, an arrival and a dispatch take at most 1.5 times the calls that they take
    without the gate.
    """
    gate, alone = (SessionFleet(SessionSetting("dlpm_home", gate, 150, 40, 10, in_flight=8)) for gate in (True, False))
    assert gate.paused > 10
    assert calls_of(gate) <= 1.5 * calls_of(alone)
