"""DLPM, in scenarios: which request goes next at one worker."""

from collections import Counter

import pytest

from router.core.fleet.window import FixedWindow
from router.core.policies.dlpm.dlpm import DlpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene

TWO_AT_A_TIME = SchedulerSettings(window=FixedWindow(requests=2))


SMALL_BUDGET = SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=10 * CHUNK_TOKENS))
"""Few enough unstarted tokens that a request may not fit the room that is left."""


def scene(
    quantum: float = 20_000,
    *,
    sparse_first: bool = True,
    head_start: float = 0.0,
    patience: int = 32,
    settings: SchedulerSettings = ONE_AT_A_TIME,
) -> Scene:
    parameters = DlpmParameters(quantum, sparse_first, head_start, patience=patience)
    return Scene("rr+dlpm", parameters, settings=settings)


def test_the_longest_match_goes_first() -> None:
    """Of the requests of eligible clients, the one that the cache holds most of; of equals, the oldest."""
    talk = scene()
    running = talk.arrive("ada", "document one?")
    cold, later_cold, warm = talk.arrive("ada", "else"), talk.arrive("bob", "what"), talk.arrive("bob", "document two?")
    talk.finish(running)
    assert talk.order == [running, warm]
    talk.finish(warm)
    talk.finish(cold)
    assert talk.order == [running, warm, cold, later_cold]


def test_a_waiting_request_moves_up_when_its_prefix_is_computed_for_another() -> None:
    """The cached prompt of a dispatched request counts for those that wait."""
    talk = scene()
    running, first = talk.arrive("ada", "something"), talk.arrive("ada", "book: why?")
    other, follower = talk.arrive("ada", "letters"), talk.arrive("ada", "book: how?")
    talk.finish(running)
    talk.finish(first)
    assert talk.order == [running, first, follower]
    assert other not in talk.dispatched


def test_a_waiting_request_falls_back_when_its_prefix_is_evicted() -> None:
    """A match is what the cache holds at the time of the choice, not what it held on arrival."""
    talk = scene()
    running = talk.arrive("ada", "document one?")
    cold, warm = talk.arrive("ada", "else"), talk.arrive("ada", "document two?")
    talk.evict("w1")
    talk.finish(running)
    assert talk.order == [running, cold]
    assert warm not in talk.dispatched


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_light_client_goes_before_a_heavy_ones_longest_match(sparse_first: bool) -> None:
    """A client with nothing in flight need not wait until clients with long matches have used up their deficits."""
    talk = scene(sparse_first=sparse_first, settings=TWO_AT_A_TIME)
    before = talk.arrive("light", "good morning")
    talk.serve(before)
    first, second = talk.arrive("heavy", "document 1"), talk.arrive("heavy", "document 2")
    third, light = talk.arrive("heavy", "document 3"), talk.arrive("light", "hello")
    talk.finish(first)
    assert talk.order == [before, first, second, light if sparse_first else third]


def test_a_client_is_sparse_only_with_nothing_in_flight() -> None:
    """Its second simultaneous request has no priority; once the first has ended, the client is sparse again."""
    talk = scene(settings=TWO_AT_A_TIME)
    running = [talk.arrive("heavy", f"document {number}") for number in (1, 2)]
    light, again = talk.arrive("light", "hello"), talk.arrive("light", "world")
    warm = [talk.arrive("heavy", f"document {number}") for number in (3, 4)]
    talk.finish(running[0])
    talk.finish(running[1])
    assert talk.order == [*running, light, warm[0]]
    talk.finish(light)
    assert talk.order[4:] == [again]
    talk.finish(again)
    assert talk.order[5:] == [warm[1]]
    talk.arrive("heavy", "document 5")
    back = talk.arrive("light", "hello")
    talk.finish(warm[0])
    assert talk.order[6:] == [back]


def test_a_client_that_begins_to_wait_goes_before_those_that_have_waited() -> None:
    """If many clients are eligible with nothing in flight, a new one need not wait until they have used up their
    deficits.

    The head start covers one request here, so the client's second request has no priority.
    """
    talk = scene(head_start=4 * CHUNK_TOKENS + 1)
    ada = [talk.arrive("ada", text) for text in ("abcd", "efgh", "ijkl")]
    bob = [talk.arrive("bob", text) for text in ("mnop", "qrst")]
    for _ in range(2):
        talk.finish(talk.order[-1], output=10)
    light = [talk.arrive("light", text) for text in ("1234", "5678")]
    for _ in range(5):
        talk.finish(talk.order[-1], output=10)
    assert talk.order == [ada[0], ada[1], bob[0], light[0], ada[2], bob[1], light[1]]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_prefix_in_prefill_counts_as_cached_if_the_engine_finds_it(engine: str) -> None:
    """SGLang finds a prompt only once it is computed: two calls with the same prefix would both compute it in one
    batch. So the second takes as much of the window as if nothing were cached, and goes when the first has started to
    answer.
    """
    budget = SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=15 * CHUNK_TOKENS))
    talk = Scene("rr+dlpm", workers=(), settings=budget)
    talk.join("w1", engine=engine)
    first, second = talk.arrive("ada", "document 1"), talk.arrive("bob", "document 2")
    assert (second in talk.dispatched) == (engine == "vllm")
    talk.start(first)
    assert talk.order == [first, second]


def test_a_prefix_whose_prefill_is_assumed_done_counts_as_cached() -> None:
    """An answer that is not streamed never shows that its prompt is computed."""
    budget = SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=17 * CHUNK_TOKENS))
    talk = Scene("rr+dlpm", workers=(), settings=budget)
    talk.join("w1", engine="sglang")
    talk.arrive("ada", "document 1", streamed=False)
    talk.arrive("ada", "others")
    talk.wait(60.0)
    assert talk.arrive("bob", "document two") in talk.dispatched


def test_a_call_that_costs_more_than_a_head_start_has_no_priority() -> None:
    """So long uncached prompts do not go before cached ones."""
    talk = scene(head_start=4 * CHUNK_TOKENS + 1)
    running = talk.arrive("ada", "document one?")
    warm, cold = talk.arrive("ada", "document or two?"), talk.arrive("bob", "something else")
    short = talk.arrive("cyd", "what")
    talk.serve_all()
    assert talk.order == [running, short, warm, cold]


def test_a_client_in_debt_waits_for_an_eligible_one() -> None:
    """However long its match is."""
    talk = scene(quantum=100)
    running = talk.arrive("ada", "document 1")
    warm, cold = talk.arrive("ada", "document 2"), talk.arrive("bob", "hello")
    talk.finish(running)
    assert talk.deficit("ada").order == 100 - 10 * CHUNK_TOKENS
    assert talk.order == [running, cold]
    assert warm not in talk.dispatched


def test_a_refill_serves_the_client_that_needs_the_fewest_quanta() -> None:
    """If no waiting client is eligible, all clients receive as many quanta as make one of them eligible."""
    talk = scene(quantum=100)
    for client, prompt in (("ada", "ten chunks"), ("bob", "four")):
        talk.arrive(client, prompt)
    ada, bob = talk.arrive("ada", "ten chunks again"), talk.arrive("bob", "five more")
    talk.finish(talk.order[0])
    talk.finish(talk.order[1])
    assert talk.order[-1] == bob
    assert talk.deficit("ada").order == (100 - 320) + 100
    assert talk.deficit("bob").order == (100 - 128) + 100 - 9 * CHUNK_TOKENS
    assert ada not in talk.dispatched


def test_output_is_charged_while_it_streams() -> None:
    """A long answer reduces its client's deficit before it has ended."""
    talk = scene(quantum=1000)
    answer = talk.arrive("ada", "why?", limit=300)
    talk.progress(answer, 100)
    assert talk.deficit("ada").order == 1000 - 4 * CHUNK_TOKENS - 2 * 100
    talk.progress(answer, 300)
    assert talk.deficit("ada").order == 1000 - 4 * CHUNK_TOKENS - 2 * 300
    talk.finish(answer)
    assert talk.deficit("ada").order == 1000 - 4 * CHUNK_TOKENS - 2 * 300


def test_a_client_does_not_shed_debt_by_leaving() -> None:
    """While others wait, a client returns with the debt with which it left."""
    talk = scene(quantum=100)
    running = talk.arrive("ada", "ten chunks", limit=500)
    waits = talk.arrive("bob", "hello")
    talk.finish(running, output=500)
    debt = talk.deficit("ada").order
    assert debt == 100 - 10 * CHUNK_TOKENS - 2 * 500
    assert talk.order[-1] == waits
    queued = talk.arrive("bob", "world")
    talk.cancel(talk.arrive("ada", "sorry"))
    talk.arrive("ada", "ten chunks and more")
    assert talk.deficit("ada").order == debt
    talk.finish(waits)
    assert talk.order[-1] == queued


def test_all_deficits_are_reset_when_no_client_waits() -> None:
    """Use of an idle machine took nothing from others, so its user is equal to a client that arrives then."""
    talk = scene(quantum=100)
    alone = talk.arrive("ada", "ten chunks", limit=500)
    talk.progress(alone, 400)
    assert talk.deficit("ada").order == 100 - 10 * CHUNK_TOKENS - 2 * 400
    talk.arrive("bob", "hello")
    assert talk.deficit("ada").order == 100
    talk.progress(alone, 500)
    assert talk.deficit("ada").order == 100 - 2 * 100


def test_debt_survives_a_worker_that_leaves_and_returns() -> None:
    """A worker whose health check fails for a moment erases no debt."""
    talk = scene(quantum=100)
    talk.arrive("ada", "ten chunks")
    talk.leave("w1")
    talk.join("w1")
    assert talk.deficit("ada").order == 100 - 10 * CHUNK_TOKENS


def test_an_unstreamed_call_does_not_prevent_a_reset() -> None:
    """It never shows its start, so it does not count as waiting in the engine."""
    talk = scene(quantum=100)
    talk.arrive("ada", "ten chunks", streamed=False)
    talk.arrive("bob", "hello")
    assert talk.deficit("ada").order == 100


def test_debt_stays_while_a_request_awaits_its_first_token() -> None:
    """A request that was dispatched and has not started still waits, but in the engine."""
    talk = scene(quantum=100)
    talk.arrive("ada", "ten chunks")
    talk.arrive("bob", "hello")
    assert talk.deficit("ada").order == 100 - 10 * CHUNK_TOKENS


def test_a_deficit_never_exceeds_one_quantum() -> None:
    """A client that was absent for many refills has one quantum and no more."""
    talk = scene(quantum=100)
    for letter in "abcde":
        talk.arrive("busy", 10 * letter)
    talk.arrive("idle", "few")
    talk.serve_all()
    assert talk.deficit("busy").order == 100 - 5 * 320 + 12 * 100
    assert talk.deficit("idle").order == 100


@pytest.mark.parametrize("weights", [(1, 1), (1, 2), (2, 3), (0.5, 2)])
def test_backlogged_clients_share_by_weight(weights: tuple[float, float]) -> None:
    """Two clients that always wait are served in proportion to their weights."""
    talk = scene(quantum=84)
    for letter in map(chr, range(ord("!"), ord("!") + 40)):
        for client, weight in zip(("ada", "bob"), weights, strict=True):
            talk.arrive(client, letter + client[0], limit=10, weight=weight)
    served: Counter[str] = Counter()
    for _ in range(30):
        request = talk.order[-1]
        served[talk.requests[request].client] += 1
        talk.serve(request, output=10)
    assert served["ada"] == pytest.approx(30 * weights[0] / sum(weights), abs=1)


def test_a_small_request_passes_one_that_does_not_fit() -> None:
    """The remaining room is used, if the client that uses it is eligible."""
    talk = scene(settings=SMALL_BUDGET)
    running = talk.arrive("ada", "eight...")
    large = talk.arrive("bob", "six...")
    small = talk.arrive("cyd", "tw")
    assert talk.order == [running, small]
    (passed,) = talk.dispatched[small].decision.passed_over
    assert passed.request == large
    talk.start(running)
    assert talk.order == [running, small, large]


def test_a_client_in_debt_passes_no_request() -> None:
    """Small requests of a client in debt do not starve a large request of an eligible client."""
    talk = scene(quantum=100, settings=SMALL_BUDGET)
    running = talk.arrive("ada", "eight...")
    large = talk.arrive("bob", "six...")
    next_of_debtor = talk.arrive("ada", "tw")
    assert talk.order == [running]
    talk.start(running)
    assert talk.order == [running, large, next_of_debtor]


def test_room_is_kept_for_a_request_that_was_passed_often_enough() -> None:
    """An endless series of small requests does not keep a large one waiting for ever."""
    talk = scene(patience=2, settings=SMALL_BUDGET)
    running = [talk.arrive("ada", "eight...")]
    large = talk.arrive("bob", "1234567")
    for _ in range(5):
        small = talk.arrive("cyd", "!")
        if small in talk.dispatched:
            running.append(small)
    assert talk.order == running
    assert len(running) == 3
    for request in running:
        talk.start(request)
    assert large in talk.dispatched


def test_at_a_reordering_engine_a_refill_waits_for_unstarted_requests() -> None:
    """Otherwise the engine would serve the others' long matches before an uncached request for ever. The wait is
    limited.
    """
    talk = Scene("rr+dlpm", DlpmParameters(quantum=300), workers=(), settings=TWO_AT_A_TIME)
    talk.join("w1", reorders=True)
    heavy = talk.arrive("heavy", "document 1")
    cold = talk.arrive("light", "hello")
    more = [talk.arrive("heavy", f"document {number}") for number in (2, 3, 4)]
    talk.serve(heavy)
    assert talk.order == [heavy, cold]
    talk.wait(9.9)
    talk.progress(cold, 0)
    assert talk.order == [heavy, cold, more[0]]


def test_at_an_engine_that_serves_in_order_no_refill_waits() -> None:
    """There, an unstreamed call or one that starts slowly would delay all others for nothing."""
    talk = Scene("rr+dlpm", DlpmParameters(quantum=300), settings=TWO_AT_A_TIME)
    heavy, cold = talk.arrive("heavy", "document 1"), talk.arrive("light", "hello")
    more = talk.arrive("heavy", "document 2")
    talk.serve(heavy)
    assert talk.order == [heavy, cold, more]


def test_a_client_does_not_starve_its_own_uncached_requests() -> None:
    """Of one client's requests the longest match goes first, but now and then the oldest."""
    parameters = DlpmParameters(quantum=1e9, oldest_every=4)
    talk = Scene("rr+dlpm", parameters, settings=ONE_AT_A_TIME)
    talk.arrive("ada", "document")
    cold = talk.arrive("ada", "else")
    for letter in "abcdefgh":
        talk.arrive("ada", "document" + letter)
    for _ in range(4):
        talk.serve(talk.order[-1])
    assert talk.order[4] == cold
