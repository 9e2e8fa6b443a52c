"""A waiting request looks only at those changes of its match that may move it."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command
from router.core.model.events import Arrived, Evicted, Finished
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.context import FleetView, PolicyContext
from router.core.policies.dlpm.dlpm_home import DlpmHome
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters
from router.core.policies.dlpm.home_pool import HomePool, PooledRequest
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, MODEL, Scene, key

WORKERS = tuple(f"w{number}" for number in range(7))
CROWDED = SchedulerSettings(
    window=FixedWindow(requests=1), waiting=WaitingLimits(1000, 1e9), prefix_limit=100, match_minimum=2 * CHUNK_TOKENS
)
"""Most requests wait. The caches lose as much as they gain, and one chunk is no match."""


class LooksAtAll(HomePool):
    """A pool in which every change of a match is looked at."""

    def _watch_narrowly(self, waiting: PooledRequest) -> None:
        pass


class LooksAtAllHome(DlpmHome):
    """`DlpmHome` with such a pool."""

    def _new_pool(self, view: FleetView) -> HomePool:
        loss, wait_factor = self._parameters.home_loss, self._parameters.home_patience
        return LooksAtAll(view, self._loads, self._new_queue, loss=loss, wait_factor=wait_factor)


def played(policy: type[DlpmHome], seed: int, steps: int = 200) -> list[list[Command]]:
    """Return the commands after each event of a random history, in which nothing is learned of the tokens of
    prompts.
    """
    random = Random(seed)

    def build(context: PolicyContext) -> DlpmHome:
        return policy(context)

    scene = Scene(build, DlpmHomeParameters(home_loss=2 * CHUNK_TOKENS), workers=WORKERS, settings=CROWDED)
    commands: list[list[Command]] = []
    for number in range(steps):
        running = list(scene.scheduler.attempts)
        scene.now += random.choice([0.0, 0.1])
        match random.choice(["arrive", "arrive", "finish", "finish", "evict", "move"]):
            case "arrive":
                prompt = random.choice(["x" * 8, "xxxxyyyy"])[: random.randint(2, 8)] + random.choice(["", "a", "bc"])
                client = ClientId(random.choice(["ada", "bob", "cyd"]))
                arrival = Request(RequestId(f"r{number}"), client, MODEL, (key(prompt, exact=False),), 8)
                commands.append(scene.feed(Arrived(arrival)))
            case "finish" if running:
                commands.append(scene.feed(Finished(random.choice(running), None)))
            case "evict":
                tokens = random.choice([CHUNK_TOKENS, 2 * CHUNK_TOKENS, 4 * CHUNK_TOKENS])
                commands.append(scene.feed(Evicted(WorkerId(random.choice(WORKERS)), tokens)))
            case "move" if random.random() < 0.2:
                random.choice([scene.leave, scene.join])(random.choice(WORKERS[4:]))
            case _:
                pass
    return commands


@pytest.mark.interpreted("the test extends classes of the policy")
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whoever_looks_only_at_what_may_move_a_request_gives_the_same_commands(seed: int) -> None:
    """The history goes on as if each waiting request had looked at every change of its match."""
    assert played(DlpmHome, seed) == played(LooksAtAllHome, seed)
