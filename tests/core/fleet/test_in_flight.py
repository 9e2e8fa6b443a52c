"""What is in flight at one worker, and what of it has not started."""

from math import inf

from router.core.fleet.in_flight import InFlightTable
from router.core.model.request import RequestId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def flights(*silent: RequestId, streamed: tuple[RequestId, ...] = ()) -> InFlightTable:
    """These were dispatched at time 0, one after the other, with 10 uncached tokens each."""
    made = InFlightTable()
    for request in (*silent, *streamed):
        made.add(request, 10, 0.0, streamed=request in streamed, had_place=True)
    return made


def test_a_start_takes_tokens_from_those_that_wait_to_those_that_are_held() -> None:
    """And the end of a request takes what it held, with its answer."""
    made = flights(streamed=(A, B))
    assert (len(made), made.unstarted, made.unstarted_tokens, made.kv_tokens) == (2, 2, 20, 0)
    made.start(A, 1.0, guessed=False)
    assert (made.unstarted, made.unstarted_tokens, made.kv_tokens) == (1, 10, 10)
    made.requests[A].output = 7
    made.kv_tokens += 7
    made.remove(A, 9.0)
    made.remove(B, 9.0)
    assert (len(made), made.unstarted, made.unstarted_tokens, made.kv_tokens) == (0, 0, 0, 0)


def test_the_first_of_the_unstarted_is_the_one_that_is_computed() -> None:
    """Its tokens, and since when it is the first."""
    made = flights()
    assert made.head_tokens == 0
    made.add(A, 10, 1.0, streamed=True, had_place=True)
    made.add(B, 20, 2.0, streamed=True, had_place=True)
    assert (made.head_tokens, made.head_since) == (10, 1.0)
    made.start(A, 3.0, guessed=False)
    assert (made.head_tokens, made.head_since) == (20, 3.0)


def test_whole_answers_may_be_guessed_to_have_started_in_the_order_of_their_dispatch() -> None:
    """None before its time, and none before the one that was sent before it."""
    made = flights(A, B)
    assert made.next_guess == inf
    made.guess_at(A, 5.0)
    made.guess_at(B, 3.0)
    assert made.next_guess == 5.0
    assert list(made.guesses(until=4.9)) == []
    assert list(made.guesses(until=5.0)) == [A, B]
    assert made.next_guess == inf


def test_a_later_start_shows_the_earlier_ones() -> None:
    """An engine that takes requests in turn has begun with those before it."""
    made = flights(A, B, streamed=(C,))
    made.guess_at(A, 50.0)
    made.guess_at(B, 60.0)
    assert list(made.guesses(before=made.requests[B].number)) == [A]
    assert list(made.guesses(before=made.requests[C].number)) == [B]


def test_what_is_gone_is_not_guessed() -> None:
    """A whole answer that ended before its guess was due leaves nothing behind."""
    made = flights(A)
    made.guess_at(A, 5.0)
    made.remove(A, 9.0)
    assert list(made.guesses(until=9.0)) == []
    assert made.next_guess == inf


def test_what_was_sent_lately_is_told() -> None:
    """Of what has not started."""
    made = InFlightTable()
    for number, request in enumerate((A, B, C)):
        made.add(request, 10, float(number), streamed=True, had_place=True)
    assert [made.unstarted_since(time) for time in (-1.0, 0.0, 1.5, 2.0)] == [3, 2, 1, 0]
    made.start(C, 3.0, guessed=False)
    assert made.unstarted_since(0.5) == 1


def test_guesses_are_counted_while_they_last() -> None:
    """What was only guessed to have started is known to be no more than that."""
    made = flights(A, B)
    made.start(A, 1.0, guessed=True)
    made.start(B, 1.0, guessed=False)
    assert made.guessed == 1
    made.remove(A, 9.0)
    assert made.guessed == 0


def test_a_start_out_of_turn_leaves_the_first_where_it_is() -> None:
    """It has been computed since it came to be first."""
    made = flights(streamed=(A, B))
    made.start(B, 3.0, guessed=False)
    assert made.head_since == 0.0
    made.start(A, 4.0, guessed=False)
    assert made.head_since == 4.0


def test_a_guess_for_a_call_that_is_gone_delays_no_other() -> None:
    """Only those that are still to come hold up those behind them."""
    made = flights(A)
    made.guess_at(A, 900.0)
    made.remove(A, 1.0)
    made.add(B, 10, 2.0, streamed=False, had_place=True)
    made.guess_at(B, 3.0)
    assert made.next_guess == 3.0
