"""DLPM with homes, in scenarios: one queue for the fleet, and each request at home where its prefix is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.window import FixedWindow
from router.core.model.events import Arrived
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.dlpm.d2lpm import D2lpmParameters
from router.core.policies.dlpm.dlpm_home import DlpmHome, DlpmHomeParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, MODEL, Scene

ONE_EACH = SchedulerSettings(window=FixedWindow(requests=1))
W = ("w1", "w2")
NO_WAIT, LONG_WAIT = 1e-9, 1e9
DOCUMENT = "a document of more than 256 tokens"
assert len(DOCUMENT) * CHUNK_TOKENS > 256


def scene(
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
    """It has no home and may go to any worker."""
    talk = scene(settings=SchedulerSettings())
    homes = [talk.worker_of(talk.arrive("ada", letter)) for letter in "abcd"]
    assert homes == ["w1", "w2", "w1", "w2"]


def test_a_request_without_a_prompt_goes_to_any_worker() -> None:
    """For example a call for a stored answer."""
    talk = scene()
    talk.arrive("ada", DOCUMENT)
    request = Request(RequestId("r"), ClientId("bob"), MODEL, ())
    talk.feed(Arrived(request))
    assert talk.worker_of(request.id) == "w2"


def test_workers_with_equal_load_take_turns() -> None:
    """Successive requests do not all fill one cache."""
    talk = scene()
    requests = []
    for letter in "abcd":
        requests.append(talk.arrive("ada", letter))
        talk.finish(requests[-1])
    assert [talk.worker_of(request) for request in requests] == ["w1", "w2", "w1", "w2"]


def test_a_request_waits_for_its_home_while_another_worker_idles() -> None:
    """It waits up to its deadline, and goes home when there is room."""
    talk = scene()
    first = talk.arrive("ada", DOCUMENT + "1")
    second = talk.arrive("ada", DOCUMENT + "2")
    assert talk.order == [first]
    talk.finish(first)
    assert talk.worker_of(second) == talk.worker_of(first)


def test_no_home_deadline_outlives_its_request() -> None:
    """Once no request waits, however far away the deadlines are."""
    talk = scene(settings=SchedulerSettings())
    for letter in "abc":
        talk.serve(talk.arrive("ada", DOCUMENT + letter))
    policy = talk.scheduler.policy
    assert isinstance(policy, DlpmHome)
    assert not policy._pool._home_deadlines


def test_an_idle_worker_takes_a_request_without_a_home() -> None:
    """A request that waits for its home blocks no other."""
    talk = scene()
    first = talk.arrive("ada", DOCUMENT + "1")
    talk.arrive("ada", DOCUMENT + "2")
    cold = talk.arrive("bob", "hello")
    assert talk.order == [first, cold]
    assert talk.worker_of(cold) != talk.worker_of(first)


def test_away_from_home_new_prompts_go_before_cached_ones() -> None:
    """Although the other has waited longer and may leave home: its home may still take it."""
    talk = scene(home_patience=NO_WAIT)
    first, other = talk.arrive("ada", DOCUMENT + "1"), talk.arrive("ada", "hello")
    second, new = talk.arrive("ada", DOCUMENT + "2"), talk.arrive("ada", "world")
    talk.wait(1.0)
    talk.finish(other)
    assert talk.worker_of(new) == talk.worker_of(other)
    talk.finish(first)
    assert talk.worker_of(second) == talk.worker_of(first)


def test_a_request_that_loses_little_may_go_anywhere() -> None:
    """A prefix shorter than one prefill step is not worth waiting for."""
    talk = scene()
    first, second = talk.arrive("ada", "short 1"), talk.arrive("ada", "short 2")
    assert talk.worker_of(second) != talk.worker_of(first)


def test_a_request_leaves_home_at_its_deadline() -> None:
    """After a multiple of the time that its prefix takes to compute, the first worker with room takes it."""
    talk = scene(home_patience=3.0)
    first, second = talk.arrive("ada", DOCUMENT + "1"), talk.arrive("ada", DOCUMENT + "2")
    assert talk.wake_at is not None
    recompute = talk.scheduler.cluster[talk.worker_of(first)].service_rate.prefill_seconds(len(DOCUMENT) * CHUNK_TOKENS)
    assert talk.wake_at == 3.0 * recompute
    talk.wait(talk.wake_at - 1e-6)
    assert second not in talk.dispatched
    talk.wait(2e-6)
    assert talk.worker_of(second) != talk.worker_of(first)


def test_a_prefix_is_copied_when_its_clients_deficit_at_home_is_used_up() -> None:
    """q_{i,w} decides how long a client's requests stay with one worker while another idles."""
    talk = scene(worker_quantum=100)
    first, second = talk.arrive("ada", DOCUMENT + "1"), talk.arrive("ada", DOCUMENT + "2")
    assert talk.worker_of(second) != talk.worker_of(first)
    assert talk.dispatched[second].why == "copied"


def test_a_client_in_debt_waits_for_eligible_clients_anywhere() -> None:
    """One counter serves the fleet: no worker serves a client in debt because the eligible ones are at home
    elsewhere.
    """
    talk = scene(quantum=100, workers=("w1", "w2", "w3"))
    debtor = talk.arrive("ada", "x" * 40)
    warm = talk.arrive("bob", DOCUMENT + "1", weight=100)
    waits_for_home = talk.arrive("bob", DOCUMENT + "2", weight=100)
    next_of_debtor = talk.arrive("ada", "hello")
    assert talk.order == [debtor, warm]
    talk.finish(warm)
    assert talk.order == [debtor, warm, waits_for_home, next_of_debtor]


def test_all_deficits_are_reset_when_no_request_waits_or_is_in_flight() -> None:
    """Use of an idle fleet leaves no debt."""
    talk = scene(quantum=100)
    alone = talk.arrive("ada", "ten chunks")
    talk.arrive("bob", "x")
    assert talk.deficit("ada").order == 100 - 10 * CHUNK_TOKENS
    talk.serve_all()
    talk.arrive("bob", "y")
    assert talk.deficit("ada").order == 100
    assert alone in talk.dispatched


def test_a_request_whose_prefix_is_evicted_may_go_anywhere() -> None:
    """It no longer waits for the worker that held its prefix."""
    talk = scene()
    first, second = talk.arrive("ada", DOCUMENT + "1"), talk.arrive("ada", DOCUMENT + "2")
    talk.evict(talk.worker_of(first))
    assert talk.worker_of(second) != talk.worker_of(first)


def test_a_client_with_one_request_for_two_workers_is_sparse() -> None:
    """Its second request need not wait for its first, beside clients with as many requests as there are workers."""
    talk = scene(settings=SchedulerSettings(window=FixedWindow(requests=3)))
    ada = [talk.arrive("ada", DOCUMENT + turn) for turn in "12345"]
    eve = [talk.arrive("eve", "another, " + DOCUMENT + turn) for turn in "12345"]
    light = [talk.arrive("bob", letter) for letter in "ab"]
    assert talk.order == [*ada[:3], *eve[:3]]
    talk.finish(ada[0])
    talk.finish(eve[0])
    assert talk.order[6:] == light


def test_a_second_copy_is_a_second_home() -> None:
    """A waiting request learns at once that another worker now holds its prefix."""
    talk = scene(home_patience=3.0)
    first = talk.arrive("ada", DOCUMENT + "1")
    second, third = talk.arrive("ada", DOCUMENT + "2"), talk.arrive("ada", DOCUMENT + "3")
    talk.wait(talk.wake_at or 0)
    assert talk.order == [first, second]
    talk.finish(second)
    assert talk.worker_of(third) == talk.worker_of(second)


def test_when_its_home_leaves_a_request_finds_another() -> None:
    """A worker that left holds nothing."""
    talk = scene()
    first, second = talk.arrive("ada", DOCUMENT + "1"), talk.arrive("ada", DOCUMENT + "2")
    talk.leave(talk.worker_of(first))
    assert talk.worker_of(second) != talk.worker_of(first)


def test_a_new_worker_takes_requests_without_a_home() -> None:
    """It does not take requests that wait for their home."""
    talk = scene(workers=("w1",))
    first = talk.arrive("ada", DOCUMENT + "1")
    talk.arrive("ada", DOCUMENT + "2")
    cold = talk.arrive("bob", "hello")
    talk.join("w2")
    assert talk.order == [first, cold]
    assert talk.worker_of(cold) == "w2"


def test_an_overloaded_home_is_left() -> None:
    """A hot prefix does not pin a fleet's load to one worker, even if that worker has room."""
    talk = scene(settings=SchedulerSettings())
    homes = [talk.worker_of(talk.arrive("ada", DOCUMENT + letter)) for letter in "123456"]
    assert homes == ["w1"] * 5 + ["w2"]
    assert talk.dispatched[talk.order[-1]].why == "load"


def test_a_worker_without_room_relieves_no_home() -> None:
    """Another worker does, even with as many requests in flight."""
    settings = SchedulerSettings(window=FixedWindow(unstarted_tokens=4 * CHUNK_TOKENS))
    talk = scene(settings=settings, workers=("w1", "w2", "w3"))
    talk.start(talk.arrive("ada", DOCUMENT))
    full, open_ = talk.arrive("bob", "full"), talk.arrive("bob", "open")
    talk.start(open_)
    assert (talk.worker_of(full), talk.worker_of(open_)) == ("w2", "w3")
    homes = []
    for number in "1234567":
        homes.append(talk.worker_of(talk.arrive("ada", DOCUMENT + number)))
        talk.start(talk.order[-1])
    assert homes == ["w1"] * 6 + ["w3"]


STEPS = st.sampled_from(["arrive", "arrive", "arrive", "serve", "serve", "evict", "drop", "flap", "wait"])


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 99)), max_size=60))
def test_every_match_and_home_is_current(steps: list[tuple[str, int]]) -> None:
    """After any events, the noted match of each waiting request equals a new match."""
    parameters = DlpmHomeParameters(300, worker_quantum=600, home_loss=CHUNK_TOKENS, home_patience=20.0)
    tight = SchedulerSettings(window=FixedWindow(requests=1), prefix_limit=30, match_minimum=0)
    talk = Scene("dlpm_home", parameters, workers=("w1", "w2", "w3"), settings=tight)
    for step, number in steps:
        match step:
            case "arrive":
                talk.arrive("abc"[number % 3], "xyz"[number % 3] * (number % 7) + "pq"[number % 2] * (number % 5) + "!")
            case "serve" if running := list(talk.scheduler.attempts):
                talk.serve(running[number % len(running)], answer="xyz"[number % 3] * (number % 9 + 1))
            case "evict" | "drop":
                talk.evict(f"w{number % 3 + 1}", CHUNK_TOKENS * (number % 4) if step == "evict" else None)
            case "flap":
                talk.leave(f"w{number % 3 + 1}")
                talk.join(f"w{number % 3 + 1}")
            case "wait":
                talk.wait(number / 1000)
        check_homes(talk, parameters)


def check_homes(talk: Scene, parameters: DlpmHomeParameters) -> None:
    policy, tree = talk.scheduler.policy, talk.scheduler.prefixes.tree
    assert isinstance(policy, DlpmHome)
    pool = policy._pool
    for name, waiting in pool._waiting.items():
        current = tree.match(waiting.request.prompts[0].hashes)
        assert waiting.matched == {state.worker.id: current.get(state.worker.id, 0) for state in talk.scheduler.cluster}
        enough = max(waiting.matched.values()) - parameters.home_loss / CHUNK_TOKENS
        near = {worker for worker, chunks in waiting.matched.items() if chunks >= enough}
        assert set(waiting.homes) == (near if len(near) < len(waiting.matched) else set())
        assert {worker for worker, queue in pool.homes.items() if name in queue} == set(waiting.homes)
        any_worker = pool._any_worker.get(waiting.request.model)
        assert (waiting.leaves_home_at is None) == (any_worker is not None and name in any_worker)
        assert waiting.homes or waiting.leaves_home_at is None


@pytest.mark.parametrize("parameters", [{"load_ratio": 0.5}, {"load_slack": -1}, {"quantum": 0.0}])
def test_impossible_parameters_are_rejected(parameters: dict[str, float]) -> None:
    """By either policy that has them."""
    for family in (DlpmHomeParameters, D2lpmParameters):
        with pytest.raises(ValueError, match=r"must be|not negative"):
            family(**parameters)  # type: ignore[arg-type]


def test_a_new_worker_starts_with_new_prompts() -> None:
    """A prefix that every worker held until then is now held elsewhere."""
    parameters = DlpmHomeParameters(home_patience=NO_WAIT, sparse_first=False, oldest_every=0)
    talk = Scene("dlpm_home", parameters, workers=("w1",), settings=ONE_EACH)
    first, second, third = (talk.arrive("ada", DOCUMENT + turn) for turn in ("", "1", "2"))
    new = talk.arrive("ada", "hello")
    talk.finish(first)
    talk.wait(1.0)
    talk.join("w2")
    assert talk.order == [first, second, new]
    talk.finish(second)
    assert talk.worker_of(third) == talk.worker_of(first)
