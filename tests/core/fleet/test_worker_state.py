"""A worker's state says what is in flight there, and what its window admits."""

from math import inf

import pytest

from router.core.fleet.health import HealthRules
from router.core.fleet.in_flight import EARLY_PREFILL_SHARE, InFlight
from router.core.fleet.service_rate import FIRST_SECONDS_PER_TOKEN
from router.core.fleet.window import FixedWindow, LearnedWindow, Window
from router.core.fleet.worker_index import WorkerIndex
from router.core.fleet.worker_state import WorkerState
from router.core.model.cost import NOTHING, Tokens
from router.core.model.events import WorkerReported
from router.core.model.request import RequestId, Worker, WorkerId
from tests.core.scenario import Scene

W1 = WorkerId("w1")
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


class TrackedWorker:
    """A worker's state and its entries in the index of all workers."""

    def __init__(self, window: Window | None = None) -> None:
        self.index = WorkerIndex()
        self.flights: dict[RequestId, InFlight] = {}
        self.state = WorkerState(Worker(W1, frozenset(["llama"])), window or LearnedWindow(), self.index)

    def add(self, request: RequestId, tokens: int, now: float = 0.0, *, streamed: bool = True) -> None:
        self.flights[request] = self.state.add(tokens, 100, now, streamed=streamed)

    def start(self, request: RequestId, now: float, *, seen: bool) -> None:
        self.state.start(self.flights[request], now, seen=seen)

    def serve(self, request: RequestId, cost: float, output: int) -> None:
        self.state.serve(self.flights[request], NOTHING, Tokens(output=output), cost)

    def remove(self, request: RequestId, now: float, *, computed: bool) -> None:
        self.state.remove(self.flights[request], now, computed=computed)

    def room(self) -> tuple[bool, float]:
        """Return whether there is room, and how many tokens are still to be computed."""
        return self.state.has_room, self.state.load.ahead_tokens

    @property
    def unstarted(self) -> tuple[int, int]:
        return self.state.load.unstarted, self.state.load.unstarted_tokens


def test_charges_are_added_up_and_corrected() -> None:
    """The sum of charges falls when a bill falls."""
    tracked = TrackedWorker()
    tracked.add(A, 10)
    tracked.start(A, 0.0, seen=True)
    tracked.state.serve(tracked.flights[A], NOTHING, Tokens(100, 20, 0), 100.0)
    tracked.state.serve(tracked.flights[A], Tokens(100, 20, 0), Tokens(70, 50, 9), -12.0)
    assert tracked.state.charged == Tokens(70, 50, 9)


def test_load_counts_what_waits_for_its_first_token() -> None:
    """A start removes a request's tokens once, and its end removes the rest."""
    tracked = TrackedWorker()
    tracked.add(A, 10)
    tracked.add(B, 5)
    assert (tracked.state.load.requests, *tracked.unstarted) == (2, 2, 15)
    tracked.start(A, 0.0, seen=True)
    tracked.start(A, 0.0, seen=True)
    assert (tracked.state.load.requests, *tracked.unstarted) == (2, 1, 5)
    tracked.remove(A, 1.0, computed=True)
    tracked.remove(B, 1.0, computed=True)
    assert (tracked.state.load.requests, *tracked.unstarted) == (0, 0, 0)


def test_there_is_room_as_long_as_the_smallest_request_would_be_admitted() -> None:
    """The smallest request has one uncached token."""
    tracked = TrackedWorker(FixedWindow(8, 100))
    tracked.add(A, 99)
    assert (tracked.state.has_room, tracked.state.admits(1)) == (True, True)
    tracked.add(B, 1)
    assert (tracked.state.has_room, tracked.state.admits(1)) == (False, False)


def test_a_start_is_guessed_when_the_prefill_should_be_over() -> None:
    """The guess includes the prefill of all requests before it; the first token of an unstreamed answer
    is never seen.
    """
    tracked = TrackedWorker()
    tracked.add(A, 1000)
    tracked.add(B, 500, streamed=False)
    due = EARLY_PREFILL_SHARE * 1500 * FIRST_SECONDS_PER_TOKEN
    assert tracked.index.next_deadline == pytest.approx(due)
    tracked.state.advance(due)
    assert tracked.unstarted == (1, 1000)
    assert tracked.state.load.guessed == 1
    assert tracked.index.next_deadline == inf


def test_a_later_stream_shows_earlier_starts() -> None:
    """A later stream's first token shows that earlier requests have started, since engines serve in order."""
    tracked = TrackedWorker()
    tracked.add(A, 10, streamed=False)
    tracked.add(B, 10)
    tracked.add(C, 10, streamed=False)
    tracked.start(B, 0.0, seen=True)
    assert tracked.unstarted == (1, 10)
    assert tracked.state.load.guessed == 1


def test_an_end_without_a_first_token_shows_no_earlier_starts() -> None:
    """An answer without streaming may overtake another one."""
    tracked = TrackedWorker()
    tracked.add(A, 10, streamed=False)
    tracked.add(B, 10, streamed=False)
    tracked.start(B, 0.0, seen=False)
    tracked.remove(B, 0.0, computed=True)
    assert tracked.unstarted == (1, 10)


def test_when_little_of_a_long_prompt_is_left_the_next_may_go() -> None:
    """The time at which the next request may go is known beforehand, so no event is needed."""
    tracked = TrackedWorker()
    tracked.add(A, 8192)
    assert tracked.room() == (False, 8192)
    due = tracked.index.next_deadline
    assert due == pytest.approx(EARLY_PREFILL_SHARE * (8192 - 2048 + 1) * FIRST_SECONDS_PER_TOKEN)
    tracked.state.advance(due)
    has_room, ahead = tracked.room()
    assert has_room
    assert 2046 < ahead <= 2048
    assert tracked.index.next_deadline == inf


def test_only_the_first_prompt_counts_as_computed() -> None:
    """However long the first prompt takes, only its first token shows that the next one has begun."""
    tracked = TrackedWorker()
    tracked.add(A, 3000)
    tracked.add(B, 4000)
    tracked.state.on_report(0, 2, None, 60.0)
    assert tracked.state.load.ahead_tokens == 4000


def test_the_cache_is_expected_to_fill_as_answers_grow() -> None:
    """A request that fits now must wait if the running requests will need the room."""
    tracked = TrackedWorker()
    tracked.state.set_kv_capacity(1000)
    tracked.add(A, 450)
    tracked.start(A, 1.0, seen=True)
    rooms = [tracked.state.has_room]
    tracked.add(B, 450, 1.0)
    tracked.start(B, 2.0, seen=True)
    rooms.append(tracked.state.has_room)
    assert rooms == [True, False]


def test_answers_are_expected_to_have_their_predicted_length() -> None:
    """The prediction counts and not the output limit, because clients ask for more than they get."""
    rooms = []
    for predicted in (10.0, 100.0):
        tracked = TrackedWorker()
        tracked.state.set_kv_capacity(1000)
        for _ in range(9):
            flight = tracked.state.add(80, predicted, 50.0, streamed=True, most_output=5000.0)
            tracked.state.start(flight, 51.0, seen=True)
        rooms.append(tracked.state.has_room)
    assert rooms == [True, False]


def test_an_answer_longer_than_predicted_takes_room_as_it_streams() -> None:
    """Such an answer takes more room as it grows, or too many could run that were predicted to be over."""
    tracked = TrackedWorker()
    tracked.state.set_kv_capacity(1000)
    tracked.flights[A] = tracked.state.add(80, 10.0, 0.0, streamed=True, most_output=5000.0)
    tracked.start(A, 1.0, seen=True)
    peaks = []
    for output in (0, 300, 300):
        tracked.serve(A, 2.0 * output, output)
        tracked.state.on_report(1, 0, None, 2.0)
        peaks.append(tracked.state.load.kv_peak)
    assert peaks == [80 + 10, 80 + 2 * 300, 80 + 2 * 300]
    assert tracked.state.has_room


def test_a_fixed_window_sets_no_deadline_for_a_long_prompt() -> None:
    """A fixed window counts unstarted tokens, not what is left of a prompt."""
    tracked = TrackedWorker(FixedWindow(requests=2, unstarted_tokens=100))
    tracked.add(A, 8192)
    assert not tracked.state.has_room
    assert tracked.index.next_deadline == inf


def test_a_refused_request_does_not_change_the_prefill_time() -> None:
    """Refusals are not measured, or a worker that refuses many requests would seem fast."""
    tracked = TrackedWorker()
    for number in range(200):
        request = RequestId(f"{number}")
        tracked.add(request, 3000, 0.05 * number, streamed=False)
        tracked.remove(request, 0.05 * number + 0.04, computed=False)
    assert tracked.state.service_rate.prefill_seconds(1) == FIRST_SECONDS_PER_TOKEN


def test_the_next_prompt_begins_when_the_first_is_gone() -> None:
    """Nothing of the next prompt is computed by then, however long the first was there."""
    tracked = TrackedWorker()
    tracked.add(A, 4000)
    tracked.add(B, 8000, 4.9)
    tracked.remove(A, 5.0, computed=False)
    assert tracked.state.load.ahead_tokens == 8000


def test_only_calls_count_as_the_last_sign_of_a_worker() -> None:
    """An engine can answer for its metrics while it answers no call."""
    scene = Scene("dlpm_home")
    scene.now = 5.0
    scene.feed(WorkerReported(WorkerId("w1"), 0, 0))
    assert scene.scheduler.fleet.last_sign(WorkerId("w1")) == -inf
    scene.start(scene.arrive("ada", "document"))
    scene.progress(next(iter(scene.dispatched)), 3)
    assert scene.scheduler.fleet.last_sign(WorkerId("w1")) == 5.0


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_worker_whose_calls_are_all_set_aside_is_idle(comes_back: bool) -> None:
    """The time in which nobody reports on them counts as no silence once one comes back or another call is sent."""
    rules = HealthRules(silence=30.0)
    state = WorkerState(Worker(W1, frozenset(["llama"])), LearnedWindow(), WorkerIndex(), rules)
    flight = state.add(10, 100, 0.0, streamed=True)
    state.set_aside(flight, 1.0)
    state.advance(100.0)
    assert not state.silent
    if comes_back:
        state.bring_back(flight, 100.0)
    else:
        state.add(10, 100, 100.0, streamed=True)
    state.advance(101.0)
    assert not state.silent
    state.advance(200.0)
    assert state.silent
