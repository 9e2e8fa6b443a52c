"""Consistent hashing, told as conversations: the head of a prompt has one home."""

from collections import Counter
from math import ceil

import pytest

from router.core.fleet.window import NoWindow
from router.core.model.request import WorkerId
from router.core.policies.simple.consistent_hash import ConsistentHashParameters
from router.core.settings import SchedulerSettings
from tests.core.scenario import ONE_AT_A_TIME, Scene

W = ("w1", "w2", "w3", "w4")
HEADS = [a + b for a in "abcdefghijklmnop" for b in "0123456789abcdef"]
"""256 prompts of two chunks: enough that shares of a fourth or a fifth come out within a half of themselves."""

ALL_AT_ONCE = SchedulerSettings(window=NoWindow())


def homes(*workers: str) -> dict[str, WorkerId]:
    """Where each of many prompts goes in such a fleet."""
    talk = Scene("consistent_hash", workers=workers, settings=ALL_AT_ONCE)
    return {head: talk.worker_of(talk.arrive("ada", head)) for head in HEADS}


def test_what_begins_alike_goes_to_one_worker() -> None:
    """Whoever sends it, however long the queue there and whatever follows the head."""
    talk = Scene("consistent_hash", workers=W, settings=ONE_AT_A_TIME)
    for client in ("ada", "bob", "cyd"):
        for question in ("why?", "how?", "?", ""):
            talk.arrive(client, "document" + question)
    talk.serve_all()
    assert len({talk.worker_of(request) for request in talk.order}) == 1
    assert {decision.why for decision in talk.dispatched.values()} == {"prefix"}


def test_only_the_head_counts() -> None:
    """Prompts that differ behind it share a home; those that differ within it have several."""
    for chunks, several in ((2, False), (3, True)):
        talk = Scene("consistent_hash", ConsistentHashParameters(chunks), workers=W)
        placed = {talk.worker_of(talk.arrive("ada", "ab" + letter)) for letter in "abcdefghijklmnop"}
        assert (len(placed) > 1) == several


def test_a_prompt_without_a_full_chunk_goes_where_its_client_goes() -> None:
    """There is nothing to share, so one client's are kept together and different clients apart."""
    talk = Scene("consistent_hash", workers=W)
    placed = {f"c{n}": {talk.worker_of(talk.arrive(f"c{n}", "")) for _ in range(3)} for n in range(16)}
    assert all(len(workers) == 1 for workers in placed.values())
    assert set.union(*placed.values()) == set(W)
    assert {decision.why for decision in talk.dispatched.values()} == {"client"}


def test_heads_spread_over_the_workers() -> None:
    """Each worker is the home of its share of them."""
    counts = Counter(homes(*W).values())
    assert all(0.5 <= counts[WorkerId(worker)] / (len(HEADS) / 4) <= 1.5 for worker in W)


def test_a_worker_that_joins_takes_its_share_and_moves_nothing_else() -> None:
    """And one that leaves gives away its own alone: told backwards it is the same."""
    before, after = homes(*W), homes(*W, "w5")
    moved = [head for head in HEADS if before[head] != after[head]]
    assert {after[head] for head in moved} == {"w5"}
    assert 0.5 <= len(moved) / (len(HEADS) / 5) <= 1.5


def test_homes_do_not_depend_on_history() -> None:
    """Workers that joined in another order, or left and came back, have the keys that they had."""
    assert homes(*W) == homes(*reversed(W))
    talk = Scene("consistent_hash", workers=W, settings=ALL_AT_ONCE)
    talk.leave("w2")
    talk.join("w2")
    requests = {head: talk.arrive("ada", head) for head in HEADS}
    talk.serve_all()  # a worker that comes back gets one at first
    assert homes(*W) == {head: talk.worker_of(request) for head, request in requests.items()}


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_a_bound_keeps_a_hot_head_from_filling_one_worker(factor: float) -> None:
    """No worker takes more than its factor of the mean, rounded up, and the last worker in line is used last."""
    talk = Scene("consistent_hash", ConsistentHashParameters(load_factor=factor), workers=W)
    for total in range(1, 41):
        talk.arrive("ada", "document")
        loads = Counter(decision.worker for decision in talk.dispatched.values())
        assert max(loads.values()) <= ceil(factor * total / 4)
    whys = Counter(decision.why for decision in talk.dispatched.values())
    assert whys == {"prefix": ceil(factor * 10), "load": 40 - ceil(factor * 10)}


def test_what_a_full_home_turns_away_goes_to_one_next_in_line() -> None:
    """So a hot prefix is copied to as few workers as hold its load, and goes home when there is room again."""
    talk = Scene("consistent_hash", ConsistentHashParameters(load_factor=2.0), workers=W)
    home, *others = (talk.worker_of(talk.arrive("ada", "document")) for _ in range(8))
    assert Counter(others).most_common(1)[0][1] == 4
    assert len({home, *others}) == 2
    running = [request for request in talk.order if talk.worker_of(request) == home]
    talk.serve(running[0])
    assert talk.worker_of(talk.arrive("bob", "document")) == home


def test_without_a_bound_a_hot_head_stays_at_home() -> None:
    """Which is what consistent hashing is by default."""
    talk = Scene("consistent_hash", workers=W)
    assert len({talk.worker_of(talk.arrive("ada", "document")) for _ in range(40)}) == 1


@pytest.mark.parametrize("wrong", [{"prefix_chunks": 0}, {"load_factor": 0.5}, {"load_factor": -1.0}])
def test_parameters_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    """No head at all, or a bound that not all workers together can keep."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ConsistentHashParameters(**wrong)  # type: ignore[arg-type]
