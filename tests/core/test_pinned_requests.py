"""Some requests may only go to one worker; `test_conformance` and `test_theorem` include such requests, too."""

import pytest

from router.core.model.commands import Refusal
from router.core.model.request import ClientId
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters, DlpmParameters
from tests.core.scenario import ONE_AT_A_TIME, Scene

W = ("w1", "w2")
SMALL = (DlpmParameters(quantum=100.0, head_start=0.0), DlpmHomeParameters(quantum=100.0, head_start=0.0))
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
