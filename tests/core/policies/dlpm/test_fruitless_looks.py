"""A worker that found nothing that fits does not look again in vain, and soon sees what fits."""

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command
from router.core.model.events import Finished, Ticked
from router.core.model.request import Connector, Request, RequestId, Role, Usage, WorkerId
from router.core.policies.base import Turn
from router.core.policies.context import Parameters, PolicyContext
from router.core.policies.dlpm.dlpm_home import DlpmHome, Inputs
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters
from router.core.policies.dlpm.longest_match import LongestMatchQueue, longest
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, Scene

TIGHT = SchedulerSettings(window=FixedWindow(requests=6, unstarted_tokens=6 * CHUNK_TOKENS))
"""Room for one prompt of six chunks, or a few shorter ones."""


class AlwaysLooks(DlpmHome):
    """Looks through the queues after every event."""

    def _first_that_fits(self, worker: WorkerId, queues: Sequence[LongestMatchQueue], inputs: Inputs) -> Turn | None:  # noqa: ARG002
        return longest(queues, partial(self._view.admits, worker))


def played(policy: type[DlpmHome], seed: int, steps: int = 120) -> list[list[Command]]:
    """Return the commands after each event of a random history."""
    random = Random(seed)

    def build(context: PolicyContext) -> DlpmHome:
        return policy(context)

    quantum = DlpmHomeParameters(quantum=300.0, worker_quantum=900.0, home_loss=CHUNK_TOKENS, patience=3)
    scene = Scene(build, quantum, workers=("w1", "w2", "w3"), settings=TIGHT)
    commands: list[list[Command]] = []
    feed = scene.feed
    scene.feed = lambda event: commands.append(found := feed(event)) or found  # type: ignore[func-returns-value, method-assign]
    started: set[RequestId] = set()
    for _ in range(steps):
        running = list(scene.scheduler.attempts)
        fresh = [request for request in running if request not in started]
        match random.choice(["arrive", "arrive", "start", "progress", "finish", "cancel", "evict", "move", "wait"]):
            case "arrive":
                prompt = random.choice("xyz") * random.randint(1, 5) + random.choice("abcd") * random.randint(0, 4)
                scene.arrive(random.choice(["ada", "bob", "cyd", "dee"]), prompt, limit=8)
            case "start" if fresh:
                started.add(request := random.choice(fresh))
                scene.start(request)
            case "progress" if running:
                started.add(request := random.choice(running))
                scene.progress(request, random.randint(1, 8))
            case "finish" if running:
                usage = Usage(random.randint(1, 9) * CHUNK_TOKENS, 8, random.choice([None, 0, CHUNK_TOKENS]))
                scene.feed(Finished(random.choice(running), usage))
            case "cancel" if scene.requests:
                scene.cancel(random.choice(list(scene.requests)))
            case "evict":
                scene.evict(random.choice(["w1", "w2"]), random.choice([None, CHUNK_TOKENS]))
            case "move":
                random.choice([scene.leave, scene.join])(random.choice(["w1", "w2"]))
            case _:
                scene.wait(random.choice([0.0, 0.05, 2.0]))
    return commands


@pytest.mark.interpreted("the test extends classes of the policy")
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whoever_looks_only_when_it_can_help_gives_the_same_commands(seed: int) -> None:
    """Where requests become smaller only when they or others end, the history goes on as if each worker with room had
    looked through its queues after every event.
    """
    assert played(DlpmHome, seed) == played(AlwaysLooks, seed)


def test_the_request_for_which_room_was_kept_leaves() -> None:
    """What waited behind it goes at once."""
    window = SchedulerSettings(window=FixedWindow(requests=6, unstarted_tokens=4 * CHUNK_TOKENS))
    scene = Scene("dlpm_home", DlpmHomeParameters(patience=0), settings=window)
    scene.arrive("ada", "ab")
    large, small = scene.arrive("ada", "cdef"), scene.arrive("ada", "gh")
    scene.wait(0.0)
    assert small not in scene.dispatched
    scene.cancel(large)
    assert small in scene.dispatched


def test_a_request_that_waits_for_its_decode_worker_hides_no_other_model() -> None:
    """It is the smallest, and not for lack of room at the prefill worker."""
    window = SchedulerSettings(window=FixedWindow(requests=2, unstarted_tokens=6 * CHUNK_TOKENS))
    scene = Scene("dlpm_home", workers=(), settings=window)
    scene.join("p", "m1", "m2", role=Role.PREFILL, connector=Connector.SGLANG)
    scene.join("d1", "m1", role=Role.DECODE, connector=Connector.SGLANG)
    scene.join("d2", "m2", role=Role.DECODE, connector=Connector.SGLANG)
    for prompt in "ab":  # all places of d1
        request = scene.arrive("ada", prompt, model="m1", limit=50)
        scene.prefill(request)
        scene.start(request)
    under_way = scene.arrive("ada", "xxxxx", model="m2", limit=50)
    small = scene.arrive("bob", "yyy", model="m1", limit=50)
    large = scene.arrive("cyd", "zzzz", model="m2", limit=50)
    scene.wait(0.0)
    assert {small, large}.isdisjoint(scene.dispatched)
    scene.prefill(under_way)
    scene.start(under_way)
    assert large in scene.dispatched
    assert small not in scene.dispatched


def test_one_choice_finds_the_match_of_a_request_once() -> None:
    """Each of three workers looks at the smallest request of either model. The next choice finds them anew, and nothing
    of an earlier one is kept.
    """
    asked: Counter[RequestId] = Counter()

    def oracle(request: Request) -> Mapping[WorkerId, int]:
        asked[request.id] += 1
        return {}

    scene = Scene("dlpm_home", workers=())
    scene.scheduler = Scheduler(POLICIES["dlpm_home"], TIGHT, Parameters(), Random(0), oracle)
    for worker in ("w1", "w2", "w3"):
        scene.join(worker, "m1", "m2")
    for prompt in ("xxxxx", "yyyyy", "zzzzz"):  # most of the room
        scene.arrive("ada", prompt, model="m1")
    waiting = [scene.arrive("bob", "aaa", model="m1"), scene.arrive("cyd", "bbb", model="m2")]
    for _ in range(2):
        asked.clear()
        scene.feed(Ticked())
        assert asked == dict.fromkeys(waiting, 1)
    assert not any(isinstance(each, Inputs) for each in gc.get_objects())
