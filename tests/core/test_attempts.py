"""A request has one record per attempt: what each book keeps of the request's visit to a worker."""

import pytest

from router.core.fleet.window import FixedWindow
from router.core.model.events import Fault, Returned
from router.core.model.request import ClientId, RequestId
from router.core.model.saved import DailyUsage
from router.core.requests import Attempt
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, MODEL, Scene

POLICIES = ("dlpm_home", "d2lpm", "rr+fcfs")
TWO_AT_A_TIME = SchedulerSettings(window=FixedWindow(requests=2))


def scene(policy: str = "rr+fcfs") -> Scene:
    return Scene(policy, workers=("w1", "w2"), settings=TWO_AT_A_TIME)


def give_back(talk: Scene, request: RequestId, fault: Fault = Fault.ERROR) -> Attempt:
    """Let the worker return a request. Returns the attempt that this ends."""
    ended = talk.scheduler.attempts[request]
    talk.feed(Returned(request, accepted=True, fault=fault))
    return ended


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retry_is_a_second_attempt(policy: str) -> None:
    """The second attempt is at another worker and shares no record with the first one."""
    talk = scene(policy)
    request = talk.arrive("ada", "document")
    first = give_back(talk, request)
    second = talk.scheduler.attempts[request]
    assert second.worker is not first.worker
    for mine, theirs in zip(
        (second.bill, second.run, second.flight), (first.bill, first.run, first.flight), strict=True
    ):
        assert mine is not theirs


def test_attempts_are_one_call_of_usage() -> None:
    """What a retry computes again is no usage; without a usage of the first attempt, its input is an estimate."""
    talk = scene()
    request = talk.arrive("ada", "document", limit=20)
    talk.progress(request, 5)
    give_back(talk, request)
    talk.finish(request, output=9)
    size = 8 * CHUNK_TOKENS
    ((_, rows),) = talk.scheduler.ledger.usage.days()
    assert rows == [DailyUsage(0, ClientId("ada"), MODEL, 1, size, 0, 9, size, 5)]


@pytest.mark.parametrize(("found", "counted"), [(0, 0), (3, 3), (8, 4)])
def test_what_several_answers_found_beyond_the_prediction_is_no_usage(found: int, counted: int) -> None:
    """Answers find each other's prompt in the cache. Where the engine says more than was predicted, the prediction
    counts, as an estimate.
    """
    talk = Scene("rr+fcfs")
    talk.serve(talk.arrive("ada", "docu"))
    request = talk.arrive("bob", "document", answers=2)
    assert talk.dispatched[request].cached_tokens == 4 * CHUNK_TOKENS
    talk.finish(request, output=9, cached=found * CHUNK_TOKENS)
    size = 8 * CHUNK_TOKENS
    (row,) = talk.scheduler.ledger.usage.rows_of(ClientId("bob"))
    assert (row.input_tokens, row.cached_tokens) == (size, counted * CHUNK_TOKENS)
    assert row.estimated_input == (size if found > counted else 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_ended_attempt_is_in_no_book(policy: str) -> None:
    """An ended attempt leaves no bill, no pin and no share of the load behind, although its request goes on."""
    talk = scene(policy)
    first = give_back(talk, talk.arrive("ada", "document"))
    assert first.bill not in list(talk.scheduler.ledger.bills)
    assert first.run not in first.run.cache.runs
    assert first.flight not in first.worker.running


def test_a_request_without_a_worker_has_no_attempt() -> None:
    """A request has no attempt before its dispatch, while it waits for a retry, and after its end."""
    talk = scene()
    *busy, waiting = [talk.arrive("ada", letter * 3) for letter in "abcde"]
    assert waiting not in talk.scheduler.attempts
    give_back(talk, busy[0])  # the other worker is full
    assert talk.scheduler.attempts.keys() == {*busy[1:], waiting}
    talk.serve(busy[1])
    assert busy[1] not in talk.scheduler.attempts
