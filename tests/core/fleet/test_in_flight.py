"""The table of one worker's requests in flight knows which of them have not started."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.in_flight import InFlight, InFlightTable
from router.core.model.load import Load


def table_of(silent: int = 0, streamed: int = 0) -> tuple[InFlightTable, list[InFlight]]:
    """Return a table of requests dispatched at time 0, one after the other, with 10 uncached tokens each."""
    made = InFlightTable()
    return made, [made.add(10, 0.0, streamed=each >= silent, had_place=True) for each in range(silent + streamed)]


def test_a_start_moves_tokens_from_unstarted_to_held() -> None:
    """The end of a request removes its tokens and those of its answer."""
    made, (first, second) = table_of(streamed=2)
    assert (len(made), made.unstarted, made.unstarted_tokens, made.kv_tokens) == (2, 2, 20, 0)
    made.start(first, 1.0, guessed=False)
    assert (made.unstarted, made.unstarted_tokens, made.kv_tokens) == (1, 10, 10)
    first.output = 7
    made.kv_tokens += 7
    made.remove(first, 9.0)
    made.remove(second, 9.0)
    assert (len(made), made.unstarted, made.unstarted_tokens, made.kv_tokens) == (0, 0, 0, 0)


def test_the_context_of_a_request_counts_from_its_dispatch_to_its_end() -> None:
    """The whole input counts, cached or not and started or not, and the output so far."""
    made = InFlightTable()
    first = made.add(10, 0.0, streamed=True, had_place=True, cached_tokens=90)
    second = made.add(5, 0.0, streamed=True, had_place=True)
    assert (first.context_tokens, made.context_tokens) == (100, 105)
    made.start(first, 1.0, guessed=False)
    made.count_output(first, 7)
    made.count_output(first, -2)
    assert (first.context_tokens, made.context_tokens) == (105, 110)
    made.remove(first, 9.0)
    assert made.context_tokens == second.context_tokens == 5
    made.remove(second, 9.0)
    assert made.context_tokens == 0


def test_the_first_of_the_unstarted_is_the_one_that_is_computed() -> None:
    """The table knows the tokens of the first unstarted request and when it became the first."""
    made, _ = table_of()
    assert made.head_tokens == 0
    first = made.add(10, 1.0, streamed=True, had_place=True)
    made.add(20, 2.0, streamed=True, had_place=True)
    assert (made.head_tokens, made.head_since) == (10, 1.0)
    made.start(first, 3.0, guessed=False)
    assert (made.head_tokens, made.head_since) == (20, 3.0)


def test_starts_are_guessed_in_dispatch_order() -> None:
    """No start is guessed before its time, nor before that of an earlier request."""
    made, (first, second) = table_of(silent=2)
    assert made.next_guess == inf
    made.guess_at(first, 5.0)
    made.guess_at(second, 3.0)
    assert made.next_guess == 5.0
    assert list(made.guesses(until=4.9)) == []
    assert list(made.guesses(until=5.0)) == [first, second]
    assert made.next_guess == inf


def test_a_later_start_shows_the_earlier_ones() -> None:
    """A later request's start shows that earlier ones have begun, at an engine that serves in order."""
    made, (first, second, third) = table_of(silent=2, streamed=1)
    made.guess_at(first, 50.0)
    made.guess_at(second, 60.0)
    assert list(made.guesses(before=second.number)) == [first]
    assert list(made.guesses(before=third.number)) == [second]


def test_no_start_is_guessed_for_an_ended_request() -> None:
    """A request that ended before its guess leaves nothing behind."""
    made, (first,) = table_of(silent=1)
    made.guess_at(first, 5.0)
    made.remove(first, 9.0)
    assert list(made.guesses(until=9.0)) == []
    assert made.next_guess == inf


def test_recently_dispatched_requests_are_counted() -> None:
    """Only unstarted requests count as recently dispatched."""
    made = InFlightTable()
    *_, last = [made.add(10, float(number), streamed=True, had_place=True) for number in range(3)]
    assert [made.unstarted_since(time) for time in (-1.0, 0.0, 1.5, 2.0)] == [3, 2, 1, 0]
    made.start(last, 3.0, guessed=False)
    assert made.unstarted_since(0.5) == 1


def test_guesses_are_counted_while_they_last() -> None:
    """Guessed starts are counted until the request ends."""
    made, (first, second) = table_of(silent=2)
    made.start(first, 1.0, guessed=True)
    made.start(second, 1.0, guessed=False)
    assert made.guessed == 1
    made.remove(first, 9.0)
    assert made.guessed == 0


def test_a_start_out_of_order_does_not_move_the_head() -> None:
    """The first request counts as computed since it became the first, whichever others start."""
    made, (first, second) = table_of(streamed=2)
    made.start(second, 3.0, guessed=False)
    assert made.head_since == 0.0
    made.start(first, 4.0, guessed=False)
    assert made.head_since == 4.0


def test_a_guess_for_an_ended_request_delays_no_other() -> None:
    """Only requests still in flight delay the guesses behind them."""
    made, (first,) = table_of(silent=1)
    made.guess_at(first, 900.0)
    made.remove(first, 1.0)
    second = made.add(10, 2.0, streamed=False, had_place=True)
    made.guess_at(second, 3.0)
    assert made.next_guess == 3.0


@given(st.lists(st.tuples(st.sampled_from(["start", "aside", "back", "remove"]), st.integers(0, 3)), max_size=20))
def test_what_is_set_aside_counts_for_nothing_in_the_load(moves: list[tuple[str, int]]) -> None:
    """The load is that of a table which has only the other requests; once nothing is left, it is empty."""
    made, flights = table_of(silent=2, streamed=2)
    for move, number in moves:
        flight = flights[number]
        match move:
            case "start" if flight in made.waiting:
                made.start(flight, 1.0, guessed=number < 2)
            case "aside" if flight in made.requests:
                made.set_aside(flight, 1.0)
            case "back" if flight in made.aside:
                made.bring_back(flight, 1.0)
            case "remove" if flight in made.requests or flight in made.aside:
                made.remove(flight, 2.0)
    alone, _ = table_of()
    for flight in made.requests:
        same = alone.add(10, 0.0, streamed=flight.streamed, had_place=True)
        if flight.started:
            alone.start(same, 1.0, guessed=flight.guessed)
    alone.head_since = made.head_since
    for seconds_per_token in (None, 0.5):
        assert (
            made.load(3.0, seconds_per_token, 5.0, 0.0, 0.0)[0] == alone.load(3.0, seconds_per_token, 5.0, 0.0, 0.0)[0]
        )
    assert (made.kv_tokens, made.context_tokens) == (alone.kv_tokens, alone.context_tokens)
    for flight in [*made.requests, *made.aside]:
        made.remove(flight, 4.0)
    assert made.load(5.0, None, 0.0, 0.0, 0.0)[0] == Load()
    assert not made.aside
