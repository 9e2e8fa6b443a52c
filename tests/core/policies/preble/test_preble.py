"""Preble places requests by Algorithms 1 and 2, and relieves loaded workers."""

from collections import Counter
from random import Random
from typing import cast

import pytest

from router.core.clients.backlog import Backlog
from router.core.model.cost import Charge, LinearCost, Tokens
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.base import Candidate
from router.core.policies.context import FleetView, Parameters, PolicyContext
from router.core.policies.preble.preble_parameters import PrebleParameters
from router.core.policies.registry import PLACEMENTS
from tests.core.scenario import CHUNK_TOKENS, MODEL, ONE_AT_A_TIME, Scene, key

W = ("w1", "w2", "w3")


class Workers:
    """Stands for workers that prefill 100 tokens per second."""

    def prefill_seconds(self, worker: WorkerId, tokens: float) -> float:  # noqa: ARG002 - all are alike
        return tokens / 100


class Bench:
    """Runs the placement alone; the test says how much of each prompt is cached at which worker."""

    def __init__(self, parameters: PrebleParameters) -> None:
        view = cast(FleetView, Workers())
        context = PolicyContext(view, LinearCost(), Random(0), Parameters(parameters), Backlog())
        self.preble = PLACEMENTS["preble"](context)
        self._outputs = context.outputs
        self._count = 0

    def place(self, text: str, now: float = 0.0, *, wait: float = 0.0, output: int = 0, **cached: int) -> str:
        """Place a prompt of which these workers hold this many chunks, and let it be answered."""
        self._count += 1
        request = Request(RequestId(f"r{self._count}"), ClientId("ada"), MODEL, (key(text),))
        candidates = [
            Candidate(WorkerId(worker), chunks * CHUNK_TOKENS, (len(text) - chunks) * CHUNK_TOKENS, 0)
            for worker, chunks in cached.items()
        ]
        self.preble.advance(now)
        placed = self.preble.place(request, candidates)
        self.preble.request_dispatched(request.id, now + wait)
        answered = Charge(request.id, request.client, placed.worker, Tokens(1), Tokens(1, 0, output), 0.0)
        self._outputs.attempt_ended(answered)
        return f"{placed.worker} {placed.why}"


def bench(
    *,
    eviction_cost: bool = False,
    decode_seconds: float = 0.0,
    decode_ratio: float = 0.0,
    balance_ratio: float = 0.0,
    balance_after: int = 0,
    copy_slowdown: float = 0.0,
) -> Bench:
    """Build a `Bench` with every feature off that is not named."""
    return Bench(
        PrebleParameters(
            decode_seconds=decode_seconds,
            eviction_cost=eviction_cost,
            decode_ratio=decode_ratio,
            balance_ratio=balance_ratio,
            balance_after=balance_after,
            copy_slowdown=copy_slowdown,
        )
    )


def test_a_prompt_that_is_mostly_cached_is_exploited() -> None:
    """A prompt that is half cached is not exploited: load decides, whatever is cached."""
    scene = bench()
    scene.place("abcdefgh", w1=0)
    assert scene.place("abcdexyz", w1=5, w2=0) == "w1 prefix"
    assert scene.place("abcdxyzu", w1=4, w2=0) == "w2 load"


def test_of_several_workers_with_the_prefix_the_cheapest_is_chosen() -> None:
    """The choice does not depend on the order of the workers, and a worker that holds less is not considered."""
    scene = bench()
    scene.place("abcdefgh", w2=0)
    scene.place("abcdefgh" * 2, w4=0)
    scene.place("abcdef", w4=3)
    assert scene.place("abcdefgx", w1=0, w2=7, w3=6, w4=7) == "w2 prefix"
    scene.place("x" * 40, w2=0)
    assert scene.place("abcdefgx", w1=0, w2=7, w3=6, w4=7) == "w4 prefix"


def test_load_is_the_uncached_input_of_recent_requests() -> None:
    """Cached input costs nothing, and neither do requests placed more than H ago."""
    scene = bench()
    scene.place("abcdefgh", w1=0)
    scene.place("abcdefghabcdefgh", 10.0, w2=9)
    assert scene.place("x", 20.0, w1=0, w2=0) == "w2 load"
    assert scene.place("y", 179.9, w1=0, w2=0) == "w1 load"
    assert scene.place("uvw", 180.0, w1=0, w2=0) == "w1 load"
    assert scene.place("z", 190.0, w1=0, w2=0) == "w2 load"


def test_load_includes_the_average_output() -> None:
    """The mean of a worker's answers within H counts for each of its requests; before there is one, a first guess."""
    scene = bench(decode_seconds=1.0)
    scene.place("abc", w1=0, output=10)
    scene.place("abc", w2=0, output=100)
    assert scene.place("x", w1=0, w2=0, output=40) == "w1 load"  # 2 requests of 25 tokens there now
    assert scene.place("y", w1=0, w2=0, output=1000) == "w1 load"
    assert scene.place("z", w1=0, w2=0) == "w2 load"
    guessed = bench(decode_seconds=1.0)
    guessed.place("a", w1=0)
    guessed.place("ab", w2=0, output=14)
    explored = [guessed.place("x", w1=0, w2=0, output=14) for _ in range(4)]
    assert explored == ["w2 load"] * 3 + ["w1 load"]  # 45 tokens outweigh three requests of 14


def test_the_cost_of_the_request_itself_counts() -> None:
    """Of two workers with equal load, the one that holds a part of the prompt is explored."""
    for worker in ("w1", "w2"):
        assert bench().place("abcdefgh", **{"w1": 0, "w2": 0, worker: 3}) == f"{worker} load"


@pytest.mark.parametrize(("counted", "chosen"), [(True, "w2 load"), (False, "w1 load")])
def test_evicting_a_shared_prefix_costs_more(counted: bool, chosen: str) -> None:
    """Both workers missed about as much; if evictions count, the one is avoided that would evict a prefix which all its
    requests share.
    """
    scene = bench(eviction_cost=counted)
    for letter in "1234":
        scene.place("abcdefgh" + letter, w1=0 if letter == "1" else 8)
        scene.place(letter * 3 if letter != "4" else "5678", w2=0)
    assert scene.place("uvwxyz", w1=0, w2=0) == chosen


@pytest.mark.parametrize("gone", ["by time", "with its worker"])
def test_evicting_old_prefixes_costs_nothing(gone: str) -> None:
    """No shared prefix is left at a worker after H, or after it left and returned."""
    scene = bench(eviction_cost=True)
    for letter in "1234":
        scene.place("abcdefgh" + letter, w1=0 if letter == "1" else 8)
    if gone == "with its worker":
        scene.preble.worker_left(WorkerId("w1"))
    now = 200.0 if gone == "by time" else 1.0
    scene.place("abc", now, w1=0)
    scene.place("pqrs", now, w2=0)
    assert scene.place("uvwxyz", now, w1=0, w2=0) == "w1 load"


@pytest.mark.parametrize(("ratio", "chosen"), [(0.7, "w1 decodes"), (0.95, "w2 load"), (0.0, "w2 load")])
def test_exploration_prefers_the_worker_that_mostly_decodes(ratio: float, chosen: str) -> None:
    """The worker with the highest cached fraction of input within 30 s gets the request despite a higher load, unless
    this is off.
    """
    scene = bench(decode_ratio=ratio)
    for _ in range(8):
        scene.place("abcdefgh", w1=7)
    assert scene.place("xyz", 29.0, w1=0, w2=0) == chosen
    assert scene.place("uvw", 45.0, w1=0, w2=0) == "w2 load"


def test_a_worker_that_returns_starts_with_an_empty_history() -> None:
    """Requests from before the worker left do not count as sharing a prefix with later ones."""
    scene = bench(eviction_cost=True)
    for _ in range(4):
        scene.place("abcdefgh", w1=0)
    scene.preble.worker_left(WorkerId("w1"))
    scene.place("abcdefgh", w1=0)
    scene.place("pqrstuvw", w1=0)
    scene.place("y" * 14, w2=0)
    # 16 chunks, and 8 that half of the requests share, against 14 and 8 that all share.
    assert scene.place("01234567", w1=0, w2=0) == "w1 load"


def test_no_worker_is_relieved_before_enough_requests() -> None:
    """No worker is relieved before the given number of requests per worker was placed."""
    scene = bench(balance_ratio=1.5, balance_after=2)
    placed = [scene.place("abcdefgh", w1=7, w2=0) for _ in range(5)]
    assert placed == ["w1 prefix"] * 4 + ["w2 balance"]


def test_the_most_loaded_worker_is_relieved() -> None:
    """The most loaded worker is relieved until it has at most Th_bal times the lowest load; others are not relieved."""
    scene = bench(balance_ratio=1.5, balance_after=2)
    scene.place("x" * 24, w3=0)
    scene.place("abcdefghabcdefgh", w2=0)
    for _ in range(3):
        assert scene.place("abcdefgh", w1=0, w2=7, w3=0) == "w2 prefix"
    scene.place("abcdefghabcdef", w2=0)
    assert scene.place("abcdefgh", w1=0, w2=7, w3=0) == "w1 balance"
    assert scene.place("xxxxxx", w1=0, w2=0, w3=5) == "w3 prefix"
    scene.place("y" * 20, w1=0)
    assert scene.place("abcdefgh", w1=0, w2=7, w3=0) == "w2 prefix"


@pytest.mark.parametrize("on", [True, False])
def test_a_hot_prefix_is_spread_over_the_fleet(on: bool) -> None:
    """By default a fleet that serves one prefix is used evenly; without balancing it is not."""
    scene = Scene("preble", PrebleParameters(balance_ratio=1.5 * on, balance_after=5), workers=W)
    for number in range(90):
        scene.now += 0.1
        scene.serve(scene.arrive("ada", "documents" + chr(33 + number)), output=20)
    counts = Counter(scene.worker_of(request) for request in scene.order)
    assert (min(counts.values()) >= 15 and len(counts) == 3) == on
    assert ("balance" in {decision.why for decision in scene.dispatched.values()}) == on


def test_a_prefix_is_copied_when_its_requests_wait_ever_longer() -> None:
    """Another worker gets the prefix if requests wait twice as long for the most loaded worker, the only one that has
    it, in the later half of H.
    """
    scene = bench(copy_slowdown=2.0)
    scene.place("y" * 9, w2=0)
    for now, cached in ((0.0, 0), (10.0, 7), (20.0, 7)):
        scene.place("abcdefgh", now, wait=1.0, w1=cached)
    # So far 1 s, and prefill of 320 tokens in 3 s for three: 2.07 s on the average.
    assert scene.place("abcdefgh", 160.0, wait=3.0, w1=7, w2=0) == "w1 prefix"
    assert scene.place("abcdefgh", 165.0, wait=6.0, w1=7, w2=0) == "w1 prefix"
    # Since then 4.5 s and 0.32 s. It would cost less at w1 all the same.
    assert scene.place("abcdefgh", 175.0, w1=7, w2=0) == "w2 copy"
    assert scene.place("abcdefgh", 175.0, w1=7, w2=7) == "w1 prefix"


def test_a_prefix_on_two_workers_is_not_copied() -> None:
    """Such a prefix is not copied however long its requests wait at both, even if both are the most loaded."""
    for others in (1, 2):
        scene = bench(copy_slowdown=2.0)
        for now, wait in ((0.0, 1.0), (160.0, 50.0)):
            for worker in ("w1", "w2"):
                scene.place("abcdefgh", now, wait=wait, **{worker: 0})
        holders = {"w1": 7, "w2": 7 if others == 2 else 0}
        assert scene.place("abcdefgh", 175.0, w3=0, **holders).split()[1] == ("copy" if others == 1 else "prefix")


def test_waits_in_the_router_count() -> None:
    """With a growing queue the prefix is copied to the idle worker, and without one never."""
    for crowd in (1, 12):
        parameters = PrebleParameters(history=40.0, balance_ratio=0, decode_ratio=0)
        scene = Scene("preble", parameters, workers=W[:2], settings=ONE_AT_A_TIME)
        for round_ in range(30):
            for _ in range(1 if round_ < 20 else crowd):
                scene.arrive("ada", "document" + chr(48 + round_))
            for _ in range(1 if round_ < 20 else 2):
                scene.now += 0.5
                running = list(scene.scheduler.attempts)
                if running:
                    scene.serve(running[0])
            scene.now += 1.0
        scene.serve_all()
        assert ("copy" in {decision.why for decision in scene.dispatched.values()}) == (crowd > 1)


def test_a_worker_that_left_is_forgotten() -> None:
    """A worker that left returns with no load; requests that waited for it are placed anew, and running ones end
    without error.
    """
    scene = Scene("preble", PrebleParameters(decode_ratio=0), workers=W[:2], settings=ONE_AT_A_TIME)
    first = scene.arrive("ada", "document")
    waits = [scene.arrive("ada", "document" + letter) for letter in "ab"]
    home = scene.worker_of(first)
    scene.leave(home)
    assert scene.worker_of(waits[0]) != home
    scene.join(home)
    scene.serve_all()
    assert len(scene.order) == 3
    assert scene.worker_of(scene.arrive("bob", "something else")) == home


@pytest.mark.parametrize("wrong", ["history", "decode_history", "decode_seconds", "balance_ratio", "copy_slowdown"])
def test_negative_parameters_are_rejected(wrong: str) -> None:
    """Times and ratios must not be negative."""
    with pytest.raises(ValueError, match=wrong):
        PrebleParameters(**{wrong: -1})  # type: ignore[arg-type]
