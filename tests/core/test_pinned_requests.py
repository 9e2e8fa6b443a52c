"""Requests that only one worker may take, played event by event; see also `test_conformance` and `test_theorem`."""

import pytest

from router.core.model.commands import Refusal
from router.core.model.request import ClientId
from router.core.policies.dlpm.dlpm import DlpmParameters
from router.core.policies.dlpm.dlpm_home import DlpmHomeParameters
from tests.core.scenario import ONE_AT_A_TIME, Scene

W = ("w1", "w2")
SMALL = (DlpmParameters(quantum=100.0, head_start=0.0), DlpmHomeParameters(quantum=100.0, head_start=0.0))
POLICIES = ("dlpm_home", "pooled_fcfs", "rpm", "d2lpm", "rr+fcfs", "least_requests+vtc", "cache_aware+lpm", "preble")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_request_waits_for_its_worker(policy: str) -> None:
    """Whatever room another worker has."""
    talk = Scene(policy, *SMALL, workers=W, settings=ONE_AT_A_TIME)
    first, second = talk.arrive("ann", "a", only="w2"), talk.arrive("ann", "b", only="w2")
    assert talk.order == [first]
    assert talk.worker_of(first) == "w2"
    talk.finish(first)
    assert talk.worker_of(second) == "w2"


@pytest.mark.parametrize("policy", ["dlpm_home", "pooled_fcfs"])
def test_a_pinned_request_delays_no_other_worker(policy: str) -> None:
    """Neither in order of arrival, nor by its client's deficit: a worker with room is refilled without it."""
    talk = Scene(policy, *SMALL, workers=W, settings=ONE_AT_A_TIME)
    talk.arrive("ann", "a", only="w1")
    running = talk.arrive("bob", "a long prompt of his, for which he is in debt", limit=50)
    waiting = talk.arrive("cyd", "c", only="w1")
    later = talk.arrive("bob", "more")
    talk.start(running)
    talk.finish(running)
    assert talk.worker_of(later) == "w2"
    assert waiting not in talk.order


def test_the_client_of_a_pinned_request_is_not_backlogged_in_the_pool() -> None:
    """Service of others at other workers makes no gap. The request counts as waiting all the same."""
    talk = Scene("dlpm_home", *SMALL, workers=W, settings=ONE_AT_A_TIME)
    talk.arrive("ann", "a", only="w1")
    talk.arrive("cyd", "c", only="w1")
    for letter in "bdefgh":
        talk.arrive("bob", letter, limit=50)
    for _ in range(4):
        talk.serve(talk.order[-1], 50)
    scheduler = talk.scheduler
    assert scheduler.backlog.of_client(ClientId("cyd")) == 1
    assert scheduler.fairness.gap(None) == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_request_is_rejected_if_its_worker_leaves(policy: str) -> None:
    """Whether it waits at that time or arrives later; other requests go elsewhere."""
    talk = Scene(policy, *SMALL, workers=W, settings=ONE_AT_A_TIME)
    talk.arrive("ann", "a", only="w1")
    waiting = talk.arrive("ann", "b", only="w1")
    talk.leave("w1")
    late = talk.arrive("ann", "c", only="w1")
    assert talk.refusals == dict.fromkeys((waiting, late), Refusal.NO_WORKER)
    other = talk.arrive("bob", "d")
    assert talk.worker_of(other) == "w2"
