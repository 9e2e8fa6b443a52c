"""What a front keeps until a saved state of the scheduler covers it."""

from dataclasses import replace

from router.channel.messages import (
    REPEATED,
    Answered,
    Ask,
    Assignment,
    BeginCall,
    CallEnded,
    PrefillBeside,
    RanBefore,
    TicketId,
    Timeouts,
    WaitedBefore,
)
from router.channel.unsaved_history import UnsavedHistory
from router.core.model.events import Arrived, Fault, Finished, Prefilled, Progressed, Resumed, Returned, Started
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import ClientId, Leg, Request, RequestId, Usage, WorkerId

KEY = PromptHasher(b"0123456789abcdef").prompt(b"Hello").key
WORKER = WorkerId("w")


def request(name: str) -> Request:
    return Request(RequestId(name), ClientId("ann"), "m", (KEY,))


def assignment(name: str) -> Assignment:
    return Assignment(RequestId(name), WORKER, 7, Timeouts())


def test_what_a_state_covers_is_forgotten() -> None:
    """An attempt that ended in a covered message is; one that goes on is kept whole, and so is one that ended later."""
    history = UnsavedHistory()
    for name in "abc":
        history.sent(Arrived(request(name)))
        history.received(assignment(name))
    history.sent(Finished(RequestId("a")))
    covered = history.messages
    history.sent(Started(RequestId("b")))
    history.sent(Progressed({RequestId("b"): 5}))
    history.sent(Finished(RequestId("c")))
    history.saved(covered)
    assert list(history.report()) == [
        RanBefore(RequestId("b"), Resumed(request("b"), WORKER, 7)),
        Started(RequestId("b")),
        Progressed({RequestId("b"): 5}),
        RanBefore(RequestId("c"), Resumed(request("c"), WORKER, 7)),
        Finished(RequestId("c")),
    ]
    history.saved(history.messages)
    assert history.requests == 1


def test_a_request_that_waits_for_a_retry_is_reported_by_what_is_not_covered() -> None:
    """Its lost attempt, or only that it waits, once the state covers the attempt."""
    history = UnsavedHistory()
    returned = Returned(RequestId("a"), accepted=True, fault=Fault.BROKEN)
    history.sent(Arrived(request("a")))
    history.received(assignment("a"))
    history.sent(returned)
    resumed = Resumed(request("a"), WORKER, 7, saved=False)  # no state can hold what it was charged
    assert list(history.report()) == [RanBefore(RequestId("a"), resumed), returned]
    history.saved(history.messages)
    assert list(history.report()) == [WaitedBefore(RequestId("a"), request("a"))]


def test_both_attempts_of_a_prefilled_request_are_reported() -> None:
    """The first ended with its prefill; the second says that it only decodes."""
    history = UnsavedHistory()
    prefilled = Prefilled(RequestId("a"), Usage(10, 1))
    decoding = replace(assignment("a"), leg=Leg.DECODE)
    history.sent(Arrived(request("a")))
    history.received(replace(assignment("a"), leg=Leg.PREFILL))
    history.sent(prefilled)
    assert list(history.report())[1:] == [prefilled]
    history.received(decoding)
    first, *rest = history.report()
    assert first == RanBefore(RequestId("a"), Resumed(request("a"), WORKER, 7, saved=False, leg=Leg.PREFILL))
    assert rest == [
        prefilled,
        RanBefore(RequestId("a"), Resumed(request("a"), WORKER, 7, saved=False, leg=Leg.DECODE)),
    ]


def test_two_attempts_at_once_are_reported_until_each_is_covered() -> None:
    """Both are named, each with its partner; a prefill whose end is covered is left out."""
    history = UnsavedHistory()
    beside = PrefillBeside(WorkerId("p"), 5, Timeouts())
    prefilled = Prefilled(RequestId("a"), Usage(10, 1), decoding=True)
    first = Resumed(request("a"), WorkerId("p"), 5, saved=False, leg=Leg.PREFILL, partner=WORKER)
    second = Resumed(request("a"), WORKER, 0, saved=False, leg=Leg.DECODE, partner=WorkerId("p"))
    history.sent(Arrived(request("a")))
    history.received(replace(assignment("a"), leg=Leg.DECODE, prefill=beside))
    assert list(history.report()) == [RanBefore(RequestId("a"), first), RanBefore(RequestId("a"), second)]
    history.sent(prefilled)
    assert list(history.report()) == [
        RanBefore(RequestId("a"), first),
        RanBefore(RequestId("a"), second),
        prefilled,
    ]
    history.saved(history.messages)
    assert list(history.report()) == [RanBefore(RequestId("a"), replace(second, saved=True))]
    history.sent(Finished(RequestId("a")))
    history.saved(history.messages)
    assert not history.requests


def test_without_saves_only_so_many_ended_requests_are_kept() -> None:
    """The oldest are dropped; live ones never are."""
    history = UnsavedHistory(most_ended=10)
    history.sent(Arrived(request("live")))
    for number in range(100):
        history.sent(Arrived(request(f"{number}")))
        history.received(assignment(f"{number}"))
        history.sent(Finished(RequestId(f"{number}")))
        assert history.requests <= 11
    reported = list(history.report())
    assert reported[0] == Arrived(request("live"))
    assert reported[-1] == Finished(RequestId("99"))


def test_a_call_that_ends_before_its_question_is_answered_is_forgotten() -> None:
    """Whether the answer still comes or not: nobody would end the call in the next run."""
    history, begin = UnsavedHistory(), BeginCall(TicketId(1), ())
    history.sent(Ask(1, begin))
    history.sent(CallEnded(TicketId(1), None))
    assert list(history.report()) == []
    history.received(Answered(1, None))
    assert list(history.report()) == []


def test_an_admitted_call_is_to_be_counted_again() -> None:
    """It is not asked again whether it may begin."""
    history, begin = UnsavedHistory(), BeginCall(TicketId(1), ())
    history.sent(Ask(1, begin))
    assert list(history.report()) == [Ask(1, begin)]
    history.received(Answered(1, None))
    assert list(history.report()) == [Ask(REPEATED, begin)]
