"""Preble's priority groups, told as conversations: who goes next at one worker."""

from collections import Counter
from random import Random

import pytest
from scenario import ONE_AT_A_TIME, Scene

from router.core.policies.preble_queue import PriorityGroupsParameters
from router.core.scheduler import SchedulerSettings
from router.core.window import FixedWindow

POLICY = "rr+priority_groups"


def scene(groups: int = 10) -> Scene:
    return Scene(POLICY, PriorityGroupsParameters(groups), settings=ONE_AT_A_TIME)


def test_each_group_goes_in_proportion_to_its_rank() -> None:
    """In one round the group with nine tenths cached has ten turns, a cold one has one, and none is left out."""
    talk = scene()
    running = talk.arrive("ada", "abcdefghij")
    for number in range(30):
        talk.arrive("cold", chr(48 + number) * 10)
        talk.arrive("half", "abcde" + chr(48 + number) * 5)
        talk.arrive("warm", "abcdefghi" + chr(48 + number))
    talk.serve(running)
    for _ in range(34):
        talk.serve(talk.order[-1])
    clients = [talk.requests[request].client for request in talk.order[1:35]]
    assert Counter(clients[:17]) == Counter(clients[17:34]) == {"warm": 10, "half": 6, "cold": 1}
    assert clients[:17] == ["warm"] * 10 + ["half"] * 6 + ["cold"]


def test_in_a_group_the_first_to_come_goes_first() -> None:
    """Also one that comes into the group late, by what was computed while it waited."""
    talk = scene(groups=2)
    running = talk.arrive("ada", "xxxx")
    early = talk.arrive("ada", "abcdef1")
    late = [talk.arrive("bob", "xxxx" + letter) for letter in "pq"]
    opener = talk.arrive("cyd", "xxxxabcdef")
    talk.serve(running, answer="abcdef")
    assert talk.order[1] == early
    talk.serve_all()
    assert [request for request in talk.order if request in (early, *late)] == [early, *late]
    assert opener in talk.order


def test_a_group_follows_the_match() -> None:
    """What is evicted makes a request cold, and what is computed makes it warm, while it waits."""
    talk = scene(groups=2)
    running = talk.arrive("ada", "abcdefgh")
    other, warm = talk.arrive("bob", "pqrstuv"), talk.arrive("ada", "abcdefg1")
    talk.evict("w1")
    talk.serve(running)
    assert talk.order == [running, other]
    talk.serve_all()
    assert talk.order == [running, other, warm]


def test_a_head_that_does_not_fit_is_waited_for() -> None:
    """Nobody passes it, so that it cannot starve."""
    window = FixedWindow(requests=9, unstarted_tokens=7 * 32)
    talk = Scene(POLICY, PriorityGroupsParameters(), settings=SchedulerSettings(window=window))
    first, large, small = (talk.arrive("ada", letter) for letter in ("aaaaa", "bbbbb", "c"))
    assert talk.order == [first]
    talk.start(first)
    assert talk.order == [first, large, small]


def test_requests_that_change_groups_leave_nothing_behind() -> None:
    """A long time of evictions and answers, with a queue that never runs dry, keeps the books small and complete."""
    talk, random = scene(groups=4), Random(3)
    for step in range(400):
        talk.arrive("ada", "abcdefgh"[: random.randint(1, 8)] + random.choice("uvwxyz"))
        if step % 3 == 0:
            talk.evict("w1", 64)
        if step > 20:
            talk.serve(talk.order[-1])
    talk.serve_all()
    assert len(talk.order) == 400
    assert not talk.scheduler.prefixes.watched


def test_no_groups_at_all_are_refused() -> None:
    """There must be one."""
    with pytest.raises(ValueError, match="groups"):
        PriorityGroupsParameters(0)
