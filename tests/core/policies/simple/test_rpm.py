"""RPM limits, told as conversations: who may go in this minute, and who waits for the next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.queue_limits import WaitingLimits
from router.core.model.request import ClientId
from router.core.policies.simple.rpm import MINUTE, RpmParameters
from router.core.settings import SchedulerSettings
from tests.core.scenario import ONE_AT_A_TIME, Scene

PATIENT = SchedulerSettings(waiting=WaitingLimits(time_to_live=10 * MINUTE))


def scene(limit: int, settings: SchedulerSettings = PATIENT) -> Scene:
    return Scene("rpm", RpmParameters(limit), settings=settings)


def test_a_minute_has_room_for_so_many_of_each_client() -> None:
    """Whoever is above the limit waits although the worker idles, and holds up nobody else."""
    talk = scene(limit=2)
    mine = [talk.arrive("ada", letter) for letter in "abc"]
    other = talk.arrive("bob", "d")
    assert talk.order == [*mine[:2], other]
    talk.serve_all()
    assert talk.order == [*mine[:2], other]


def test_who_waits_goes_in_the_next_minute() -> None:
    """At its very start, woken by the timer, and no more than it has room for."""
    talk = scene(limit=2)
    talk.now = 0.7 * MINUTE
    mine = [talk.arrive("ada", letter) for letter in "abcde"]
    for count, now in ((2, 0.9), (4, 1.0), (4, 1.9), (5, 2.0)):
        talk.wait(now * MINUTE - talk.now)
        assert talk.order == mine[:count]


def test_the_minute_is_the_same_for_all_and_order_of_arrival_counts() -> None:
    """When the minute begins, those that waited queue in the order in which they came, whosever they are."""
    talk = scene(limit=2)
    first = [talk.arrive(client, "a") for client in ("ada", "bob", "ada", "bob")]
    held = [talk.arrive(client, "b") for client in ("bob", "ada", "bob", "bob", "ada")]
    talk.wait(MINUTE)
    assert talk.order == [*first, held[0], held[1], held[2], held[4]]


def test_a_new_minute_owes_nothing_to_the_last() -> None:
    """Who had all of the last one, and waits for nothing, has all of this one at once."""
    talk = scene(limit=2)
    for minute in range(3):
        talk.now = minute * MINUTE
        for _ in range(2):
            talk.arrive("ada", "a")
        assert len(talk.order) == 2 * minute + 2


def test_whoever_comes_later_does_not_pass_who_waits() -> None:
    """Not even as the first to come in a new minute, before the timer has rung."""
    talk = scene(limit=1)
    held = [talk.arrive("ada", letter) for letter in "abc"]
    talk.now = 1.5 * MINUTE
    talk.arrive("ada", "d")
    assert talk.order == held[:2]


def test_behind_the_limit_the_first_to_come_goes_first() -> None:
    """The limit is no share: who is within it may fill the queue."""
    talk = scene(limit=4, settings=ONE_AT_A_TIME)
    mine = [talk.arrive("ada", letter) for letter in "abcd"]
    other = talk.arrive("bob", "e")
    talk.serve_all()
    assert talk.order == [*mine, other]


def test_who_gives_up_waiting_makes_room_for_those_behind() -> None:
    """A request that left the limit's own queue takes nothing of the next minute."""
    talk = scene(limit=1)
    mine = [talk.arrive("ada", letter) for letter in "abc"]
    talk.cancel(mine[1])
    talk.wait(MINUTE)
    assert talk.order == [mine[0], mine[2]]
    assert talk.scheduler.backlog.of_client(ClientId("ada")) == 0


def test_who_waits_too_long_is_refused() -> None:
    """With a time to live below a minute the limit refuses, as other services do."""
    talk = scene(limit=1, settings=SchedulerSettings(waiting=WaitingLimits(time_to_live=5.0)))
    mine = [talk.arrive("ada", letter) for letter in "ab"]
    talk.wait(5.0)
    assert list(talk.refusals) == mine[1:]


def test_a_worker_that_leaves_takes_its_model_along() -> None:
    """What waits for the minute and is served by nobody now is turned away; what another worker serves stays."""
    talk = Scene("rpm", RpmParameters(limit=1), workers=(), settings=PATIENT)
    talk.join("w1", "llama")
    talk.join("w2", "qwen")
    gone, stays = [[talk.arrive(model, letter, model=model) for letter in "ab"][1] for model in ("llama", "qwen")]
    talk.leave("w1")
    assert list(talk.refusals) == [gone]
    talk.wait(MINUTE)
    assert talk.order[-1] == stays


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 7.0, 40.0, 90.0])), max_size=30), st.integers(1, 4)
)
def test_no_minute_has_more_and_none_is_lost(steps: list[tuple[str, float]], limit: int) -> None:
    """Whenever they come, each client's go in their order, at most so many in a minute, and all of them go."""
    talk = scene(limit, SchedulerSettings(waiting=WaitingLimits(time_to_live=100 * MINUTE)))
    minutes: dict[str, int] = {}
    for client, pause in steps + [("", MINUTE)] * len(steps):
        talk.wait(pause)
        if client:
            talk.arrive(client, "a")
        for request in talk.order:
            minutes.setdefault(request, int(talk.now // MINUTE))
    for client in "ab":
        mine = [request for request in talk.order if talk.requests[request].client == client]
        assert mine == [request for request in talk.requests if talk.requests[request].client == client]
        taken = [minutes[request] for request in mine]
        assert all(taken.count(minute) <= limit for minute in taken)


def test_a_limit_that_lets_nothing_pass_is_refused() -> None:
    """Nothing would ever be served."""
    with pytest.raises(ValueError, match="limit"):
        RpmParameters(0)
