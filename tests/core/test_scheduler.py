"""The lifecycle of a request, event by event: what it costs, how it ends, and what it leaves in the cache."""

import pickle
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


def new_scene(settings: SchedulerSettings | None = None, workers: tuple[str, ...] = ("w1",)) -> Scene:
    return Scene("d2lpm", workers=workers, settings=settings)


# What a request costs


def test_input_is_reserved_at_dispatch_and_output_charged_as_it_streams() -> None:
    """Extend tokens are charged once, output tokens twice, each as soon as they are known."""
    scene = new_scene()
    answer = scene.arrive("ada", "document?", limit=100)
    assert scene.charged("ada") == 9 * CHUNK_TOKENS
    scene.start(answer)
    assert scene.charged("ada") == 9 * CHUNK_TOKENS
    scene.progress(answer, 10)
    assert scene.charged("ada") == 9 * CHUNK_TOKENS + 2 * 10
    scene.finish(answer, output=12)
    assert scene.charged("ada") == 9 * CHUNK_TOKENS + 2 * 12


def test_nothing_is_charged_while_a_request_waits() -> None:
    """A request that was never dispatched has cost its client nothing."""
    scene = new_scene(ONE_AT_A_TIME)
    scene.arrive("ada", "one")
    scene.cancel(scene.arrive("bob", "two"))
    assert list(scene.scheduler.ledger.accounts) == ["ada"]


def test_the_engines_usage_replaces_the_prediction() -> None:
    """Tokens that were not cached after all are charged in full, and tokens that were cached
    unexpectedly are refunded.
    """
    scene = new_scene()
    scene.finish(scene.arrive("ada", "document"))
    wrong = scene.arrive("ada", "document?")
    scene.finish(wrong, cached=0)
    assert scene.charged("ada") == (8 + 9) * CHUNK_TOKENS
    scene.finish(scene.arrive("bob", "other text"), cached=6 * CHUNK_TOKENS)
    assert scene.charged("bob") == 4 * CHUNK_TOKENS


@pytest.mark.parametrize("output", [None, 7])
def test_a_client_that_leaves_pays_for_what_was_computed(output: int | None) -> None:
    """The charge is what streamed until then, or what the engine reports, and nothing is left in any count."""
    scene = new_scene()
    running = scene.arrive("ada", "document", limit=100)
    scene.progress(running, 5)
    scene.cancel(running, output)
    assert scene.charged("ada") == 8 * CHUNK_TOKENS + 2 * (output or 5)
    assert scene.scheduler.live == 0
    assert scene.scheduler.fleet[scene.worker_of(running)].load.requests == 0


def test_a_refused_call_is_refunded_and_a_broken_one_is_not() -> None:
    """Nothing was computed before the engine accepted the call; after that, something was, and it is charged."""
    scene = new_scene()
    refused, broken = scene.arrive("ada", "document"), scene.arrive("bob", "another")
    scene.refuse(refused)
    scene.fail(broken)
    assert scene.charged("ada") == 0
    assert scene.deficit("ada").order == 20_000
    assert scene.charged("bob") == 7 * CHUNK_TOKENS
    assert scene.scheduler.live == 0


def test_uncharged_cached_tokens_are_limited_per_client() -> None:
    """Beyond the limit a match is charged as if nothing were cached, and the usage at the end refunds it."""
    scene = new_scene(SchedulerSettings(cached_in_flight=10 * CHUNK_TOKENS))
    scene.serve(scene.arrive("bob", "document"))
    first, second = scene.arrive("ada", "document1"), scene.arrive("ada", "document2")
    assert [scene.dispatched[request].cached_tokens for request in (first, second)] == [8 * CHUNK_TOKENS] * 2
    assert scene.charged("ada") == (1 + 7) * CHUNK_TOKENS
    scene.finish(second, cached=8 * CHUNK_TOKENS)
    assert scene.charged("ada") == (1 + 1) * CHUNK_TOKENS
    scene.finish(first, cached=8 * CHUNK_TOKENS)
    scene.arrive("ada", "document3")
    assert scene.charged("ada") == 3 * CHUNK_TOKENS


def test_service_counts_from_the_first_token() -> None:
    """Until the first token the input is only reserved and counts as no service when clients are compared."""
    scene = new_scene()
    running = scene.arrive("ada", "document")
    account = scene.scheduler.ledger.accounts[scene.requests[running].client]
    assert (account.served, account.reserved) == (Tokens(), Tokens(8 * CHUNK_TOKENS))
    scene.progress(running, 1)
    assert (account.served, account.reserved) == (Tokens(8 * CHUNK_TOKENS, 0, 1), Tokens())


def test_a_settlement_is_service() -> None:
    """Tokens that the usage adds to the streamed ones, or takes from them, count in the service gap to
    waiting clients.
    """
    scene = new_scene(ONE_AT_A_TIME)
    running = scene.arrive("ada", "document", limit=50)
    for client in ("ada", "bob", "ada", "bob"):
        scene.arrive(client, "else")
    scene.progress(running, 10)
    assert scene.scheduler.fairness.gap(WorkerId("w1")) == 8 * CHUNK_TOKENS + 2 * 10
    scene.finish(running, output=50, cached=3 * CHUNK_TOKENS)
    assert scene.scheduler.fairness.gap(WorkerId("w1")) == 5 * CHUNK_TOKENS + 2 * 50


# What a request leaves in the cache


def test_a_prompt_is_matched_from_its_dispatch() -> None:
    """The next request of a burst can follow its prefix before the first has ended."""
    scene = new_scene(workers=("w1", "w2"))
    first, second = scene.arrive("ada", "document1"), scene.arrive("bob", "document2")
    assert scene.worker_of(first) == scene.worker_of(second)
    assert scene.dispatched[second].cached_tokens == 8 * CHUNK_TOKENS


def test_the_next_turn_matches_the_answer_too() -> None:
    """The next prompt begins with prompt and answer, and both are cached."""
    scene = new_scene(workers=("w1", "w2"))
    turn = scene.arrive("ada", "question")
    scene.serve(turn, output=3 * CHUNK_TOKENS, answer="question+answer")
    following = scene.arrive("ada", "question+answer+more")
    assert scene.dispatched[following].cached_tokens == len("question+answer") * CHUNK_TOKENS
    assert scene.worker_of(following) == scene.worker_of(turn)


def test_a_worker_that_left_holds_nothing() -> None:
    """A worker that left loses what it held and gains nothing from what ends there later; if it returns, its cache is
    empty.
    """
    scene = new_scene()
    running, last = scene.arrive("ada", "question"), scene.arrive("ada", "else")
    scene.leave("w1")
    scene.finish(running, answer="question+answer")
    scene.join("w1")
    scene.finish(last)
    assert scene.dispatched[scene.arrive("ada", "question+answer+more")].cached_tokens == 0


def test_the_believed_cache_fits_the_capacity() -> None:
    """A worker of known capacity loses its stalest prefixes as new ones come."""
    scene = new_scene(SchedulerSettings(kv_tokens=10 * CHUNK_TOKENS))
    for prompt in ("document", "another"):
        scene.serve(scene.arrive("ada", prompt))
    assert scene.dispatched[scene.arrive("ada", "another!")].cached_tokens == 7 * CHUNK_TOKENS
    assert scene.dispatched[scene.arrive("ada", "document!")].cached_tokens == 2 * CHUNK_TOKENS


# How a request ends


def test_a_request_for_an_unserved_model_is_rejected() -> None:
    """A request for a model that no worker serves is rejected at once, without a retry time."""
    scene = new_scene()
    request = scene.arrive("ada", "document", model="unknown")
    assert scene.refusals == {request: Refusal.NO_WORKER}
    assert scene.scheduler.live == 0


def test_requests_beyond_the_queue_limit_are_rejected() -> None:
    """Requests in flight do not count as waiting."""
    scene = new_scene(FEW_MAY_WAIT)
    requests = [scene.arrive("ada", "document") for _ in range(4)]
    assert scene.refusals == {requests[3]: Refusal.QUEUE_FULL}
    scene.finish(requests[0])
    assert scene.arrive("ada", "document") not in scene.refusals


def test_a_full_queue_keeps_no_worker_idle() -> None:
    """A request that can be dispatched at once is dispatched, however many others wait for another worker."""
    scene = new_scene(FEW_MAY_WAIT)
    scene.join("w2", "mistral")
    for _ in range(4):
        scene.arrive("ada", "document")
    assert scene.arrive("bob", "hello", model="mistral") in scene.dispatched


def test_a_request_that_waited_too_long_is_rejected() -> None:
    """The request's deadline is the next wake-up, and the rejection says when to retry."""
    scene = new_scene(FEW_MAY_WAIT)
    running = scene.arrive("ada", "one")
    scene.now = 3.0
    late = scene.arrive("ada", "two")
    scene.now = 5.0
    later = scene.arrive("ada", "six")
    assert scene.wake_at == 13.0
    scene.now = 13.0
    assert scene.feed(Ticked()) == [Reject(late, Refusal.EXPIRED, 13.0), WakeAt(15.0)]
    scene.now = 15.0
    assert scene.feed(Ticked()) == [Reject(later, Refusal.EXPIRED, 1.0)]
    assert scene.scheduler.live == 1
    scene.finish(running)


def test_a_wake_up_is_set_once_and_again_if_it_came_too_early() -> None:
    """A `WakeAt` replaces the previous one, so it is not repeated; a needless `Ticked` sets it anew."""
    scene = new_scene(FEW_MAY_WAIT)
    scene.arrive("ada", "one")
    waits = scene.arrive("ada", "two")
    assert scene.feed(Started(scene.order[0])) == []
    scene.now = 2.0
    assert scene.feed(Ticked()) == [WakeAt(10.0)]
    scene.cancel(waits)
    scene.now = 10.0
    assert scene.feed(Ticked()) == []


def test_an_id_in_use_is_an_error_and_changes_nothing() -> None:
    """Front ends choose the ids; the id of an ended request may be used again."""
    scene = new_scene()
    request = scene.arrive("ada", "document")
    with pytest.raises(ValueError, match=request):
        scene.feed(Arrived(scene.requests[request]))
    assert scene.scheduler.live == 1
    scene.refuse(request)
    scene.feed(Arrived(scene.requests[request]))
    assert scene.scheduler.live == 1


def test_late_events_change_nothing() -> None:
    """The scheduler ignores events about ended or unknown requests."""
    scene = new_scene()
    running = scene.arrive("ada", "document")
    scene.cancel(running)
    charged = scene.charged("ada")
    for request in (running, RequestId("nobody")):
        scene.start(request)
        scene.progress(request, 50)
        scene.feed(Finished(request))
        scene.refuse(request)
        scene.cancel(request)
    assert scene.charged("ada") == charged


def test_requests_at_a_worker_that_left_run_to_their_end() -> None:
    """Such requests are charged until they end, and the worker is forgotten with the last of them."""
    scene = new_scene()
    running = scene.arrive("ada", "document", limit=9)
    scene.leave("w1")
    scene.progress(running, 5)
    assert scene.charged("ada") == 8 * CHUNK_TOKENS + 2 * 5
    scene.finish(running, output=9)
    assert scene.charged("ada") == 8 * CHUNK_TOKENS + 2 * 9
    assert list(scene.scheduler.fleet) == []


def test_a_worker_that_comes_back_in_time_takes_new_requests_beside_the_old() -> None:
    """Requests that still run there fill its window, and end as if the worker had stayed."""
    scene = new_scene(ONE_AT_A_TIME)
    running = scene.arrive("ada", "one")
    scene.leave("w1")
    scene.join("w1")
    waits = scene.arrive("bob", "two")
    assert waits not in scene.dispatched
    scene.finish(running)
    assert waits in scene.dispatched
    scene.finish(waits)
    assert scene.scheduler.live == 0


# How much goes at once


def test_unstarted_requests_fill_the_window() -> None:
    """Uncached tokens count until the first output token; then the next request goes."""
    scene = new_scene(SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=10 * CHUNK_TOKENS)))
    first, second, third = (scene.arrive("ada", prompt) for prompt in ("six---", "four", "1"))
    assert scene.order == [first, second]
    scene.start(second)
    assert scene.order == [first, second, third]


def test_a_request_larger_than_the_window_goes_alone() -> None:
    """Such a request waits until no request there is unstarted; then it goes although it does not fit."""
    scene = new_scene(SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=4 * CHUNK_TOKENS)))
    small, large = scene.arrive("ada", "1"), scene.arrive("ada", "large prompt")
    assert scene.order == [small]
    scene.start(small)
    assert scene.order == [small, large]


def test_the_retry_time_follows_from_the_measured_rate() -> None:
    """Before a rate is known the client is asked to retry late; later, when its queue should have drained."""
    scene = new_scene(FEW_MAY_WAIT)
    for prompt in ("one", "two", "six"):
        scene.arrive("ada", prompt)
    surplus = replace(scene.requests[scene.order[0]], id=RequestId("surplus"))
    assert scene.feed(Arrived(surplus)) == [Reject(surplus.id, Refusal.QUEUE_FULL, LONGEST_RETRY)]
    scene.now = 6.0
    scene.finish(scene.order[0])
    scene.now = 9.0
    scene.arrive("ada", "ten")
    assert scene.feed(Arrived(surplus)) == [Reject(surplus.id, Refusal.QUEUE_FULL, ceil(2 / (2 / 9)))]


# Too much


def test_a_flood_costs_the_flooder() -> None:
    """In a full queue a client with fewer requests displaces the newest one of the client with most, at no charge."""
    scene = new_scene(FEW_MAY_WAIT)
    flood = [scene.arrive("flood", "document") for _ in range(3)]
    light = scene.arrive("light", "prompt")
    assert scene.refusals == {flood[2]: Refusal.DISPLACED}
    scene.serve_all()
    assert set(scene.order) == {*flood[:2], light}
    assert (scene.scheduler.live, scene.scheduler.waiting) == (0, 0)
    assert scene.scheduler.ledger.accounts.keys() == {"flood", "light"}


def test_an_arrival_is_dispatched_with_the_last_queued_request() -> None:
    """Both requests go at the arrival, since the time that passed made room for both and no wake-up has come yet."""
    scene = Scene("pooled_fcfs")
    scene.feed(Failed(scene.arrive("ada", "one"), accepted=False, fault=Fault.FULL))
    waits = scene.arrive("ada", "two")
    assert scene.scheduler.waiting == 1
    scene.now += 10
    newcomer = scene.arrive("bob", "three")
    assert scene.order[1:] == [waits, newcomer]


def test_a_request_behind_a_displaced_head_goes_at_once() -> None:
    """The head of a queue does not fit; when an arrival that fits displaces it, that arrival is dispatched at once."""
    window, waiting = FixedWindow(requests=9, unstarted_tokens=4 * CHUNK_TOKENS), WaitingLimits(requests=1)
    scene = Scene("pooled_fcfs", settings=SchedulerSettings(window=window, waiting=waiting))
    first, head = (scene.arrive("ada", prompt, weight=0.5) for prompt in ("one", "large"))
    newcomer = scene.arrive("bob", "1")
    assert scene.refusals == {head: Refusal.DISPLACED}
    assert scene.order == [first, newcomer]


def test_a_displaced_request_has_ended() -> None:
    """Later events about a displaced request, from its client or the clock, change nothing."""
    scene = new_scene(FEW_MAY_WAIT)
    flood = [scene.arrive("flood", "document") for _ in range(3)]
    scene.arrive("light", "prompt")
    scene.cancel(flood[2])
    scene.wait(1000)
    assert scene.scheduler.waiting == 0
    assert list(scene.refusals.values()).count(Refusal.EXPIRED) == 2


@pytest.mark.interpreted("a compiled package has no experiments")
def test_settings_can_be_sent_to_another_process() -> None:
    """Experiments run each simulation in a process of its own."""
    sent = SchedulerSettings(prefix_limit=7)
    arrived = pickle.loads(pickle.dumps(sent))
    assert (arrived.prefix_limit, arrived.named) == (sent.prefix_limit, sent.named)
