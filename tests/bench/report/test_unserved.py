"""How long a client's calls waited while the client got no token."""

from collections.abc import Sequence

import pytest

from bench.report.records import Record
from bench.report.unserved import longest_unserved, never_served
from bench.workloads.parts.traffic import Outcome

END = 100.0


def call(arrived: float, started: float | None = None, finished: float | None = None, client: str = "c") -> Record:
    outcome = Outcome.UNFINISHED if finished is None else Outcome.DONE
    return Record("r", client, outcome, arrived, None, started, finished, None, None, 1, None, None, 1)


@pytest.mark.parametrize(
    ("calls", "longest"),
    [
        ([call(1.0, 4.0, 9.0)], 3.0),
        # While its stream runs, a client is not unserved; the wait begins when the stream ends.
        ([call(0.0, 1.0, 20.0), call(2.0, 25.0, 26.0)], 5.0),
        # The calls follow each other: each wait counts separately.
        ([call(0.0, 4.0, 5.0), call(5.0, 8.0, 9.0)], 4.0),
        # Of two that overlap, the second is served first: 12 s until then, and 17 s after its end.
        ([call(0.0, 30.0, 31.0), call(10.0, 12.0, 13.0)], 17.0),
        ([call(40.0)], 60.0),
        # A call that does not stream waits until its answer.
        ([call(10.0, None, 25.0)], 15.0),
        # Events after the end of the measured time do not count.
        ([call(90.0, 120.0, 130.0)], 10.0),
    ],
)
def test_a_client_is_unserved_while_calls_wait_and_none_is_answered(calls: Sequence[Record], longest: float) -> None:
    """The time lasts from a call's arrival, or the end of the last answer, to the next first token of any of its
    calls.
    """
    assert longest_unserved(calls, END) == {"c": longest}


def test_clients_are_counted_separately() -> None:
    """Another client's tokens do not end a client's unserved time."""
    calls = [call(0.0, 1.0, 90.0, "served"), call(0.0, 50.0, 51.0, "waiting")]
    assert longest_unserved(calls, END) == {"served": 1.0, "waiting": 50.0}


def test_a_client_without_a_token_is_counted_once() -> None:
    """The number of its calls does not matter, and an answer that did not stream counts as served."""
    calls = [call(0.0, client="a"), call(1.0, client="a"), call(0.0, 1.0, client="b"), call(0.0, None, 9.0, "c")]
    assert never_served(calls) == 1
