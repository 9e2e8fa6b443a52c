"""Preble's priority groups decide which request goes next at one worker."""

from collections import Counter
from random import Random
from typing import cast

import pytest

from router.core.clients.backlog import Backlog
from router.core.fleet.window import FixedWindow
from router.core.model.cost import LinearCost
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.context import FleetView, Parameters, PolicyContext
from router.core.policies.preble.preble_parameters import PriorityGroupsParameters
from router.core.policies.registry import ORDERS
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import ONE_AT_A_TIME, Scene, key

POLICY = "rr+priority_groups"


def new_scene(groups: int = 10) -> Scene:
    return Scene(POLICY, PriorityGroupsParameters(groups), settings=ONE_AT_A_TIME)


def test_each_group_goes_in_proportion_to_its_rank() -> None:
    """In one round the group with nine tenths cached has ten turns, an uncached one has one, and no group is left
    out.
    """
    scene = new_scene()
    running = scene.arrive("ada", "abcdefghij")
    for number in range(30):
        scene.arrive("cold", chr(48 + number) * 10)
        scene.arrive("half", "abcde" + chr(48 + number) * 5)
        scene.arrive("warm", "abcdefghi" + chr(48 + number))
    scene.serve(running)
    for _ in range(34):
        scene.serve(scene.order[-1])
    clients = [scene.requests[request].client for request in scene.order[1:35]]
    assert Counter(clients[:17]) == Counter(clients[17:34]) == {"warm": 10, "half": 6, "cold": 1}
    assert clients[:17] == ["warm"] * 10 + ["half"] * 6 + ["cold"]


def test_in_a_group_the_oldest_request_goes_first() -> None:
    """The oldest goes first even if it entered the group late, because its prefix was computed while it waited."""
    scene = new_scene(groups=2)
    running = scene.arrive("ada", "xxxx")
    early = scene.arrive("ada", "abcdef1")
    late = [scene.arrive("bob", "xxxx" + letter) for letter in "pq"]
    opener = scene.arrive("cyd", "xxxxabcdef")
    scene.serve(running, answer="abcdef")
    assert scene.order[1] == early
    scene.serve_all()
    assert [request for request in scene.order if request in (early, *late)] == [early, *late]
    assert opener in scene.order


def test_a_request_changes_group_with_its_match() -> None:
    """While a request waits, an eviction moves it down and a computed prefix moves it up."""
    scene = new_scene(groups=2)
    running = scene.arrive("ada", "abcdefgh")
    other, warm = scene.arrive("bob", "pqrstuv"), scene.arrive("ada", "abcdefg1")
    scene.evict("w1")
    scene.serve(running)
    assert scene.order == [running, other]
    scene.serve_all()
    assert scene.order == [running, other, warm]


def test_no_request_passes_a_head_that_does_not_fit() -> None:
    """No other request goes first, so the head cannot starve."""
    window = FixedWindow(requests=9, unstarted_tokens=7 * 32)
    scene = Scene(POLICY, PriorityGroupsParameters(), settings=SchedulerSettings(window=window))
    first, large, small = (scene.arrive("ada", letter) for letter in ("aaaaa", "bbbbb", "c"))
    assert scene.order == [first]
    scene.start(first)
    assert scene.order == [first, large, small]


class Matches:
    """Returns the matches that the test set."""

    def __init__(self) -> None:
        self.chunks: dict[RequestId, int] = {}

    def watch_at(self, request: Request, worker: WorkerId) -> int:  # noqa: ARG002 - there is one worker
        return self.chunks[request.id]

    def unwatch(self, request: RequestId) -> None:
        del self.chunks[request]


def test_the_choice_equals_that_of_a_plain_list() -> None:
    """The choices are equal over a long time in which few requests wait and each changes its group many times."""
    random, matches = Random(5), Matches()
    context = PolicyContext(
        cast(FleetView, matches), LinearCost(), random, Parameters(PriorityGroupsParameters(4)), Backlog()
    )
    queue = ORDERS["priority_groups"].build(context, WorkerId("w1"))
    arrived: list[RequestId] = []
    turns = [1, 2, 3, 4]
    for number in range(4000):
        if len(arrived) < 5:
            request = Request(RequestId(f"r{number}"), ClientId("ada"), "llama", (key("abcd"),))
            arrived.append(request.id)
            matches.chunks[request.id] = random.randrange(5)
            queue.push(request)
        changed = random.choice(arrived)
        matches.chunks[changed] = random.randrange(5)
        queue.match_changed([changed])
        if number % 7 == 0 and number % 1000 > 500:  # and for a while nothing goes, and all change
            group = {request: min(3, matches.chunks[request]) for request in arrived}
            if not any(turns[group[request]] for request in arrived):
                turns = [1, 2, 3, 4]
            due = max((request for request in arrived if turns[group[request]]), key=group.__getitem__)
            turn = queue.select(lambda _: True, 0.0)
            assert turn is not None
            assert turn.request.id == due
            turns[group[due]] -= 1
            arrived.remove(due)
            queue.request_dispatched(queue.remove(due), 0.0)
    assert list(queue.waiting()) == arrived


def test_zero_groups_are_rejected() -> None:
    """A number of groups below one is an error."""
    with pytest.raises(ValueError, match="groups"):
        PriorityGroupsParameters(0)
