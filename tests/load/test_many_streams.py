"""`python -m tests.chaos.many_streams`: what it objects to, and a short run of it."""

from pathlib import Path

import pytest

from tests.chaos.many_streams import DONE, Plan, Result, Stream, run
from tests.chaos.paced_engine import event

EVENTS = [event(b"one", number, number, last=number == 3, usage=False) for number in (1, 2, 3)]
STRAYED = event(b"two", 2, 2, last=False, usage=False)


def received(*events: bytes, step: int = 1000) -> Stream:
    """A stream of three events that has received these, in blocks of so many bytes."""
    stream, body = Stream(b"one", 3, status=200), b"".join(events)
    for start in range(0, len(body), step):
        stream.take(body[start : start + step], 10)
    return stream


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_stream_in_order_is_complete(step: int) -> None:
    """However its bytes were cut into blocks; each event's delay is measured from its sending."""
    stream = received(*EVENTS, DONE, step=step)
    assert (stream.objections, stream.delays) == ([], [9, 8, 7])


@pytest.mark.parametrize(
    ("events", "named"),
    [
        (EVENTS[:2], "2 of 3 events"),
        ([EVENTS[0], EVENTS[2], DONE], "event 3 of one in place of 2"),
        ([EVENTS[0], EVENTS[0], *EVENTS[1:], DONE], "event 1 of one in place of 2"),
        ([EVENTS[0], STRAYED, *EVENTS[1:], DONE], "event 2 of two in place of 2"),
        ([*EVENTS, DONE, b"data: "], "3 of 3 events"),
        ([EVENTS[0], b'data: {"error":{}}\n\n'], "an unknown event"),
    ],
)
def test_what_is_lost_repeated_or_strayed_is_a_violation(events: list[bytes], named: str) -> None:
    """Each event that is missing, comes twice or belongs to another stream is named, and so is what is no event."""
    assert any(named in objection for objection in received(*events).objections)


def test_a_wrong_charge_is_a_violation() -> None:
    """By a token, in either direction."""
    for charged, violations in ((3, 0), (2, 1), (4, 1)):
        plan = Plan(streams=1, pace=3.0, seconds=1.0)
        assert len(Result(plan, [received(*EVENTS, DONE)], [], charged, {}, {}, [], 0).objections) == violations


async def test_paced_streams_through_two_fronts_are_whole(tmp_path: Path) -> None:
    """Each is complete, in order and charged exactly, whichever front has it."""
    result = await run(Plan(streams=60, pace=20.0, seconds=3.0, direct=5), tmp_path)
    assert result.objections == []
    assert len(result.routed) == 60
    assert len(result.direct) == 5
    assert sum(result.calls.values()) > 0


def test_a_refused_call_has_lost_nothing() -> None:
    """It is made again, and its stream counts from its beginning."""
    stream = Stream(b"one", 3, status=429)
    stream.take(b'{"error":{}}', 10)
    stream.refuse()
    stream.status = 200
    stream.take(b"".join(EVENTS) + DONE, 10)
    assert (stream.objections, stream.refusals) == ([], 1)
