"""One worker as the core knows it: what is in flight there, and what its window makes of it."""

import pytest

from router.core.fleet.service_rate import FIRST_SECONDS_PER_TOKEN
from router.core.fleet.window import FixedWindow, LearnedWindow, Window
from router.core.fleet.worker_state import EARLY_PREFILL_SHARE, WorkerState
from router.core.model.request import RequestId, Worker, WorkerId

W1 = WorkerId("w1")
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


class Books:
    """A worker's state, and the deadlines that it keeps."""

    def __init__(self, window: Window | None = None) -> None:
        self.deadlines: dict[WorkerId, float] = {}
        self.state = WorkerState(Worker(W1, frozenset(["llama"])), window or LearnedWindow(), self.deadlines)

    def add(self, request: RequestId, tokens: int, now: float = 0.0, *, streamed: bool = True) -> None:
        self.state.add(request, tokens, 100, now, streamed=streamed)

    def room(self) -> tuple[bool, float]:
        """Whether there is any, and what is still to be computed."""
        return self.state.has_room, self.state.load.ahead_tokens

    @property
    def unstarted(self) -> tuple[int, int]:
        return self.state.load.unstarted, self.state.load.unstarted_tokens


def test_load_counts_what_waits_for_its_first_token() -> None:
    """A start takes a request's tokens from the count once, and an end whatever is left of it."""
    books = Books()
    books.add(A, 10)
    books.add(B, 5)
    assert (books.state.load.requests, *books.unstarted) == (2, 2, 15)
    books.state.start(A, 0.0, seen=True)
    books.state.start(A, 0.0, seen=True)
    assert (books.state.load.requests, *books.unstarted) == (2, 1, 5)
    books.state.remove(A, 1.0, computed=True)
    books.state.remove(B, 1.0, computed=True)
    assert (books.state.load.requests, *books.unstarted) == (0, 0, 0)


def test_there_is_room_as_long_as_the_smallest_request_would_be_admitted() -> None:
    """Of one uncached token; a window that is full to the token has none."""
    books = Books(FixedWindow(8, 100))
    books.add(A, 99)
    assert (books.state.has_room, books.state.admits(1)) == (True, True)
    books.add(B, 1)
    assert (books.state.has_room, books.state.admits(1)) == (False, False)


def test_a_call_that_does_not_stream_is_guessed_to_have_started_when_its_prefill_should_be_over() -> None:
    """With that of all before it; its first token will never be seen."""
    books = Books()
    books.add(A, 1000)
    books.add(B, 500, streamed=False)
    due = EARLY_PREFILL_SHARE * 1500 * FIRST_SECONDS_PER_TOKEN
    assert books.deadlines == {W1: pytest.approx(due)}
    books.state.advance(due)
    assert books.unstarted == (1, 1000)
    assert books.state.load.guessed == 1
    assert books.deadlines == {}


def test_a_call_that_does_not_stream_has_started_when_a_later_stream_has() -> None:
    """Engines take requests in turn."""
    books = Books()
    books.add(A, 10, streamed=False)
    books.add(B, 10)
    books.add(C, 10, streamed=False)
    books.state.start(B, 0.0, seen=True)
    assert books.unstarted == (1, 10)
    assert books.state.load.guessed == 1


def test_an_end_without_a_first_token_shows_nothing_of_those_before_it() -> None:
    """A whole answer may overtake another."""
    books = Books()
    books.add(A, 10, streamed=False)
    books.add(B, 10, streamed=False)
    books.state.start(B, 0.0, seen=False)
    books.state.remove(B, 0.0, computed=True)
    assert books.unstarted == (1, 10)


def test_when_little_of_a_long_prompt_is_left_the_next_may_go() -> None:
    """At a time that is known beforehand, so that nothing has to happen for it."""
    books = Books()
    books.add(A, 8192)
    assert books.room() == (False, 8192)
    due = books.deadlines[W1]
    assert due == pytest.approx(EARLY_PREFILL_SHARE * (8192 - 2048 + 1) * FIRST_SECONDS_PER_TOKEN)
    books.state.advance(due)
    has_room, ahead = books.room()
    assert has_room
    assert 2046 < ahead <= 2048
    assert books.deadlines == {}


def test_no_more_than_the_first_prompt_is_taken_to_be_computed() -> None:
    """However long it takes, since only its first token shows that the next is begun."""
    books = Books()
    books.add(A, 3000)
    books.add(B, 4000)
    books.state.on_report(0, 2, None, 60.0)
    assert books.state.load.ahead_tokens == 4000


def test_the_cache_is_expected_to_fill_as_answers_grow() -> None:
    """A request that fits now does not go if those that run will need the room."""
    books = Books()
    books.state.set_kv_capacity(1000)
    books.add(A, 450)
    books.state.start(A, 1.0, seen=True)
    rooms = [books.state.has_room]
    books.add(B, 450, 1.0)
    books.state.start(B, 2.0, seen=True)
    rooms.append(books.state.has_room)
    assert rooms == [True, False]


def test_answers_are_expected_to_be_as_long_as_was_foreseen() -> None:
    """And not as long as they may be: clients ask for more than they get."""
    rooms = []
    for foreseen in (10.0, 100.0):
        books = Books()
        books.state.set_kv_capacity(1000)
        for number in range(9):
            books.state.add(RequestId(f"{number}"), 80, foreseen, 50.0, streamed=True, most_output=5000.0)
            books.state.start(RequestId(f"{number}"), 51.0, seen=True)
        rooms.append(books.state.has_room)
    assert rooms == [True, False]


def test_an_answer_that_outgrows_what_was_foreseen_takes_room_as_it_streams() -> None:
    """Else many could run that were foreseen to be over, and nothing would be kept for them."""
    books = Books()
    books.state.set_kv_capacity(1000)
    books.state.add(A, 80, 10.0, 0.0, streamed=True, most_output=5000.0)
    books.state.start(A, 1.0, seen=True)
    peaks = []
    for output in (0, 300, 300):
        books.state.serve(A, 2.0 * output, output)
        books.state.on_report(1, 0, None, 2.0)
        peaks.append(books.state.load.kv_peak)
    assert peaks == [80 + 10, 80 + 2 * 300, 80 + 2 * 300]
    assert books.state.has_room


def test_a_fixed_window_wakes_nobody_for_a_long_prompt() -> None:
    """It goes by what has not started, not by what is left of it."""
    books = Books(FixedWindow(requests=2, unstarted_tokens=100))
    books.add(A, 8192)
    assert not books.state.has_room
    assert books.deadlines == {}


def test_a_call_that_is_turned_away_says_nothing_of_prefill() -> None:
    """Else a worker that refuses much would seem to be fast."""
    books = Books()
    for number in range(200):
        request = RequestId(f"{number}")
        books.add(request, 3000, 0.05 * number, streamed=False)
        books.state.remove(request, 0.05 * number + 0.04, computed=False)
    assert books.state.service_rate.prefill_seconds(1) == FIRST_SECONDS_PER_TOKEN


def test_when_the_first_of_the_unstarted_is_gone_the_next_is_only_begun() -> None:
    """None of it is computed by then, however long the first was there."""
    books = Books()
    books.add(A, 4000)
    books.add(B, 8000, 4.9)
    books.state.remove(A, 5.0, computed=False)
    assert books.state.load.ahead_tokens == 8000
