"""Under consistent hashing the head of a prompt belongs to one worker."""

from collections import Counter
from math import ceil

import pytest

from router.core.fleet.window import NoWindow
from router.core.model.request import WorkerId
from router.core.policies.simple.simple_parameters import ConsistentHashParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import ONE_AT_A_TIME, Scene

W = ("w1", "w2", "w3", "w4")
HEADS = [a + b for a in "abcdefghijklmnop" for b in "0123456789abcdef"]
"""256 prompts of two chunks: enough that a worker's share of a fourth or a fifth is accurate within half of itself."""

ALL_AT_ONCE = SchedulerSettings(window=NoWindow())


def homes(*workers: str) -> dict[str, WorkerId]:
    """Return the worker of each of many prompts in a fleet of these workers."""
    scene = Scene("consistent_hash", workers=workers, settings=ALL_AT_ONCE)
    return {head: scene.worker_of(scene.arrive("ada", head)) for head in HEADS}


def test_prompts_with_the_same_head_go_to_one_worker() -> None:
    """Neither the sender, nor the length of the queue there, nor what follows the head changes the worker."""
    scene = Scene("consistent_hash", workers=W, settings=ONE_AT_A_TIME)
    for client in ("ada", "bob", "cyd"):
        for question in ("why?", "how?", "?", ""):
            scene.arrive(client, "document" + question)
    scene.serve_all()
    assert len({scene.worker_of(request) for request in scene.order}) == 1
    assert {decision.why for decision in scene.dispatched.values()} == {"prefix"}


def test_only_the_head_decides() -> None:
    """Prompts that differ after the head go to one worker; prompts that differ within it go to several."""
    for chunks, several in ((2, False), (3, True)):
        scene = Scene("consistent_hash", ConsistentHashParameters(chunks), workers=W)
        placed = {scene.worker_of(scene.arrive("ada", "ab" + letter)) for letter in "abcdefghijklmnop"}
        assert (len(placed) > 1) == several


def test_a_prompt_without_a_full_chunk_is_placed_by_client() -> None:
    """Such a prompt shares nothing, so one client's prompts stay together and different clients are spread."""
    scene = Scene("consistent_hash", workers=W)
    placed = {f"c{n}": {scene.worker_of(scene.arrive(f"c{n}", "")) for _ in range(3)} for n in range(16)}
    assert all(len(workers) == 1 for workers in placed.values())
    assert set.union(*placed.values()) == set(W)
    assert {decision.why for decision in scene.dispatched.values()} == {"client"}


def test_heads_spread_over_the_workers() -> None:
    """Each worker gets its share of the heads."""
    counts = Counter(homes(*W).values())
    assert all(0.5 <= counts[WorkerId(worker)] / (len(HEADS) / 4) <= 1.5 for worker in W)


def test_a_worker_that_joins_takes_its_share_and_moves_nothing_else() -> None:
    """A worker that leaves gives away only its own share, since that is the same change reversed."""
    before, after = homes(*W), homes(*W, "w5")
    moved = [head for head in HEADS if before[head] != after[head]]
    assert {after[head] for head in moved} == {"w5"}
    assert 0.5 <= len(moved) / (len(HEADS) / 5) <= 1.5


def test_placement_does_not_depend_on_history() -> None:
    """Workers that joined in another order, or left and returned, keep their keys."""
    assert homes(*W) == homes(*reversed(W))
    scene = Scene("consistent_hash", workers=W, settings=ALL_AT_ONCE)
    scene.leave("w2")
    scene.join("w2")
    requests = {head: scene.arrive("ada", head) for head in HEADS}
    scene.serve_all()  # a worker that comes back gets one at first
    assert homes(*W) == {head: scene.worker_of(request) for head, request in requests.items()}


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_a_bound_keeps_a_hot_head_from_filling_one_worker(factor: float) -> None:
    """No worker takes more than its factor of the mean, rounded up, and the last worker in line is used last."""
    scene = Scene("consistent_hash", ConsistentHashParameters(load_factor=factor), workers=W)
    for total in range(1, 41):
        scene.arrive("ada", "document")
        loads = Counter(decision.worker for decision in scene.dispatched.values())
        assert max(loads.values()) <= ceil(factor * total / 4)
    whys = Counter(decision.why for decision in scene.dispatched.values())
    assert whys == {"prefix": ceil(factor * 10), "load": 40 - ceil(factor * 10)}


def test_requests_above_the_bound_go_to_the_next_worker_in_line() -> None:
    """A hot prefix is copied to as few workers as its load needs, and returns to the first when there is room again."""
    scene = Scene("consistent_hash", ConsistentHashParameters(load_factor=2.0), workers=W)
    home, *others = (scene.worker_of(scene.arrive("ada", "document")) for _ in range(8))
    assert Counter(others).most_common(1)[0][1] == 4
    assert len({home, *others}) == 2
    running = [request for request in scene.order if scene.worker_of(request) == home]
    scene.serve(running[0])
    assert scene.worker_of(scene.arrive("bob", "document")) == home


def test_without_a_bound_a_hot_head_stays_on_one_worker() -> None:
    """Consistent hashing has no bound by default."""
    scene = Scene("consistent_hash", workers=W)
    assert len({scene.worker_of(scene.arrive("ada", "document")) for _ in range(40)}) == 1


@pytest.mark.parametrize("wrong", [{"prefix_chunks": 0}, {"load_factor": 0.5}, {"load_factor": -1.0}])
def test_impossible_parameters_are_rejected(wrong: dict[str, float]) -> None:
    """A head without chunks is rejected, and so is a bound that all workers together cannot keep."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ConsistentHashParameters(**wrong)  # type: ignore[arg-type]
