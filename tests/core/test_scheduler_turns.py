"""The scheduler reports each client's turns, from a call's arrival to its end."""

import pytest

from router.core.clients.turns import ClientTurns, RoundTimes
from router.core.model.events import Fault, Returned
from router.core.model.request import ClientId
from tests.core.scenario import ONE_AT_A_TIME, Scene

ADA, BOB = "ada", "bob"


def turns(scene: Scene, client: str) -> ClientTurns:
    return scene.scheduler.fairness.turns.client_turns(ClientId(client), scene.now)


def rounds(scene: Scene) -> RoundTimes:
    return scene.scheduler.fairness.turns.rounds(None, scene.now)


@pytest.mark.parametrize("policy", ["dlpm_home", "d2lpm", "rr+fcfs"])
def test_a_call_waits_in_the_router_and_at_its_worker(policy: str) -> None:
    """A call waits until its first token; after that it does not, and its client is no longer unserved."""
    scene = Scene(policy, settings=ONE_AT_A_TIME)
    first, second = scene.arrive(ADA, "aaaa"), scene.arrive(BOB, "bbbb")
    scene.now = 2.0
    assert [turns(scene, client).wait_s for client in (ADA, BOB)] == [2.0, 2.0]
    scene.start(first)
    assert (turns(scene, ADA).unserved_s, turns(scene, BOB).unserved_s) == (None, 2.0)
    assert turns(scene, BOB).lag == 128 / 2
    scene.finish(first, output=10)
    scene.now = 5.0
    scene.start(second)
    scene.finish(second, output=10)
    assert scene.scheduler.fairness.turns.longest_waits(scene.now) == (5.0, 5.0)
    assert rounds(scene).clients == 0


def test_an_unstreamed_answer_waits_until_it_is_complete() -> None:
    """An unstreamed call waits until it is complete, or until it is estimated to be computed and is charged."""
    scene = Scene("dlpm_home")
    call = scene.arrive(ADA, "aaaa", streamed=False)
    scene.now = 0.1
    assert turns(scene, ADA).wait_s == 0.1
    scene.finish(call, output=1)
    assert scene.scheduler.fairness.turns.longest_waits(scene.now) == (0.1, 0.1)
    believed = scene.arrive(ADA, "aaaa", streamed=False, limit=100)
    assert turns(scene, ADA).unserved_s == 0.0
    for _ in range(10):
        scene.wait(0.5)
    assert turns(scene, ADA).unserved_s is None
    scene.finish(believed, output=90)


def test_giving_up_is_not_service() -> None:
    """A call that ends without a first token, queued or at a worker, does not end its client's wait."""
    scene = Scene("dlpm_home", settings=ONE_AT_A_TIME)
    sent, waiting = scene.arrive(ADA, "aaaa"), scene.arrive(BOB, "bbbb")
    scene.now = 30.0
    scene.cancel(sent)
    scene.arrive(ADA, "cccc")
    scene.cancel(waiting)
    again = scene.arrive(BOB, "bbbb")
    scene.now = 31.0
    assert turns(scene, BOB).unserved_s == 31.0
    assert rounds(scene).clients == 2
    scene.cancel(again)
    scene.now = 40.0
    assert turns(scene, BOB).unserved_s is None


@pytest.mark.parametrize("begun", [True, False])
def test_a_returned_call_waits_unless_its_answer_had_begun(begun: bool) -> None:
    """An answer that continues at another worker has had its first token."""
    scene = Scene("dlpm_home", workers=("w1", "w2"))
    call = scene.arrive(ADA, "aaaa")
    if begun:
        scene.start(call)
        scene.progress(call, 5)
    scene.feed(Returned(call, accepted=True, fault=Fault.BROKEN, begun=begun))
    scene.now = 3.0
    assert turns(scene, ADA).unserved_s == (None if begun else 3.0)
    assert rounds(scene).clients == 1
    scene.start(call)
    assert turns(scene, ADA).unserved_s is None
    scene.finish(call, output=9)
    assert rounds(scene).clients == 0


def test_a_rejected_call_is_no_longer_open() -> None:
    """A call that is rejected leaves no wait behind, whether no worker serves it or it has expired."""
    scene = Scene("dlpm_home", settings=ONE_AT_A_TIME)
    scene.arrive(ADA, "aaaa", model="unknown")
    assert rounds(scene).clients == 0
    call = scene.arrive(ADA, "aaaa")
    scene.arrive(BOB, "bbbb")
    scene.wait(1000.0)
    assert rounds(scene).clients == 1
    assert call not in scene.refusals
