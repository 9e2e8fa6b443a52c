"""The lifecycle of a request, played event by event: what it costs, how it ends, and what it leaves in the cache."""

from dataclasses import replace
from math import ceil

import pytest

from router.core.clients.queue_limits import LONGEST_RETRY, WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Refusal, Reject, WakeAt
from router.core.model.cost import Tokens
from router.core.model.events import Arrived, Failed, Fault, Finished, Started, Ticked
from router.core.model.request import RequestId, WorkerId
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene

FEW_MAY_WAIT = SchedulerSettings(window=FixedWindow(requests=1), waiting=WaitingLimits(requests=2, time_to_live=10.0))


def scene(settings: SchedulerSettings | None = None, workers: tuple[str, ...] = ("w1",)) -> Scene:
    return Scene("d2lpm", workers=workers, settings=settings)


# What a request costs


def test_input_is_reserved_at_dispatch_and_output_charged_as_it_streams() -> None:
    """Extend tokens are charged once, output tokens twice, each as soon as they are known."""
    talk = scene()
    answer = talk.arrive("ada", "document?", limit=100)
    assert talk.charged("ada") == 9 * CHUNK_TOKENS
    talk.start(answer)
    assert talk.charged("ada") == 9 * CHUNK_TOKENS
    talk.progress(answer, 10)
    assert talk.charged("ada") == 9 * CHUNK_TOKENS + 2 * 10
    talk.finish(answer, output=12)
    assert talk.charged("ada") == 9 * CHUNK_TOKENS + 2 * 12


def test_nothing_is_charged_while_a_request_waits() -> None:
    """A request that was never dispatched has cost its client nothing."""
    talk = scene(ONE_AT_A_TIME)
    talk.arrive("ada", "one")
    talk.cancel(talk.arrive("bob", "two"))
    assert list(talk.scheduler.ledger.accounts) == ["ada"]


def test_the_engines_usage_replaces_the_prediction() -> None:
    """Tokens that were not cached after all are charged in full, and further cached ones are given back."""
    talk = scene()
    talk.finish(talk.arrive("ada", "document"))
    wrong = talk.arrive("ada", "document?")
    talk.finish(wrong, cached=0)
    assert talk.charged("ada") == (8 + 9) * CHUNK_TOKENS
    talk.finish(talk.arrive("bob", "other text"), cached=6 * CHUNK_TOKENS)
    assert talk.charged("bob") == 4 * CHUNK_TOKENS


@pytest.mark.parametrize("output", [None, 7])
def test_a_client_that_leaves_pays_for_what_was_computed(output: int | None) -> None:
    """It pays for what streamed until then, or what the engine reports, and nothing is left in any count."""
    talk = scene()
    running = talk.arrive("ada", "document", limit=100)
    talk.progress(running, 5)
    talk.cancel(running, output)
    assert talk.charged("ada") == 8 * CHUNK_TOKENS + 2 * (output or 5)
    assert talk.scheduler.live == 0
    assert talk.scheduler.cluster[talk.worker_of(running)].load.requests == 0


def test_a_refused_call_is_refunded_and_a_broken_one_is_not() -> None:
    """Before the engine accepted the call nothing was computed; later something was."""
    talk = scene()
    refused, broken = talk.arrive("ada", "document"), talk.arrive("bob", "another")
    talk.refuse(refused)
    talk.fail(broken)
    assert talk.charged("ada") == 0
    assert talk.deficit("ada").order == 20_000
    assert talk.charged("bob") == 7 * CHUNK_TOKENS
    assert talk.scheduler.live == 0


def test_uncharged_cached_tokens_are_limited_per_client() -> None:
    """Above the limit a match is charged as if nothing were cached; the usage gives it back at the end."""
    talk = scene(SchedulerSettings(cached_in_flight=10 * CHUNK_TOKENS))
    talk.serve(talk.arrive("bob", "document"))
    first, second = talk.arrive("ada", "document1"), talk.arrive("ada", "document2")
    assert [talk.dispatched[request].cached_tokens for request in (first, second)] == [8 * CHUNK_TOKENS] * 2
    assert talk.charged("ada") == (1 + 7) * CHUNK_TOKENS
    talk.finish(second, cached=8 * CHUNK_TOKENS)
    assert talk.charged("ada") == (1 + 1) * CHUNK_TOKENS
    talk.finish(first, cached=8 * CHUNK_TOKENS)
    talk.arrive("ada", "document3")
    assert talk.charged("ada") == 3 * CHUNK_TOKENS


def test_service_counts_from_the_first_token() -> None:
    """Until then the input is only reserved, and is no service to compare with another client's."""
    talk = scene()
    running = talk.arrive("ada", "document")
    account = talk.scheduler.ledger.accounts[talk.requests[running].client]
    assert (account.served, account.reserved) == (Tokens(), Tokens(8 * CHUNK_TOKENS))
    talk.progress(running, 1)
    assert (account.served, account.reserved) == (Tokens(8 * CHUNK_TOKENS, 0, 1), Tokens())


def test_a_settlement_is_service() -> None:
    """What the usage adds to the streamed tokens, or takes from them, counts in the service gap to waiting clients."""
    talk = scene(ONE_AT_A_TIME)
    running = talk.arrive("ada", "document", limit=50)
    for client in ("ada", "bob", "ada", "bob"):
        talk.arrive(client, "else")
    talk.progress(running, 10)
    assert talk.scheduler.fairness.gap(WorkerId("w1")) == 8 * CHUNK_TOKENS + 2 * 10
    talk.finish(running, output=50, cached=3 * CHUNK_TOKENS)
    assert talk.scheduler.fairness.gap(WorkerId("w1")) == 5 * CHUNK_TOKENS + 2 * 50


# What a request leaves in the cache


def test_a_prompt_is_matched_from_its_dispatch() -> None:
    """The next request of a burst can follow its prefix before the first has ended."""
    talk = scene(workers=("w1", "w2"))
    first, second = talk.arrive("ada", "document1"), talk.arrive("bob", "document2")
    assert talk.worker_of(first) == talk.worker_of(second)
    assert talk.dispatched[second].cached_tokens == 8 * CHUNK_TOKENS


def test_the_next_turn_matches_the_answer_too() -> None:
    """The next prompt begins with prompt and answer, and both are cached."""
    talk = scene(workers=("w1", "w2"))
    turn = talk.arrive("ada", "question")
    talk.serve(turn, output=3 * CHUNK_TOKENS, answer="question+answer")
    following = talk.arrive("ada", "question+answer+more")
    assert talk.dispatched[following].cached_tokens == len("question+answer") * CHUNK_TOKENS
    assert talk.worker_of(following) == talk.worker_of(turn)


def test_a_worker_that_left_holds_nothing() -> None:
    """Neither what it had nor what ends there later; if it comes back, its cache is empty."""
    talk = scene()
    running, last = talk.arrive("ada", "question"), talk.arrive("ada", "else")
    talk.leave("w1")
    talk.finish(running, answer="question+answer")
    talk.join("w1")
    talk.finish(last)
    assert talk.dispatched[talk.arrive("ada", "question+answer+more")].cached_tokens == 0


def test_the_believed_cache_fits_the_capacity() -> None:
    """A worker of known capacity loses its stalest prefixes as new ones come."""
    talk = scene(SchedulerSettings(kv_tokens=10 * CHUNK_TOKENS))
    for prompt in ("document", "another"):
        talk.serve(talk.arrive("ada", prompt))
    assert talk.dispatched[talk.arrive("ada", "another!")].cached_tokens == 7 * CHUNK_TOKENS
    assert talk.dispatched[talk.arrive("ada", "document!")].cached_tokens == 2 * CHUNK_TOKENS


# How a request ends


def test_a_request_for_an_unserved_model_is_rejected() -> None:
    """It is rejected at once, without a retry time."""
    talk = scene()
    request = talk.arrive("ada", "document", model="unheard of")
    assert talk.refusals == {request: Refusal.NO_WORKER}
    assert talk.scheduler.live == 0


def test_requests_beyond_the_queue_limit_are_rejected() -> None:
    """Requests in flight do not count as waiting."""
    talk = scene(FEW_MAY_WAIT)
    requests = [talk.arrive("ada", "document") for _ in range(4)]
    assert talk.refusals == {requests[3]: Refusal.QUEUE_FULL}
    talk.finish(requests[0])
    assert talk.arrive("ada", "document") not in talk.refusals


def test_a_full_queue_keeps_no_worker_idle() -> None:
    """A request that can be dispatched at once is, however many wait for another worker."""
    talk = scene(FEW_MAY_WAIT)
    talk.join("w2", "mistral")
    for _ in range(4):
        talk.arrive("ada", "document")
    assert talk.arrive("bob", "hello", model="mistral") in talk.dispatched


def test_a_request_that_waited_too_long_is_rejected() -> None:
    """Its deadline is the next wake-up; the rejection says when to retry."""
    talk = scene(FEW_MAY_WAIT)
    running = talk.arrive("ada", "one")
    talk.now = 3.0
    late = talk.arrive("ada", "two")
    talk.now = 5.0
    later = talk.arrive("ada", "six")
    assert talk.wake_at == 13.0
    talk.now = 13.0
    assert talk.feed(Ticked()) == [Reject(late, Refusal.EXPIRED, 13.0), WakeAt(15.0)]
    talk.now = 15.0
    assert talk.feed(Ticked()) == [Reject(later, Refusal.EXPIRED, 1.0)]
    assert talk.scheduler.live == 1
    talk.finish(running)


def test_a_wake_up_is_set_once_and_again_if_it_came_too_early() -> None:
    """A `WakeAt` replaces the previous one, so it is not repeated; a needless `Ticked` sets it anew."""
    talk = scene(FEW_MAY_WAIT)
    talk.arrive("ada", "one")
    waits = talk.arrive("ada", "two")
    assert talk.feed(Started(talk.order[0])) == []
    talk.now = 2.0
    assert talk.feed(Ticked()) == [WakeAt(10.0)]
    talk.cancel(waits)
    talk.now = 10.0
    assert talk.feed(Ticked()) == []


def test_an_id_in_use_is_an_error_and_changes_nothing() -> None:
    """Front ends choose the ids; the id of an ended request may be used again."""
    talk = scene()
    request = talk.arrive("ada", "document")
    with pytest.raises(ValueError, match=request):
        talk.feed(Arrived(talk.requests[request]))
    assert talk.scheduler.live == 1
    talk.refuse(request)
    talk.feed(Arrived(talk.requests[request]))
    assert talk.scheduler.live == 1


def test_late_events_change_nothing() -> None:
    """An event about an ended or unknown request is ignored."""
    talk = scene()
    running = talk.arrive("ada", "document")
    talk.cancel(running)
    charged = talk.charged("ada")
    for request in (running, RequestId("nobody")):
        talk.start(request)
        talk.progress(request, 50)
        talk.feed(Finished(request))
        talk.refuse(request)
        talk.cancel(request)
    assert talk.charged("ada") == charged


def test_requests_at_a_worker_that_left_run_to_their_end() -> None:
    """They are charged to their end; the worker is forgotten with the last of them."""
    talk = scene()
    running = talk.arrive("ada", "document", limit=9)
    talk.leave("w1")
    talk.progress(running, 5)
    assert talk.charged("ada") == 8 * CHUNK_TOKENS + 2 * 5
    talk.finish(running, output=9)
    assert talk.charged("ada") == 8 * CHUNK_TOKENS + 2 * 9
    assert list(talk.scheduler.cluster) == []


def test_a_worker_that_comes_back_in_time_takes_new_requests_beside_the_old() -> None:
    """Requests that still run there fill its window, and end as if the worker had stayed."""
    talk = scene(ONE_AT_A_TIME)
    running = talk.arrive("ada", "one")
    talk.leave("w1")
    talk.join("w1")
    waits = talk.arrive("bob", "two")
    assert waits not in talk.dispatched
    talk.finish(running)
    assert waits in talk.dispatched
    talk.finish(waits)
    assert talk.scheduler.live == 0


# How much goes at once


def test_unstarted_requests_fill_the_window() -> None:
    """Uncached tokens count until the first output token; then the next request goes."""
    talk = scene(SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=10 * CHUNK_TOKENS)))
    first, second, third = (talk.arrive("ada", prompt) for prompt in ("six---", "four", "1"))
    assert talk.order == [first, second]
    talk.start(second)
    assert talk.order == [first, second, third]


def test_a_request_larger_than_the_window_goes_alone() -> None:
    """It waits until no request there is unstarted, and then need not fit."""
    talk = scene(SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=4 * CHUNK_TOKENS)))
    small, large = talk.arrive("ada", "1"), talk.arrive("ada", "large prompt")
    assert talk.order == [small]
    talk.start(small)
    assert talk.order == [small, large]


def test_the_retry_time_follows_from_the_measured_rate() -> None:
    """Before a rate is known the client is asked to retry late; later, when its queue should have drained."""
    talk = scene(FEW_MAY_WAIT)
    for prompt in ("one", "two", "six"):
        talk.arrive("ada", prompt)
    surplus = replace(talk.requests[talk.order[0]], id=RequestId("surplus"))
    assert talk.feed(Arrived(surplus)) == [Reject(surplus.id, Refusal.QUEUE_FULL, LONGEST_RETRY)]
    talk.now = 6.0
    talk.finish(talk.order[0])
    talk.now = 9.0
    talk.arrive("ada", "ten")
    assert talk.feed(Arrived(surplus)) == [Reject(surplus.id, Refusal.QUEUE_FULL, ceil(2 / (2 / 9)))]


# Too much


def test_a_flood_costs_the_flooder() -> None:
    """In a full queue a client with fewer requests displaces the newest one of the client with most, at no charge."""
    talk = scene(FEW_MAY_WAIT)
    flood = [talk.arrive("flood", "document") for _ in range(3)]
    light = talk.arrive("light", "prompt")
    assert talk.refusals == {flood[2]: Refusal.DISPLACED}
    talk.serve_all()
    assert set(talk.order) == {*flood[:2], light}
    assert (talk.scheduler.live, talk.scheduler.waiting) == (0, 0)
    assert talk.scheduler.ledger.accounts.keys() == {"flood", "light"}


def test_an_arrival_is_dispatched_with_the_last_queued_request() -> None:
    """Time alone made room for both, and no wake-up has come yet."""
    talk = Scene("pooled_fcfs")
    talk.feed(Failed(talk.arrive("ada", "one"), accepted=False, fault=Fault.FULL))
    waits = talk.arrive("ada", "two")
    assert talk.scheduler.waiting == 1
    talk.now += 10
    newcomer = talk.arrive("bob", "three")
    assert talk.order[1:] == [waits, newcomer]


def test_a_request_behind_a_displaced_head_goes_at_once() -> None:
    """The head of a queue did not fit, and is displaced by an arrival that fits."""
    window, waiting = FixedWindow(requests=9, unstarted_tokens=4 * CHUNK_TOKENS), WaitingLimits(requests=1)
    talk = Scene("pooled_fcfs", settings=SchedulerSettings(window=window, waiting=waiting))
    first, head = (talk.arrive("ada", prompt, weight=0.5) for prompt in ("one", "large"))
    newcomer = talk.arrive("bob", "1")
    assert talk.refusals == {head: Refusal.DISPLACED}
    assert talk.order == [first, newcomer]


def test_a_displaced_request_has_ended() -> None:
    """Later events about it, from its client or the clock, change nothing."""
    talk = scene(FEW_MAY_WAIT)
    flood = [talk.arrive("flood", "document") for _ in range(3)]
    talk.arrive("light", "prompt")
    talk.cancel(flood[2])
    talk.wait(1000)
    assert talk.scheduler.waiting == 0
    assert list(talk.refusals.values()).count(Refusal.EXPIRED) == 2
