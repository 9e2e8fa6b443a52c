"""RPM limits decide which requests are served in this minute and which wait for the next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.queue_limits import WaitingLimits
from router.core.model.request import ClientId
from router.core.policies.simple.rpm import MINUTE
from router.core.policies.simple.simple_parameters import RpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import ONE_AT_A_TIME, Scene

PATIENT = SchedulerSettings(waiting=WaitingLimits(time_to_live=10 * MINUTE))


def new_scene(limit: int, settings: SchedulerSettings = PATIENT) -> Scene:
    return Scene("rpm", RpmParameters(limit), settings=settings)


def test_each_client_may_send_up_to_the_limit_per_minute() -> None:
    """A request above the limit waits although the worker idles, and blocks no other client."""
    scene = new_scene(limit=2)
    mine = [scene.arrive("ada", letter) for letter in "abc"]
    other = scene.arrive("bob", "d")
    assert scene.order == [*mine[:2], other]
    scene.serve_all()
    assert scene.order == [*mine[:2], other]


def test_held_requests_go_in_the_next_minute() -> None:
    """Held requests go at the start of the next minute, when the timer fires, up to the limit."""
    scene = new_scene(limit=2)
    scene.now = 0.7 * MINUTE
    mine = [scene.arrive("ada", letter) for letter in "abcde"]
    for count, now in ((2, 0.9), (4, 1.0), (4, 1.9), (5, 2.0)):
        scene.wait(now * MINUTE - scene.now)
        assert scene.order == mine[:count]


def test_held_requests_of_all_clients_go_in_order_of_arrival() -> None:
    """All clients have the same minute, so the order of arrival decides."""
    scene = new_scene(limit=2)
    first = [scene.arrive(client, "a") for client in ("ada", "bob", "ada", "bob")]
    held = [scene.arrive(client, "b") for client in ("bob", "ada", "bob", "bob", "ada")]
    scene.wait(MINUTE)
    assert scene.order == [*first, held[0], held[1], held[2], held[4]]


def test_a_new_minute_starts_with_the_whole_limit() -> None:
    """A client that used up the last minute and holds nothing may use all of this one at once."""
    scene = new_scene(limit=2)
    for minute in range(3):
        scene.now = minute * MINUTE
        for _ in range(2):
            scene.arrive("ada", "a")
        assert len(scene.order) == 2 * minute + 2


def test_a_new_request_does_not_pass_held_ones() -> None:
    """A new request goes after held ones even if it is the first of a new minute, before the timer has fired."""
    scene = new_scene(limit=1)
    held = [scene.arrive("ada", letter) for letter in "abc"]
    scene.now = 1.5 * MINUTE
    scene.arrive("ada", "d")
    assert scene.order == held[:2]


def test_within_the_limit_requests_go_in_order_of_arrival() -> None:
    """The limit is no share: a client within it may fill the queue."""
    scene = new_scene(limit=4, settings=ONE_AT_A_TIME)
    mine = [scene.arrive("ada", letter) for letter in "abcd"]
    other = scene.arrive("bob", "e")
    scene.serve_all()
    assert scene.order == [*mine, other]


def test_a_cancelled_held_request_makes_room_for_the_next() -> None:
    """A request that left the limit's own queue uses nothing of the next minute."""
    scene = new_scene(limit=1)
    mine = [scene.arrive("ada", letter) for letter in "abc"]
    scene.cancel(mine[1])
    scene.wait(MINUTE)
    assert scene.order == [mine[0], mine[2]]
    assert scene.scheduler.backlog.of_client(ClientId("ada")) == 0


def test_a_request_that_is_held_too_long_is_rejected() -> None:
    """With a time to live below a minute the limit rejects requests, as other services do."""
    scene = new_scene(limit=1, settings=SchedulerSettings(waiting=WaitingLimits(time_to_live=5.0)))
    mine = [scene.arrive("ada", letter) for letter in "ab"]
    scene.wait(5.0)
    assert list(scene.refusals) == mine[1:]


def test_held_requests_without_a_worker_are_rejected() -> None:
    """When a worker leaves, held requests that no worker serves are rejected; the others stay."""
    scene = Scene("rpm", RpmParameters(limit=1), workers=(), settings=PATIENT)
    scene.join("w1", "llama")
    scene.join("w2", "qwen")
    gone, stays = [[scene.arrive(model, letter, model=model) for letter in "ab"][1] for model in ("llama", "qwen")]
    scene.leave("w1")
    assert list(scene.refusals) == [gone]
    scene.wait(MINUTE)
    assert scene.order[-1] == stays


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 7.0, 40.0, 90.0])), max_size=30), st.integers(1, 4)
)
def test_no_minute_exceeds_the_limit_and_no_request_is_lost(steps: list[tuple[str, float]], limit: int) -> None:
    """Whenever requests arrive, each client's go in order, at most `limit` in a minute, and all of them go."""
    scene = new_scene(limit, SchedulerSettings(waiting=WaitingLimits(time_to_live=100 * MINUTE)))
    minutes: dict[str, int] = {}
    for client, pause in steps + [("", MINUTE)] * len(steps):
        scene.wait(pause)
        if client:
            scene.arrive(client, "a")
        for request in scene.order:
            minutes.setdefault(request, int(scene.now // MINUTE))
    for client in "ab":
        mine = [request for request in scene.order if scene.requests[request].client == client]
        assert mine == [request for request in scene.requests if scene.requests[request].client == client]
        taken = [minutes[request] for request in mine]
        assert all(taken.count(minute) <= limit for minute in taken)


def test_a_limit_of_zero_is_rejected() -> None:
    """A limit of zero would never let a request be served."""
    with pytest.raises(ValueError, match="limit"):
        RpmParameters(0)
