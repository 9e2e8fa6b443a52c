"""`dlpm_home` keeps one queue for the fleet and sends each request home, to where its prefix is."""

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.events import Arrived, Ticked
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.dlpm.dlpm_home import DlpmHome
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters, DlpmHomeParameters
from router.core.policies.dlpm.home_pool import CHANGES_AT_ONCE, CHANGES_SECONDS, MOST_HOMES, HomePool, PooledRequest
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, MODEL, Scene, key

ONE_EACH = SchedulerSettings(window=FixedWindow(requests=1))
W = ("w1", "w2")
NO_WAIT, LONG_WAIT = 1e-9, 1e9
DOCUMENT = "a document of more than 256 tokens"
assert len(DOCUMENT) * CHUNK_TOKENS > 256


def new_scene(
    *,
    quantum: float = 20_000,
    worker_quantum: float = 1e6,
    home_patience: float = LONG_WAIT,
    settings: SchedulerSettings = ONE_EACH,
    workers: tuple[str, ...] = W,
) -> Scene:
    parameters = DlpmHomeParameters(quantum, worker_quantum=worker_quantum, home_patience=home_patience)
    return Scene("dlpm_home", parameters, workers=workers, settings=settings)


def test_an_uncached_request_goes_to_the_worker_with_the_fewest_in_flight() -> None:
    """An uncached request has no home and may go to any worker."""
    scene = new_scene(settings=SchedulerSettings())
    homes = [scene.worker_of(scene.arrive("ada", letter)) for letter in "abcd"]
    assert homes == ["w1", "w2", "w1", "w2"]


def test_a_request_without_a_prompt_goes_to_any_worker() -> None:
    """A call for a stored answer, for example, has no prompt and so no home."""
    scene = new_scene()
    scene.arrive("ada", DOCUMENT)
    request = Request(RequestId("r"), ClientId("bob"), MODEL, ())
    scene.feed(Arrived(request))
    assert scene.worker_of(request.id) == "w2"


def test_workers_with_equal_load_take_turns() -> None:
    """Successive requests go to different workers and do not all fill one cache."""
    scene = new_scene()
    requests = []
    for letter in "abcd":
        requests.append(scene.arrive("ada", letter))
        scene.finish(requests[-1])
    assert [scene.worker_of(request) for request in requests] == ["w1", "w2", "w1", "w2"]


def test_a_request_waits_for_its_home_while_another_worker_idles() -> None:
    """A request waits up to its deadline, and goes home when there is room."""
    scene = new_scene()
    first = scene.arrive("ada", DOCUMENT + "1")
    second = scene.arrive("ada", DOCUMENT + "2")
    assert scene.order == [first]
    scene.finish(first)
    assert scene.worker_of(second) == scene.worker_of(first)


def test_no_home_deadline_outlives_its_request() -> None:
    """Once no request waits, no deadline is left, however far away it was."""
    scene = new_scene(settings=SchedulerSettings())
    for letter in "abc":
        scene.serve(scene.arrive("ada", DOCUMENT + letter))
    policy = scene.scheduler.policy
    assert isinstance(policy, DlpmHome)
    assert not policy._pool._home_deadlines


def test_an_idle_worker_takes_a_request_without_a_home() -> None:
    """A request that waits for its home blocks no other."""
    scene = new_scene()
    first = scene.arrive("ada", DOCUMENT + "1")
    scene.arrive("ada", DOCUMENT + "2")
    cold = scene.arrive("bob", "hello")
    assert scene.order == [first, cold]
    assert scene.worker_of(cold) != scene.worker_of(first)


def test_away_from_home_new_prompts_go_before_cached_ones() -> None:
    """A new prompt goes first although a cached one has waited longer and may leave home: its home may
    still take it.
    """
    scene = new_scene(home_patience=NO_WAIT)
    first, other = scene.arrive("ada", DOCUMENT + "1"), scene.arrive("ada", "hello")
    second, new = scene.arrive("ada", DOCUMENT + "2"), scene.arrive("ada", "world")
    scene.wait(1.0)
    scene.finish(other)
    assert scene.worker_of(new) == scene.worker_of(other)
    scene.finish(first)
    assert scene.worker_of(second) == scene.worker_of(first)


@pytest.mark.parametrize(("shared", "waits"), [("s ", False), ("sh ", True)])
def test_a_request_waits_for_its_home_if_it_would_lose_more_than_64_tokens(shared: str, waits: bool) -> None:
    """A shorter prefix is not worth waiting for; one of three chunks, of 96 tokens, is."""
    scene = new_scene()
    first, second = scene.arrive("ada", shared + "1"), scene.arrive("ada", shared + "2")
    assert (second not in scene.dispatched) == waits
    scene.finish(first)
    assert (scene.worker_of(second) == scene.worker_of(first)) == waits


def test_a_request_leaves_home_at_its_deadline() -> None:
    """After a multiple of the time that its prefix takes to compute, the first worker with room takes the request."""
    scene = new_scene(home_patience=3.0)
    first, second = scene.arrive("ada", DOCUMENT + "1"), scene.arrive("ada", DOCUMENT + "2")
    assert scene.wake_at is not None
    recompute = scene.scheduler.fleet[scene.worker_of(first)].service_rate.prefill_seconds(len(DOCUMENT) * CHUNK_TOKENS)
    assert scene.wake_at == 3.0 * recompute
    scene.wait(scene.wake_at - 1e-6)
    assert second not in scene.dispatched
    scene.wait(2e-6)
    assert scene.worker_of(second) != scene.worker_of(first)


def test_changes_of_a_match_leave_no_deadlines_behind() -> None:
    """However often its match changes while a request waits at home, few deadlines are kept for it."""
    scene = new_scene()
    for letter in "uv":  # every worker is busy
        scene.arrive("bob", letter)
    scene.scheduler.prefixes.insert(MODEL, [key(DOCUMENT)], WorkerId("w1"), 0.0)
    scene.arrive("ada", DOCUMENT + "!")
    pool = cast("DlpmHome", scene.scheduler.policy)._pool
    for _ in range(100):
        scene.scheduler.prefixes.insert(MODEL, [key(DOCUMENT)], WorkerId("w2"), 0.0)
        scene.feed(Ticked())
        scene.evict("w2")
    assert len(pool.waiting) == 1
    assert len(pool._home_deadlines) < 32


def test_a_prefix_is_copied_when_its_clients_deficit_at_home_is_used_up() -> None:
    """q_{i,w} decides how long a client's requests stay with one worker while another idles."""
    scene = new_scene(worker_quantum=100)
    first, second = scene.arrive("ada", DOCUMENT + "1"), scene.arrive("ada", DOCUMENT + "2")
    assert scene.worker_of(second) != scene.worker_of(first)
    assert scene.dispatched[second].why == "copied"


def test_a_client_in_debt_waits_for_eligible_clients_anywhere() -> None:
    """One counter serves the fleet: no worker serves a client in debt because the eligible ones are at home
    elsewhere.
    """
    scene = new_scene(quantum=100, workers=("w1", "w2", "w3"))
    debtor = scene.arrive("ada", "x" * 40)
    warm = scene.arrive("bob", DOCUMENT + "1", weight=100)
    waits_for_home = scene.arrive("bob", DOCUMENT + "2", weight=100)
    next_of_debtor = scene.arrive("ada", "hello")
    assert scene.order == [debtor, warm]
    scene.finish(warm)
    assert scene.order == [debtor, warm, waits_for_home, next_of_debtor]


def test_all_deficits_are_reset_when_no_request_waits_or_is_in_flight() -> None:
    """Use of an idle fleet leaves no debt."""
    scene = new_scene(quantum=100)
    alone = scene.arrive("ada", "ten chunks")
    scene.arrive("bob", "x")
    assert scene.deficit("ada").order == 100 - 10 * CHUNK_TOKENS
    scene.serve_all()
    scene.arrive("bob", "y")
    assert scene.deficit("ada").order == 100
    assert alone in scene.dispatched


def test_a_request_whose_prefix_is_evicted_may_go_anywhere() -> None:
    """Such a request no longer waits for the worker that held its prefix."""
    scene = new_scene()
    first, second = scene.arrive("ada", DOCUMENT + "1"), scene.arrive("ada", DOCUMENT + "2")
    scene.evict(scene.worker_of(first))
    assert scene.worker_of(second) != scene.worker_of(first)


def test_a_client_with_one_request_for_two_workers_is_sparse() -> None:
    """Such a client's second request need not wait for its first, beside clients with as many requests as there are
    workers.
    """
    scene = new_scene(settings=SchedulerSettings(window=FixedWindow(requests=3)))
    ada = [scene.arrive("ada", DOCUMENT + turn) for turn in "12345"]
    eve = [scene.arrive("eve", "another, " + DOCUMENT + turn) for turn in "12345"]
    light = [scene.arrive("bob", letter) for letter in "ab"]
    assert scene.order == [*ada[:3], *eve[:3]]
    scene.finish(ada[0])
    scene.finish(eve[0])
    assert scene.order[6:] == light


def test_a_second_copy_is_a_second_home() -> None:
    """A waiting request learns at once that another worker now holds its prefix."""
    scene = new_scene(home_patience=3.0)
    first = scene.arrive("ada", DOCUMENT + "1")
    second, third = scene.arrive("ada", DOCUMENT + "2"), scene.arrive("ada", DOCUMENT + "3")
    scene.wait(scene.wake_at or 0)
    assert scene.order == [first, second]
    scene.finish(second)
    assert scene.worker_of(third) == scene.worker_of(second)


def test_when_its_home_leaves_a_request_finds_another() -> None:
    """A request gets another home, because a worker that left holds nothing."""
    scene = new_scene()
    first, second = scene.arrive("ada", DOCUMENT + "1"), scene.arrive("ada", DOCUMENT + "2")
    scene.leave(scene.worker_of(first))
    assert scene.worker_of(second) != scene.worker_of(first)


def test_a_new_worker_takes_requests_without_a_home() -> None:
    """A new worker does not take requests that wait for their home."""
    scene = new_scene(workers=("w1",))
    first = scene.arrive("ada", DOCUMENT + "1")
    scene.arrive("ada", DOCUMENT + "2")
    cold = scene.arrive("bob", "hello")
    scene.join("w2")
    assert scene.order == [first, cold]
    assert scene.worker_of(cold) == "w2"


def test_an_overloaded_home_is_left() -> None:
    """A hot prefix does not pin a fleet's load to one worker, even if that worker has room."""
    scene = new_scene(settings=SchedulerSettings())
    homes = [scene.worker_of(scene.arrive("ada", DOCUMENT + letter)) for letter in "123456"]
    assert homes == ["w1"] * 5 + ["w2"]
    assert scene.dispatched[scene.order[-1]].why == "load"


def test_a_worker_without_room_relieves_no_home() -> None:
    """A worker with room relieves it, even with as many requests in flight."""
    settings = SchedulerSettings(window=FixedWindow(unstarted_tokens=4 * CHUNK_TOKENS))
    scene = new_scene(settings=settings, workers=("w1", "w2", "w3"))
    scene.start(scene.arrive("ada", DOCUMENT))
    full, open_ = scene.arrive("bob", "full"), scene.arrive("bob", "open")
    scene.start(open_)
    assert (scene.worker_of(full), scene.worker_of(open_)) == ("w2", "w3")
    homes = []
    for number in "1234567":
        homes.append(scene.worker_of(scene.arrive("ada", DOCUMENT + number)))
        scene.start(scene.order[-1])
    assert homes == ["w1"] * 6 + ["w3"]


STEPS = st.sampled_from(["arrive", "arrive", "arrive", "serve", "serve", "evict", "drop", "flap", "wait"])


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 99)), max_size=60), workers=st.sampled_from([3, 5]))
def test_every_match_and_home_is_current(steps: list[tuple[str, int]], workers: int) -> None:
    """After any events, what is noted of a waiting request's match is true of a new match as far as it decides
    anything.
    """
    names = [f"w{number + 1}" for number in range(workers)]
    parameters = DlpmHomeParameters(300, worker_quantum=600, home_loss=CHUNK_TOKENS, home_patience=20.0)
    tight = SchedulerSettings(window=FixedWindow(requests=1), prefix_limit=30, match_minimum=0)
    scene = Scene("dlpm_home", parameters, workers=names, settings=tight)
    for step, number in steps:
        match step:
            case "arrive":
                scene.arrive(
                    "abc"[number % 3], "xyz"[number % 3] * (number % 7) + "pq"[number % 2] * (number % 5) + "!"
                )
            case "serve" if running := list(scene.scheduler.attempts):
                scene.serve(running[number % len(running)], answer="xyz"[number % 3] * (number % 9 + 1))
            case "evict" | "drop":
                scene.evict(names[number % workers], CHUNK_TOKENS * (number % 4) if step == "evict" else None)
            case "flap":
                scene.leave(names[number % workers])
                scene.join(names[number % workers])
            case "wait":
                scene.wait(number / 1000)
        check_homes(scene, parameters)


def check_homes(scene: Scene, parameters: DlpmHomeParameters) -> None:
    policy, tree = scene.scheduler.policy, scene.scheduler.prefixes.tree
    assert isinstance(policy, DlpmHome)
    pool = policy._pool
    for name, waiting in pool._waiting.items():
        current = tree.match(waiting.request.prompts[0].hashes)
        matched = {state.worker.id: current.get(state.worker.id, 0) for state in scene.scheduler.fleet}
        noted = {worker: waiting.matched.at(worker) for worker in waiting.able}
        assert max(noted.values()) == max(matched.values())
        assert min(noted.values()) == min(matched.values())
        enough = max(matched.values()) - parameters.home_loss / CHUNK_TOKENS
        near = {worker for worker, chunks in matched.items() if chunks >= enough}
        if len(near) <= MOST_HOMES or len(waiting.homes) < MOST_HOMES:
            assert set(waiting.homes) == (near if len(near) < len(matched) else set())
        assert near.issuperset(waiting.homes)
        settled = waiting.leaves_home_at is None and len(waiting.homes) == MOST_HOMES
        assert noted == matched or (settled and all(noted[home] == matched[home] for home in waiting.homes))
        assert {worker for worker, queue in pool.homes.items() if name in queue} == set(waiting.homes)
        any_worker = pool._any_worker.get(waiting.request.model)
        assert (waiting.leaves_home_at is None) == (any_worker is not None and name in any_worker)
        assert waiting.homes or waiting.leaves_home_at is None


@pytest.mark.parametrize("alike", [10, 60])
def test_an_eviction_visits_the_requests_that_are_at_home_there(alike: int) -> None:
    """Of many requests that wait alike, those whose homes hold their prefix as before are not looked at, and their
    number is the same for the others.
    """
    workers = tuple(f"w{number}" for number in range(1, 7))
    settings = SchedulerSettings(window=FixedWindow(requests=1), waiting=WaitingLimits(1000, 1e9), match_minimum=0)
    scene = new_scene(home_patience=NO_WAIT, settings=settings, workers=workers)
    for worker in workers[:5]:
        scene.scheduler.prefixes.insert(MODEL, [key(DOCUMENT)], WorkerId(worker), 0.0)
    for letter in "uvwxyz":  # every worker is busy
        scene.arrive("ada", letter)
    for number in range(alike):
        scene.arrive("ada", f"{DOCUMENT}{number}")
    scene.wait(1.0)
    pool = cast("DlpmHome", scene.scheduler.policy)._pool
    assert len(pool.waiting) == alike
    unwatched = {name: pool[name].matched for name in pool._waiting if WorkerId("w1") not in pool[name].homes}
    assert len(unwatched) > alike / 4
    scene.evict("w1")
    for _ in range(alike // CHANGES_AT_ONCE):
        scene.wait(CHANGES_SECONDS)
    assert all(pool[name].matched is matched for name, matched in unwatched.items())
    assert all(WorkerId("w1") not in pool[name].homes for name in pool._waiting)


@pytest.mark.interpreted("the test replaces a method of an object")
def test_requests_choose_new_homes_in_the_order_of_their_arrival() -> None:
    """If several lose a home at once, the one that arrived first has the first choice of the workers."""
    workers = ("w1", "w2", "w3", "w4", "w5", "w6")
    scene = new_scene(workers=workers)
    for worker in workers[:5]:
        scene.scheduler.prefixes.insert(MODEL, [key(DOCUMENT)], WorkerId(worker), 0.0)
    for letter in "uvwxyz":  # every worker is busy
        scene.arrive("ada", letter)
    names = [scene.arrive("ada", f"{DOCUMENT}{number}") for number in range(20)]
    pool = cast("DlpmHome", scene.scheduler.policy)._pool
    chosen: list[RequestId] = []
    find = pool._find_homes

    def recorded(waiting: PooledRequest) -> dict[WorkerId, None]:
        chosen.append(waiting.request.id)
        return find(waiting)

    pool._find_homes = recorded  # type: ignore[method-assign]
    scene.evict("w1")
    assert len(chosen) > 1
    assert chosen == sorted(chosen, key=names.index)


@pytest.fixture
def many_at_home() -> tuple[Scene, HomePool]:
    """Many requests that wait alike for one of two busy workers, which holds their prefix."""
    scene = new_scene(settings=SchedulerSettings(window=FixedWindow(requests=1), waiting=WaitingLimits(1000, 1e9)))
    scene.arrive("ada", DOCUMENT)
    scene.arrive("ada", "w2 is busy")
    for number in range(10 * CHANGES_AT_ONCE):
        scene.arrive("ada", f"{DOCUMENT}{number}")
    return scene, cast("DlpmHome", scene.scheduler.policy)._pool


def at_home(pool: HomePool) -> int:
    return sum(bool(waiting.homes) for waiting in pool._waiting.values())


def test_of_many_changed_matches_an_event_takes_in_a_few(many_at_home: tuple[Scene, HomePool]) -> None:
    """No event takes long because thousands that wait lose their prefix."""
    scene, pool = many_at_home
    waited = at_home(pool)
    scene.evict("w1")
    assert at_home(pool) == waited - CHANGES_AT_ONCE
    scene.wait(CHANGES_SECONDS)
    assert at_home(pool) == waited - 2 * CHANGES_AT_ONCE


def test_all_changed_matches_are_taken_in_without_other_events(many_at_home: tuple[Scene, HomePool]) -> None:
    """The scheduler is woken for each part of them, so that nobody waits for a home that no longer holds anything."""
    scene, pool = many_at_home
    scene.evict("w1")
    for _ in range(10):
        assert at_home(pool) == 0 or scene.scheduler.policy.next_deadline <= scene.now + CHANGES_SECONDS
        scene.wait(CHANGES_SECONDS)
    check_homes(scene, DlpmHomeParameters(20_000))
    assert at_home(pool) == 0


def test_a_request_that_left_is_not_missed_when_its_match_is_taken_in(many_at_home: tuple[Scene, HomePool]) -> None:
    """Its client may leave while its new match is not taken in yet."""
    scene, pool = many_at_home
    scene.evict("w1")
    for name in [name for name, waiting in pool._waiting.items() if waiting.homes]:
        scene.cancel(name)
    scene.wait(CHANGES_SECONDS)
    assert len(pool.waiting) == CHANGES_AT_ONCE


@pytest.mark.parametrize("parameters", [{"load_ratio": 0.5}, {"load_slack": -1}, {"quantum": 0.0}])
def test_impossible_parameters_are_rejected(parameters: dict[str, float]) -> None:
    """Either policy that has these parameters rejects values out of range."""
    for family in (DlpmHomeParameters, D2lpmParameters):
        with pytest.raises(ValueError, match=r"must be|not negative"):
            family(**parameters)  # type: ignore[arg-type]


def test_a_client_starves_no_request_of_its_own_that_has_no_home() -> None:
    """A client that always has cached requests waiting at both workers has its uncached one served, too."""
    parameters = DlpmHomeParameters(quantum=1e9, home_patience=LONG_WAIT, oldest_every=16)
    scene = Scene("dlpm_home", parameters, workers=W, settings=ONE_EACH)
    for document in "de":
        scene.serve(scene.arrive("ada", document * len(DOCUMENT)))
    for number in range(4):
        for document in "de":
            scene.arrive("ada", document * len(DOCUMENT) + str(number))
    cold = scene.arrive("ada", "something else")
    ended = 2
    while cold not in scene.order and len(scene.order) < 100:
        document = "d" if scene.worker_of(scene.order[ended]) == "w1" else "e"
        scene.finish(scene.order[ended])
        ended += 1
        scene.arrive("ada", document * len(DOCUMENT) + "more")
    assert scene.order.index(cold) == 34


@pytest.mark.parametrize("events", range(6))
def test_a_look_that_sends_nothing_is_no_turn(events: int) -> None:
    """While a worker has room for nothing that waits for another one, no request of a client comes nearer to its
    oldest one's turn.
    """
    parameters = DlpmHomeParameters(worker_quantum=1e6, home_patience=LONG_WAIT, oldest_every=2)
    scene = Scene("dlpm_home", parameters, workers=W, settings=ONE_EACH)
    first = scene.arrive("ada", DOCUMENT)
    scene.arrive("ada", DOCUMENT[:20] + "?")
    longest = scene.arrive("ada", DOCUMENT + "!")
    for _ in range(events):
        scene.feed(Ticked())
    scene.serve(first)
    assert scene.order == [first, longest]


def test_a_new_worker_starts_with_new_prompts() -> None:
    """A new worker gets a new prompt, and prompts with a prefix that every worker held before still go where it is
    held.
    """
    parameters = DlpmHomeParameters(home_patience=NO_WAIT, sparse_first=False, oldest_every=0)
    scene = Scene("dlpm_home", parameters, workers=("w1",), settings=ONE_EACH)
    first, second, third = (scene.arrive("ada", DOCUMENT + turn) for turn in ("", "1", "2"))
    new = scene.arrive("ada", "hello")
    scene.finish(first)
    scene.wait(1.0)
    scene.join("w2")
    assert scene.order == [first, second, new]
    scene.finish(second)
    assert scene.worker_of(third) == scene.worker_of(first)
