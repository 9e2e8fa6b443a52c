"""D²LPM chooses which worker's queue a request joins."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.books import SchedulerView
from router.core.cache.prefix_map import PrefixMap
from router.core.clients.backlog import Backlog
from router.core.fleet.window import FixedWindow
from router.core.fleet.worker_fleet import WorkerFleet
from router.core.model.commands import Refusal
from router.core.model.cost import LinearCost, Tokens
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.base import Candidate, PlacementFactory
from router.core.policies.context import Parameters, PolicyContext
from router.core.policies.dlpm.d2lpm import D2lpm
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters
from router.core.predict.token_estimates import Estimates
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, MODEL, ONE_AT_A_TIME, Scene

W = ("w1", "w2")
NO_ESCAPE = 10**6
HUGE = 1e9
"""A Q^w so large that a counter is refilled only once, at the client's first request."""


def new_scene(
    quantum: float = 100_000,
    *,
    load_slack: int = 4,
    printed: bool = False,
    workers: tuple[str, ...] = W,
    settings: SchedulerSettings | None = None,
) -> Scene:
    parameters = D2lpmParameters(quantum, charge_full_input=printed, load_slack=load_slack)
    return Scene("d2lpm", parameters, workers=workers, settings=settings)


def test_a_request_goes_to_the_worker_that_holds_its_prefix() -> None:
    """Each turn of a conversation goes there, although the other worker is idle."""
    scene = new_scene()
    turns = [scene.arrive("ada", "document" + "?" * turn) for turn in range(4)]
    assert len({scene.worker_of(turn) for turn in turns}) == 1
    assert [scene.dispatched[turn].why for turn in turns] == ["no prefix", *["prefix"] * 3]


def test_new_prefixes_go_to_the_shorter_queue_and_ties_rotate() -> None:
    """Without a match load decides; workers with equal load take turns."""
    scene = new_scene()
    placed = [scene.worker_of(scene.arrive("ada", prompt)) for prompt in ("one", "two", "red")]
    assert placed[0] != placed[1]
    scene.finish(scene.order[0])
    scene.finish(scene.order[2])
    assert scene.worker_of(scene.arrive("bob", "new")) == placed[0]
    idle = new_scene()
    for prompt in ("one", "two", "six", "ten"):
        idle.serve(idle.arrive("ada", prompt))
    assert all(idle.worker_of(one) != idle.worker_of(other) for one, other in pairwise(idle.order))


def test_an_uncached_request_goes_where_the_fewest_of_its_client_wait() -> None:
    """The total that waits there does not matter, since in a fair queue a client waits for its own requests."""
    scene = Scene("d2lpm", D2lpmParameters(steal_loss=-1), workers=W, settings=ONE_AT_A_TIME)
    ada, bob = scene.arrive("ada", "documents"), scene.arrive("bob", "literature")
    for turn in range(4):
        scene.arrive("ada", f"documents{turn}")
    for turn in range(3):
        scene.arrive("bob", f"literature{turn}")
    new = scene.arrive("bob", "poem")
    scene.serve_all()
    assert scene.worker_of(new) == scene.worker_of(ada) != scene.worker_of(bob)


def test_a_short_match_does_not_bind() -> None:
    """A system line that all requests share is shorter than the minimum match and binds no request to a worker."""
    scene = new_scene()
    requests = [scene.arrive("ada", f"s{letter}") for letter in "abcd"]
    assert [scene.dispatched[request].why for request in requests] == ["no prefix"] * 4
    assert {scene.worker_of(request) for request in requests} == set(W)


def test_a_client_whose_deficit_at_a_worker_is_used_up_leaves_it() -> None:
    """A hot prefix spreads when its client has been served enough at one worker; the other client stays."""
    scene = new_scene(quantum=12 * CHUNK_TOKENS)
    first, second = scene.arrive("ada", "document 1"), scene.arrive("ada", "document 2---")
    spread = scene.arrive("ada", "document 3")
    assert scene.worker_of(first) == scene.worker_of(second) != scene.worker_of(spread)
    assert scene.dispatched[spread].why == "deficit used up"
    assert scene.worker_of(scene.arrive("bob", "document 2---")) == scene.worker_of(first)


def test_without_a_positive_deficit_anywhere_every_counter_is_refilled() -> None:
    """After the refill the longest match decides again, and debts are as deep as before, less the refill."""
    scene = new_scene(quantum=100, workers=("w1",))
    scene.arrive("ada", "document 1")
    assert scene.deficit("ada").placement == 100 - 10 * CHUNK_TOKENS
    scene.arrive("ada", "document 2")
    assert scene.deficit("ada").placement == 100 - 10 * CHUNK_TOKENS + 3 * 100 - 1 * CHUNK_TOKENS


@pytest.mark.parametrize("escape", [True, False])
def test_a_hot_prefix_escapes_its_worker_by_load(escape: bool) -> None:
    """Load spreads a hot prefix whose extend tokens cost almost nothing, since deficits alone would leave all its
    requests on one worker.
    """
    scene = new_scene(load_slack=4 if escape else NO_ESCAPE)
    scene.serve(scene.arrive("ada", "hot prefix"))
    crowd = [scene.arrive(f"c{number}", f"hot prefix {chr(33 + number)}") for number in range(30)]
    loads = [sum(scene.worker_of(request) == worker for request in crowd) for worker in W]
    if escape:
        assert max(loads) <= 2 * min(loads) + 4 + 1
        assert "load" in {scene.dispatched[request].why for request in crowd}
    else:
        assert min(loads) == 0


def test_the_printed_rule_alternates_workers() -> None:
    """With the full input charged, each worker gets one prompt beyond Q^w between two refills; with extend tokens all
    stay.
    """
    homes = {}
    for printed in (True, False):
        scene = new_scene(quantum=8 * CHUNK_TOKENS, printed=printed)
        scene.serve(scene.arrive("bob", "document"))
        for letter in "abcdef":
            scene.serve(scene.arrive("ada", "document" + letter))
        homes[printed] = [scene.worker_of(request) for request in scene.order[1:]]
    assert all(one != other for one, other in zip(homes[True][::2], homes[True][1::2], strict=True))
    assert len(set(homes[False])) == 1


def test_a_booking_moves_when_a_queue_is_placed_anew() -> None:
    """When a worker leaves, its queue and the bookings go elsewhere, and running requests are still charged there."""
    scene = new_scene(HUGE, load_slack=NO_ESCAPE, settings=ONE_AT_A_TIME)
    running = scene.arrive("ada", "document 1")
    home, other = (running_at := scene.worker_of(running)), next(w for w in W if w != running_at)
    waits = scene.arrive("ada", "document 2")
    assert scene.deficit("ada", home).placement == HUGE - 11 * CHUNK_TOKENS
    scene.leave(home)
    assert scene.worker_of(waits) == other
    assert scene.deficit("ada", other).placement == HUGE - 10 * CHUNK_TOKENS
    scene.join(home)
    assert scene.deficit("ada", home).placement == HUGE - 10 * CHUNK_TOKENS
    scene.finish(running, output=5)
    assert scene.deficit("ada", home).placement == HUGE - 10 * CHUNK_TOKENS - 2 * 5


def test_requests_that_no_other_worker_serves_are_rejected() -> None:
    """When the last worker of a model leaves, its waiting requests are rejected; running ones end on their own."""
    scene = new_scene(settings=ONE_AT_A_TIME)
    scene.join("w3", "qwen")
    running, waits = (scene.arrive("ada", prompt, model="qwen") for prompt in ("one", "two"))
    stays = scene.arrive("ada", "one")
    scene.leave("w3")
    assert scene.refusals == {waits: Refusal.NO_WORKER}
    scene.serve(running)
    assert stays in scene.dispatched
    assert scene.scheduler.live == 1


def test_a_worker_that_drops_a_model_keeps_requests_for_its_other_models() -> None:
    """Only requests that no worker serves any more are rejected."""
    scene = Scene("d2lpm", workers=(), settings=ONE_AT_A_TIME)
    scene.join("w1", MODEL, "qwen")
    scene.arrive("ada", "one")
    kept, lost = scene.arrive("ada", "two"), scene.arrive("ada", "red", model="qwen")
    scene.join("w1", MODEL)
    assert scene.refusals == {lost: Refusal.NO_WORKER}
    scene.serve_all()
    assert kept in scene.dispatched


def test_a_new_worker_starts_with_the_highest_deficit() -> None:
    """A client's counter at a new worker starts at its highest deficit; with less, the worker would get nothing until
    the others are used up.
    """
    scene = new_scene(quantum=10_000)
    scene.serve(scene.arrive("ada", "something"))
    scene.join("w3")
    scene.arrive("ada", "else")
    credits = {worker: scene.deficit("ada", worker).placement for worker in ("w1", "w2", "w3")}
    chosen = scene.worker_of(scene.order[-1])
    assert credits.pop("w3") == 10_000 - (4 * CHUNK_TOKENS if chosen == "w3" else 0)
    assert max(c for c in credits.values() if c is not None) == 10_000 - (0 if chosen == "w3" else 4 * CHUNK_TOKENS)


def test_a_booking_is_replaced_by_the_charge_at_dispatch() -> None:
    """The charge counts at dispatch, since a prefix that was expected to be cached may have been evicted by then."""
    scene = new_scene(HUGE, workers=("w1",), settings=ONE_AT_A_TIME)
    running = scene.arrive("ada", "first")
    for _ in range(2):
        scene.arrive("ada", "document")
    assert scene.deficit("ada").placement == HUGE - (5 + 8) * CHUNK_TOKENS - 1
    scene.finish(running)
    scene.evict("w1")
    scene.finish(scene.order[1])
    assert scene.deficit("ada").placement == HUGE - (5 + 8 + 8) * CHUNK_TOKENS


def test_requests_with_the_same_prefix_wait_for_the_same_worker() -> None:
    """Such requests wait for one worker although none of them is computed yet: the first will be when the others have
    their turn.
    """
    scene = new_scene(HUGE, load_slack=NO_ESCAPE, settings=ONE_AT_A_TIME)
    for letter in "ab":
        scene.arrive("ada", letter)
    waiting = [scene.arrive("ada", "document" + letter) for letter in "abcd"]
    scene.serve_all()
    assert len({scene.worker_of(request) for request in waiting}) == 1


def test_promises_are_dropped_when_no_request_waits() -> None:
    """A prefix that was promised and never computed binds no later request."""
    scene = new_scene(HUGE, load_slack=NO_ESCAPE, settings=ONE_AT_A_TIME)
    running = [scene.arrive("ada", letter) for letter in "ab"]
    gone = scene.arrive("ada", "document")
    scene.cancel(gone)
    for request in running:
        scene.finish(request)
    assert scene.dispatched[scene.arrive("ada", "documents")].why == "no prefix"


def test_a_booking_is_undone_once() -> None:
    """An undone booking leaves nothing behind, and its client has the deficit that it had before."""
    estimates = Estimates()
    view = SchedulerView(WorkerFleet(FixedWindow()), PrefixMap(9, estimates, 0), estimates)
    parameters = Parameters(D2lpmParameters(by_service_rate=False))
    placement = D2lpm(PolicyContext(view, LinearCost(), Random(0), parameters, Backlog()))
    request = Request(RequestId("r1"), ClientId("ada"), MODEL, ())
    candidate = Candidate(WorkerId("w1"), cached_tokens=30, extend_tokens=50, load=0)
    placement.place(request, [candidate])
    placement.book(request, candidate)
    assert placement.deficit(request.client, WorkerId("w1")) == D2lpmParameters().quantum - 50
    placement.unplace(request.id)
    assert placement.deficit(request.client, WorkerId("w1")) == D2lpmParameters().quantum
    with pytest.raises(KeyError):
        placement.unplace(request.id)


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["arrive", "serve", "break", "refuse", "cancel", "flap"]), st.integers(0, 99)),
        max_size=40,
    )
)
def test_no_booking_is_lost(steps: list[tuple[str, int]]) -> None:
    """When all requests have ended, each counter lacks exactly what its client was charged for service at that
    worker.
    """
    window = SchedulerSettings(window=FixedWindow(requests=2), cached_in_flight=8 * CHUNK_TOKENS)
    scene = new_scene(HUGE, load_slack=1, settings=window)
    paid: dict[tuple[str, str], Tokens] = {}

    def end(request: RequestId, how: str, output: int) -> None:
        client, worker = scene.requests[request].client, scene.worker_of(request)
        if how == "refuse":
            scene.refuse(request)
            return
        scene.progress(request, output)
        bill = scene.scheduler.attempts[request].bill.tokens
        paid[client, worker] = paid.get((client, worker), Tokens()).plus(bill)
        if how == "cancel":
            scene.cancel(request)
        elif how == "break":
            scene.fail(request)
        else:
            scene.finish(request, cached=bill.cached)

    for kind, number in steps:
        live = [r for r in scene.requests if r in scene.scheduler.attempts]
        waiting = [r for r in scene.requests if r not in scene.dispatched and r not in scene.refusals]
        if kind == "arrive":
            scene.arrive(f"c{number % 2}", f"{number % 3}" * (1 + number % 5))
        elif kind == "flap":
            scene.leave(W[number % 2])
            scene.join(W[number % 2])
        elif kind == "cancel" and waiting:
            cancelled = waiting[number % len(waiting)]
            scene.cancel(cancelled)
            scene.refusals[cancelled] = Refusal.EXPIRED  # so that it is not taken for one that waits
        elif live:
            end(live[number % len(live)], kind, number)
    while scene.scheduler.attempts:
        end(next(iter(scene.scheduler.attempts)), "serve", 3)
    for client in {request.client for request in scene.requests.values()}:
        for worker in W:
            left = scene.deficit(client, worker).placement
            charged = scene.scheduler.settings.cost(paid.get((client, worker), Tokens()))
            assert left in (None, HUGE - charged)


LONG = "a prefix of more than 256 tokens"


def crowded(*prompts: str, steal_loss: int = 256) -> tuple[Scene, list[RequestId]]:
    """Return a scene where these prompts wait at w1, which is busy and has computed LONG; then w2 joins,
    which is idle.
    """
    parameters = D2lpmParameters(HUGE, steal_loss=steal_loss)
    scene = Scene("d2lpm", parameters, workers=("w1",), settings=ONE_AT_A_TIME)
    scene.arrive("ada", LONG)
    waiting = [scene.arrive("ada", prompt) for prompt in prompts]
    scene.join("w2")
    return scene, waiting


def test_an_idle_worker_takes_over_a_request_that_loses_little() -> None:
    """An idle worker takes a request without a prefix from another queue, and the booking moves with it."""
    scene, (warm, cold) = crowded(LONG + "?", "short")
    assert warm not in scene.dispatched
    assert (scene.worker_of(cold), scene.dispatched[cold].why) == ("w2", "stolen")
    kept = HUGE - (len(LONG) + 1) * CHUNK_TOKENS
    assert scene.deficit("ada", "w1").placement == kept
    assert scene.deficit("ada", "w2").placement == kept - 5 * CHUNK_TOKENS


def test_a_request_that_would_lose_its_prefix_is_not_taken_over() -> None:
    """A request whose prefix would have to be computed again waits for the worker that holds it."""
    scene, (warm,) = crowded(LONG + "?")
    assert warm not in scene.dispatched
    scene.finish(scene.order[0])
    assert scene.worker_of(warm) == "w1"


def test_stealing_can_be_switched_off() -> None:
    """Without stealing every request stays where it was placed, as in the paper."""
    scene, (cold,) = crowded("short", steal_loss=-1)
    assert cold not in scene.dispatched
    assert not scene.scheduler.policy.properties.work_conserving


def test_a_slow_worker_has_a_smaller_quantum() -> None:
    """Q^w follows the measured service rate unless that is switched off."""
    for by_rate, quantum in ((True, 500.0), (False, 1000.0)):
        view = SchedulerView(WorkerFleet(FixedWindow()), PrefixMap(9, Estimates(), 0), Estimates())
        view.speed = lambda worker: 0.5  # noqa: ARG005 - every one
        parameters = Parameters(D2lpmParameters(1000.0, by_service_rate=by_rate))
        build: PlacementFactory = D2lpm
        placement = build(PolicyContext(view, LinearCost(), Random(0), parameters, Backlog()))
        request = Request(RequestId("r1"), ClientId("ada"), MODEL, ())
        placement.place(request, [Candidate(WorkerId("w1"), cached_tokens=0, extend_tokens=0, load=0)])
        assert placement.deficit(request.client, WorkerId("w1")) == quantum
