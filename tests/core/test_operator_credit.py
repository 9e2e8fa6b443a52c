"""An operator's credit, and an order to forget a client, change deficits, turns and bounds."""

import pytest

from router.core.model.events import Credited, Forgotten
from router.core.model.request import ClientId, WorkerId
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters, DlpmParameters
from router.core.policies.registry import POLICIES
from tests.core.scenario import ONE_AT_A_TIME, Scene

A, B = ClientId("a"), ClientId("b")
WITH_COUNTERS = ("rr+dlpm", "dlpm_home", "rr+vtc", "rr+lcf", "d2lpm+dlpm", "d2lpm")


def deficit(scene: Scene, client: ClientId) -> float:
    credit = scene.scheduler.policy.deficit(client, WorkerId("w1")).order
    assert credit is not None
    return credit


def crowded(policy: str) -> Scene:
    """Return a scene with two clients that have several requests each, one of which runs."""
    scene = Scene(policy, settings=ONE_AT_A_TIME)
    for number in range(4):
        scene.arrive("a", f"{number}a")
        scene.arrive("b", f"{number}b")
    return scene


@pytest.mark.parametrize("policy", WITH_COUNTERS)
def test_credit_changes_the_deficit_of_its_client_alone(policy: str) -> None:
    """Credit raises one client's deficit by its cost; for a virtual counter, the reported deficit is its negative."""
    scene = crowded(policy)
    before = {client: deficit(scene, client) for client in (A, B)}
    scene.feed(Credited(A, 500.0))
    assert deficit(scene, A) == pytest.approx(before[A] + 500.0)
    assert deficit(scene, B) == before[B]


@pytest.mark.parametrize("policy", ["rr+dlpm", "dlpm_home", "rr+vtc"])
def test_a_client_with_credit_goes_first(policy: str) -> None:
    """A client goes first until its credit is used up; without credit the two clients take turns."""
    scene = Scene(policy, DlpmParameters(quantum=64.0), DlpmHomeParameters(quantum=64.0), settings=ONE_AT_A_TIME)
    for number in range(8):
        scene.arrive("a", f"{number}a")
        scene.arrive("b", f"{number}b")
    scene.feed(Credited(B, 64.0 * 6))
    for _ in range(7):
        scene.finish(list(scene.dispatched)[-1])
    clients = [scene.requests[request].client for request in scene.dispatched]
    assert clients[1:7].count(B) >= 5


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_accepts_credit_and_forgetting(policy: str) -> None:
    """Every policy accepts both for known and for unknown clients."""
    scene = crowded(policy)
    for client in (A, B, ClientId("nobody")):
        scene.feed(Credited(client, 10.0))
        scene.feed(Forgotten(client))
    assert {A, B} <= scene.scheduler.weights.keys()


def test_the_bound_is_wider_by_the_credit_and_the_gap_begins_anew() -> None:
    """Service before the grant belongs to another interval."""
    scene = crowded("rr+dlpm")
    scene.finish(next(iter(scene.dispatched)))
    fairness = scene.scheduler.fairness
    assert fairness.gap(WorkerId("w1")) > 0
    bound = fairness.bound(WorkerId("w1"), 100.0)
    assert bound is not None
    scene.feed(Credited(A, 500.0))
    assert fairness.bound(WorkerId("w1"), 100.0) == pytest.approx(bound + 500.0)
    assert fairness.gap(WorkerId("w1")) == 0


def test_a_client_without_requests_can_be_forgotten() -> None:
    """A forgotten client's service is added to that of all forgotten clients, and its debt stays."""
    scene = Scene("rr+dlpm", DlpmParameters(quantum=64.0))
    scene.arrive("b", "x")
    request = scene.arrive("a", "abcdefgh")
    scene.feed(Forgotten(A))
    assert A in scene.scheduler.weights
    scene.finish(request)
    owed = deficit(scene, A)
    assert owed < 0
    scene.feed(Forgotten(A))
    assert A not in scene.scheduler.weights
    assert scene.scheduler.ledger.forgotten.extend == 256
    assert deficit(scene, A) == owed
