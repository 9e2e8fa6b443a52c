"""The router survives faults of all kinds at once and its own death: the short form of `make chaos`."""

import asyncio
import gc
import socket
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import orjson
import pytest

from tests.chaos.asks import Ask, Asks
from tests.chaos.clients import Outcome
from tests.chaos.evidence import Evidence
from tests.chaos.faults import AWAY, Fault, Kind, last_end, schedule
from tests.chaos.judge import fairness_objections, judge, objections
from tests.chaos.link import Link
from tests.chaos.reading import Ending, Reading, Verdict
from tests.chaos.restart import Books, Load, differences, restart
from tests.chaos.run import Plan, run
from tests.chaos.service import Sample, windows
from tests.support.running import TIMEOUT_S, until

SHORT = Plan(trouble=14.0, calm=6.0, every=1.0, speed=0.15, patience=5.0)
"""Half a minute; its patience is that of a machine that others use too."""


async def test_nothing_is_lost(tmp_path: Path) -> None:
    """Each call gets the right bytes or an error that a fault explains, and the router holds nothing after the last
    call.
    """
    result = await run(SHORT, tmp_path)
    assert not result.objections, "\n".join(result.objections)
    assert result.judgement.amid.of > 0
    assert result.judgement.endings[Ending.COMPLETE] > 100


async def test_a_router_that_is_killed_comes_back(tmp_path: Path) -> None:
    """A restarted router has its books as of the last save, and the workers have no work left from the killed one."""
    seen = await restart(Load(seconds=2.0, interval=0.5, speed=0.5), tmp_path)
    assert not seen.objections, "\n".join(seen.objections)
    assert seen.clients >= 20


@pytest.mark.parametrize("order", ["accepted before", "accepted after", "served before"])
async def test_a_worker_that_goes_away_leaves_no_connection_open(order: str) -> None:
    """A connection is closed also if it was accepted in the turn of the event loop in which the worker goes away."""
    loop = asyncio.get_running_loop()
    link = Link(0, Evidence(), Random(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what other tests have left is not this one's
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        link.listen(target=9)
        with socket.create_connection(("127.0.0.1", link.port)) as client:
            client.setblocking(False)
            if order == "served before":
                await until(lambda: link.connections == 1)
            if order == "accepted after":
                link.refuse()
            else:  # timers run after what the selector has found, in the same turn
                loop.call_later(0, link.refuse)
            with suppress(ConnectionResetError):
                async with asyncio.timeout(TIMEOUT_S):
                    assert await loop.sock_recv(client, 1) == b""
        link.close()
        gc.collect()
    assert not caught, [str(each.message) for each in caught]


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_is_a_schedule(seed: int) -> None:
    """A seed always gives the same schedule: every kind of fault is in it, no worker has two at a time, and half of
    the workers always work.
    """
    faults = schedule(seed, 60.0, 8, 0.5, 6.0)
    assert faults == schedule(seed, 60.0, 8, 0.5, 6.0) != schedule(seed + 1, 60.0, 8, 0.5, 6.0)
    assert {fault.kind for fault in faults} == set(Kind)
    assert last_end(faults) <= 60.0
    for fault in faults:
        others = [other for other in faults if other is not fault and other.at <= fault.at < other.until]
        assert fault.worker not in {other.worker for other in others}
        assert sum(each.kind in AWAY for each in [*others, fault]) <= 4 or fault.kind not in AWAY


def chunks(ask: Ask) -> list[dict[str, object]]:
    """Return a streamed answer as an engine sends it."""
    head = {"id": "a", "object": "chat.completion.chunk"}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    said = {"index": 0, "delta": {"content": ask.texts[0]}, "finish_reason": ask.reasons[0]}
    return [{**head, "choices": [role]}, {**head, "choices": [said]}]


def stream(*events: object) -> bytes:
    return b"".join([b"data: " + orjson.dumps(each) + b"\n\n" for each in events])


def asked() -> Ask:
    """Return a streamed chat with one choice and without usage."""
    asks = Asks("ann", Random(1), shared=False)
    wanted = (ask for _ in range(100) if (ask := asks.next()).chat and ask.continuable and not ask.usage_wanted)
    return next(wanted)


DONE = b"data: [DONE]\n\n"
ERROR = {"error": {"message": "It died.", "type": "server_error", "param": None, "code": "worker_broke"}}


def verdict_on(body: bytes, status: int = 200) -> Verdict:
    reading = Reading(asked(), status)
    reading.feed(body)
    return reading.verdict()


def test_an_answer_is_read_to_the_last_byte() -> None:
    """The expected answer is complete, an error is an error, and an answer that lacks, repeats or adds anything is
    wrong.
    """
    role, said = chunks(asked())
    whole = stream(role, said) + DONE
    assert verdict_on(whole) == Verdict(Ending.COMPLETE)
    assert verdict_on(b": waiting\n\n" + whole) == Verdict(Ending.COMPLETE)
    assert verdict_on(stream(role, ERROR) + DONE) == Verdict(Ending.ERROR, "200 worker_broke")
    assert verdict_on(orjson.dumps(ERROR), 502) == Verdict(Ending.ERROR, "502 worker_broke")
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    for wrong in (
        *(whole[:-1], whole + DONE, stream(role, said), stream(said) + DONE, stream(role) + DONE, b""),
        *(stream(role, role, said) + DONE, stream(role, said, said) + DONE, stream(ERROR), b"\xff\n\n" + whole),
        *(stream(role, {**said, "id": "b"}) + DONE, stream(role, {**said, "usage": usage}) + DONE),
        *(stream(role, 7, said) + DONE, stream(role, said, {"choices": [7]}) + DONE, stream({"error": {}}) + DONE),
    ):
        assert verdict_on(wrong).ending is Ending.WRONG, wrong
    assert verdict_on(b"<html>", 502).ending is Ending.WRONG
    assert verdict_on(orjson.dumps(ERROR), 404).ending is Ending.WRONG


def test_the_judge_wants_an_explanation() -> None:
    """An error must have met a fault, wrong bytes are never excused, and nearly all of the streams that were cut
    must be completed.
    """
    good = Outcome(asked(), "good", 0.0, 1.0, Verdict(Ending.COMPLETE))
    bad = replace(good, request="bad", verdict=Verdict(Ending.ERROR, "502 worker_broke"))
    wrong = replace(good, request="wrong", verdict=Verdict(Ending.WRONG, "cut off"))
    evidence = Evidence()
    evidence.add("good", 0, Kind.KILL, begun=True)
    assert objections(judge([good], evidence)) == []
    assert len(objections(judge([good, bad], evidence))) == 1
    evidence.add("bad", 0, Kind.SLOW, begun=False)
    assert len(objections(judge([good, bad], evidence))) == 1, "by that nothing fails"
    evidence.add("bad", 0, Kind.RESET, begun=False)
    assert objections(judge([good, bad], evidence)) == []
    assert len(objections(judge([good, wrong], evidence))) == 1
    evidence.add("bad", 1, Kind.KILL, begun=True)
    assert len(objections(judge([good, bad], evidence))) == 1
    assert str(judge([good, bad], evidence).amid) == "1 of 2 (50.00%)"
    evidence.add("bad", 2, Kind.RESET, begun=False)
    assert objections(judge([good, bad], evidence)) == [], "there was no try left"
    refused = replace(good, request="other", verdict=Verdict(Ending.ERROR, "502 worker_unreachable"))
    assert len(objections(judge([refused], evidence, [Fault(2.0, 3.0, 0, Kind.KILL)]))) == 1
    assert objections(judge([refused], evidence, [Fault(0.5, 3.0, 0, Kind.KILL)])) == []


def test_service_is_compared_among_those_that_waited() -> None:
    """Fairness is measured in windows that begin after the last fault, among clients that had requests waiting all
    the time.
    """
    samples = [
        Sample(float(at), {"a": 10.0 * at, "b": 10.0 * at, "c": 0.0}, {"a": 1, "b": 2, "c": int(at != 7)})
        for at in range(12)
    ]
    assert [(each.end, each.clients) for each in windows(samples, 2.0)] == [(at, 2) for at in (7, 8, 9, 10, 11)]
    assert fairness_objections(windows(samples, 2.0), 2.0) == []
    one_has_all = [sample._replace(service={"a": sample.at, "b": 0.0, "c": 0.0}) for sample in samples]
    assert fairness_objections(windows(one_has_all, 2.0), 2.0)
    assert fairness_objections([], 2.0)


def test_books_are_compared_with_those_at_the_save() -> None:
    """Service after the last save is forgotten; service before it is kept."""
    books = [Books(float(at), {"a": 10.0 * at}, {"a": -50.0 * at}) for at in range(60)]
    assert not differences(books, 20.5, 20.9, Books(99.0, {"a": 205.0}, {"a": -1025.0}))
    assert differences(books, 20.5, 20.9, Books(99.0, {"a": 169.0}, {"a": -1025.0}))
    assert differences(books, 20.5, 20.9, Books(99.0, {"a": 231.0}, {"a": -1025.0}))
    assert differences(books, 20.5, 20.9, Books(99.0, {"a": 205.0}, {"a": 0.0}))
    assert differences(books, 20.5, 20.9, Books(99.0, {}, {}))
