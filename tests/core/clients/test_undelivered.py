"""A client whose front died repeats its call: what it has paid for and not received, it does not pay again."""

import pytest

from router.core.clients.undelivered import MOST, SECONDS, Undelivered
from router.core.model.commands import Refusal
from router.core.model.cost import Tokens
from router.core.model.events import Cancelled, Fault, Returned
from router.core.model.request import ClientId, Request, RequestId
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene

KEY = b"a call"
PROMPT = 8 * CHUNK_TOKENS
"""What the prompt of these tests costs."""


def scene_with_a_lost_call(*, streamed: bool = False, started: bool = False) -> Scene:
    """A client was charged for a call whose front died."""
    scene = Scene("d2lpm", workers=("w1",))
    lost = scene.arrive("ada", "document", limit=100, streamed=streamed, retry_key=KEY)
    if started:
        scene.progress(lost, 5)
    scene.feed(Cancelled(lost, front_died=True))
    return scene


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_of_which_nothing_was_delivered_is_paid_once(*, streamed: bool) -> None:
    """The repetition pays only what its answer costs beyond what was charged."""
    scene = scene_with_a_lost_call(streamed=streamed)
    assert scene.charged("ada") >= PROMPT
    again = scene.arrive("ada", "document", limit=100, streamed=streamed, retry_key=KEY)
    scene.finish(again, 20)
    assert scene.charged("ada") == PROMPT + 2 * 20
    scene.scheduler.ledger.check_conservation()


def test_a_repeated_key_buys_one_call_only() -> None:
    """The next repetition is a call like any other."""
    scene = scene_with_a_lost_call()
    for _ in range(2):
        scene.finish(scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY), 20, cached=0)
    assert scene.charged("ada") == 2 * (PROMPT + 2 * 20)


def test_a_stream_that_had_begun_is_delivered() -> None:
    """Its client has received what it was charged for."""
    scene = scene_with_a_lost_call(streamed=True, started=True)
    assert scene.charged("ada") == PROMPT + 2 * 5
    scene.finish(scene.arrive("ada", "document", limit=100, retry_key=KEY), 20, cached=0)
    assert scene.charged("ada") == 2 * PROMPT + 2 * 25


@pytest.mark.parametrize("by", ["another client", "another key", "no key", "later"])
def test_only_the_same_call_in_time_is_a_repetition(by: str) -> None:
    """Anything else is paid in full."""
    scene = scene_with_a_lost_call()
    before = scene.charged("ada")
    client = "bob" if by == "another client" else "ada"
    if by == "later":
        scene.now += SECONDS + 1.0
    given = {"another key": b"another", "no key": None}.get(by, KEY)
    scene.finish(scene.arrive(client, "document", limit=100, streamed=False, retry_key=given), 20, cached=0)
    paid = scene.charged("ada") - before if client == "ada" else scene.charged("bob")
    assert paid == PROMPT + 2 * 20


def test_a_client_that_leaves_by_itself_gets_nothing_back() -> None:
    """Or it could break off a call and have the next one for nothing."""
    scene = Scene("d2lpm", workers=("w1",))
    scene.cancel(scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY), 0)
    scene.finish(scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY), 20, cached=0)
    assert scene.charged("ada") == 2 * PROMPT + 2 * 20


def test_a_repetition_that_was_sent_nowhere_can_be_made_again() -> None:
    """A refusal, or a client that leaves while it waits, costs it nothing."""
    scene = Scene("d2lpm", workers=("w1",), settings=ONE_AT_A_TIME)
    lost = scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY)
    scene.feed(Cancelled(lost, front_died=True))
    other = scene.arrive("bob", "other text")
    scene.cancel(scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY))
    scene.finish(other)
    scene.finish(scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY), 20, cached=0)
    assert scene.charged("ada") == PROMPT + 2 * 20


@pytest.mark.parametrize("sent", [False, True])
def test_a_repetition_for_which_no_worker_is_left_can_be_made_again(*, sent: bool) -> None:
    """Whether it waited for its worker, or that had refused it."""
    scene = Scene("d2lpm", workers=("w1",), settings=ONE_AT_A_TIME)
    lost = scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY)
    scene.feed(Cancelled(lost, front_died=True))
    other = None if sent else scene.arrive("bob", "other text")
    again = scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY)
    scene.leave("w1")
    if sent:
        scene.feed(Returned(again, accepted=False, fault=Fault.BROKEN))
    assert scene.refusals == {again: Refusal.NO_WORKER}
    if other is not None:
        scene.finish(other)
    scene.join("w1")
    scene.finish(scene.arrive("ada", "document", limit=100, streamed=False, retry_key=KEY), 20, cached=0)
    assert scene.charged("ada") == PROMPT + 2 * 20


def test_no_more_calls_are_remembered_than_there_is_room_for() -> None:
    """The oldest are forgotten first."""
    calls = Undelivered(2)
    requests = [Request(RequestId(f"{each}"), ClientId("ada"), "m", (), retry_key=b"%d" % each) for each in range(3)]
    for request in requests:
        calls.add(request, Tokens(1, 0, 0), 0.0)
    assert [calls.take(request, 1.0) is not None for request in requests] == [False, True, True]
    assert MOST > 0
