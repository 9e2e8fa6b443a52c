"""DLPM chooses which request goes next at one worker."""

from collections import Counter

import pytest

from router.core.fleet.window import FixedWindow
from router.core.policies.dlpm.dlpm_parameters import DlpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene

TWO_AT_A_TIME = SchedulerSettings(window=FixedWindow(requests=2))


SMALL_BUDGET = SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=10 * CHUNK_TOKENS))
"""Few enough unstarted tokens that a request may not fit the room that is left."""


def new_scene(
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
    """Among the requests of eligible clients, the one with the longest cached prefix goes first; of
    equals, the oldest.
    """
    scene = new_scene()
    running = scene.arrive("ada", "document one?")
    cold, later_cold, warm = (
        scene.arrive("ada", "else"),
        scene.arrive("bob", "what"),
        scene.arrive("bob", "document two?"),
    )
    scene.finish(running)
    assert scene.order == [running, warm]
    scene.finish(warm)
    scene.finish(cold)
    assert scene.order == [running, warm, cold, later_cold]


def test_a_waiting_request_moves_up_when_its_prefix_is_computed_for_another() -> None:
    """The cached prompt of a dispatched request counts for those that wait."""
    scene = new_scene()
    running, first = scene.arrive("ada", "something"), scene.arrive("ada", "book: why?")
    other, follower = scene.arrive("ada", "letters"), scene.arrive("ada", "book: how?")
    scene.finish(running)
    scene.finish(first)
    assert scene.order == [running, first, follower]
    assert other not in scene.dispatched


def test_a_waiting_request_falls_back_when_its_prefix_is_evicted() -> None:
    """A match is what the cache holds at the time of the choice, not what it held on arrival."""
    scene = new_scene()
    running = scene.arrive("ada", "document one?")
    cold, warm = scene.arrive("ada", "else"), scene.arrive("ada", "document two?")
    scene.evict("w1")
    scene.finish(running)
    assert scene.order == [running, cold]
    assert warm not in scene.dispatched


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_light_client_goes_before_a_heavy_ones_longest_match(sparse_first: bool) -> None:
    """A client with nothing in flight need not wait until clients with long matches have used up their deficits."""
    scene = new_scene(sparse_first=sparse_first, settings=TWO_AT_A_TIME)
    before = scene.arrive("light", "good morning")
    scene.serve(before)
    first, second = scene.arrive("heavy", "document 1"), scene.arrive("heavy", "document 2")
    third, light = scene.arrive("heavy", "document 3"), scene.arrive("light", "hello")
    scene.finish(first)
    assert scene.order == [before, first, second, light if sparse_first else third]


def test_a_client_is_sparse_only_with_nothing_in_flight() -> None:
    """A client's second simultaneous request has no priority; once the first has ended, the client is sparse again."""
    scene = new_scene(settings=TWO_AT_A_TIME)
    running = [scene.arrive("heavy", f"document {number}") for number in (1, 2)]
    light, again = scene.arrive("light", "hello"), scene.arrive("light", "world")
    warm = [scene.arrive("heavy", f"document {number}") for number in (3, 4)]
    scene.finish(running[0])
    scene.finish(running[1])
    assert scene.order == [*running, light, warm[0]]
    scene.finish(light)
    assert scene.order[4:] == [again]
    scene.finish(again)
    assert scene.order[5:] == [warm[1]]
    scene.arrive("heavy", "document 5")
    back = scene.arrive("light", "hello")
    scene.finish(warm[0])
    assert scene.order[6:] == [back]


def test_a_client_that_begins_to_wait_goes_before_those_that_have_waited() -> None:
    """If many clients are eligible with nothing in flight, a new one need not wait until they have used up their
    deficits.

    The head start covers one request here, so the client's second request has no priority.
    """
    scene = new_scene(head_start=4 * CHUNK_TOKENS + 1)
    ada = [scene.arrive("ada", text) for text in ("abcd", "efgh", "ijkl")]
    bob = [scene.arrive("bob", text) for text in ("mnop", "qrst")]
    for _ in range(2):
        scene.finish(scene.order[-1], output=10)
    light = [scene.arrive("light", text) for text in ("1234", "5678")]
    for _ in range(5):
        scene.finish(scene.order[-1], output=10)
    assert scene.order == [ada[0], ada[1], bob[0], light[0], ada[2], bob[1], light[1]]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_prefix_in_prefill_counts_as_cached_if_the_engine_finds_it(engine: str) -> None:
    """SGLang finds a prompt only once it is computed: two calls with the same prefix would both compute it in one
    batch. So the second takes as much of the window as if nothing were cached, and goes when the first has started to
    answer.
    """
    budget = SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=15 * CHUNK_TOKENS))
    scene = Scene("rr+dlpm", workers=(), settings=budget)
    scene.join("w1", engine=engine)
    first, second = scene.arrive("ada", "document 1"), scene.arrive("bob", "document 2")
    assert (second in scene.dispatched) == (engine == "vllm")
    scene.start(first)
    assert scene.order == [first, second]


def test_a_prefix_whose_prefill_is_assumed_done_counts_as_cached() -> None:
    """A prefill must be assumed done, because an answer that is not streamed never shows that its prompt
    is computed.
    """
    budget = SchedulerSettings(window=FixedWindow(requests=9, unstarted_tokens=17 * CHUNK_TOKENS))
    scene = Scene("rr+dlpm", workers=(), settings=budget)
    scene.join("w1", engine="sglang")
    scene.arrive("ada", "document 1", streamed=False)
    scene.arrive("ada", "others")
    scene.wait(60.0)
    assert scene.arrive("bob", "document two") in scene.dispatched


def test_a_call_that_costs_more_than_a_head_start_has_no_priority() -> None:
    """The head start covers only cheap calls, so long uncached prompts do not go before cached ones."""
    scene = new_scene(head_start=4 * CHUNK_TOKENS + 1)
    running = scene.arrive("ada", "document one?")
    warm, cold = scene.arrive("ada", "document or two?"), scene.arrive("bob", "something else")
    short = scene.arrive("cyd", "what")
    scene.serve_all()
    assert scene.order == [running, short, warm, cold]


def test_a_client_in_debt_waits_for_an_eligible_one() -> None:
    """A client in debt waits however long its match is."""
    scene = new_scene(quantum=100)
    running = scene.arrive("ada", "document 1")
    warm, cold = scene.arrive("ada", "document 2"), scene.arrive("bob", "hello")
    scene.finish(running)
    assert scene.deficit("ada").order == 100 - 10 * CHUNK_TOKENS
    assert scene.order == [running, cold]
    assert warm not in scene.dispatched


def test_a_refill_serves_the_client_that_needs_the_fewest_quanta() -> None:
    """If no waiting client is eligible, all clients receive as many quanta as make one of them eligible."""
    scene = new_scene(quantum=100)
    for client, prompt in (("ada", "ten chunks"), ("bob", "four")):
        scene.arrive(client, prompt)
    ada, bob = scene.arrive("ada", "ten chunks again"), scene.arrive("bob", "five more")
    scene.finish(scene.order[0])
    scene.finish(scene.order[1])
    assert scene.order[-1] == bob
    assert scene.deficit("ada").order == (100 - 320) + 100
    assert scene.deficit("bob").order == (100 - 128) + 100 - 9 * CHUNK_TOKENS
    assert ada not in scene.dispatched


def test_output_is_charged_while_it_streams() -> None:
    """A long answer reduces its client's deficit before it has ended."""
    scene = new_scene(quantum=1000)
    answer = scene.arrive("ada", "why?", limit=300)
    scene.progress(answer, 100)
    assert scene.deficit("ada").order == 1000 - 4 * CHUNK_TOKENS - 2 * 100
    scene.progress(answer, 300)
    assert scene.deficit("ada").order == 1000 - 4 * CHUNK_TOKENS - 2 * 300
    scene.finish(answer)
    assert scene.deficit("ada").order == 1000 - 4 * CHUNK_TOKENS - 2 * 300


def test_a_client_does_not_shed_debt_by_leaving() -> None:
    """While others wait, a client returns with the debt with which it left."""
    scene = new_scene(quantum=100)
    running = scene.arrive("ada", "ten chunks", limit=500)
    waits = scene.arrive("bob", "hello")
    scene.finish(running, output=500)
    debt = scene.deficit("ada").order
    assert debt == 100 - 10 * CHUNK_TOKENS - 2 * 500
    assert scene.order[-1] == waits
    queued = scene.arrive("bob", "world")
    scene.cancel(scene.arrive("ada", "sorry"))
    scene.arrive("ada", "ten chunks and more")
    assert scene.deficit("ada").order == debt
    scene.finish(waits)
    assert scene.order[-1] == queued


def test_all_deficits_are_reset_when_no_client_waits() -> None:
    """Use of an idle machine takes nothing from others, so its user is equal to a client that arrives then."""
    scene = new_scene(quantum=100)
    alone = scene.arrive("ada", "ten chunks", limit=500)
    scene.progress(alone, 400)
    assert scene.deficit("ada").order == 100 - 10 * CHUNK_TOKENS - 2 * 400
    scene.arrive("bob", "hello")
    assert scene.deficit("ada").order == 100
    scene.progress(alone, 500)
    assert scene.deficit("ada").order == 100 - 2 * 100


def test_debt_survives_a_worker_that_leaves_and_returns() -> None:
    """A worker whose health check fails for a moment erases no debt."""
    scene = new_scene(quantum=100)
    scene.arrive("ada", "ten chunks")
    scene.leave("w1")
    scene.join("w1")
    assert scene.deficit("ada").order == 100 - 10 * CHUNK_TOKENS


def test_an_unstreamed_call_does_not_prevent_a_reset() -> None:
    """An unstreamed call never shows its start, so it does not count as waiting in the engine."""
    scene = new_scene(quantum=100)
    scene.arrive("ada", "ten chunks", streamed=False)
    scene.arrive("bob", "hello")
    assert scene.deficit("ada").order == 100


def test_debt_stays_while_a_request_awaits_its_first_token() -> None:
    """A request that was dispatched and has not started still waits, but in the engine."""
    scene = new_scene(quantum=100)
    scene.arrive("ada", "ten chunks")
    scene.arrive("bob", "hello")
    assert scene.deficit("ada").order == 100 - 10 * CHUNK_TOKENS


def test_a_deficit_never_exceeds_one_quantum() -> None:
    """A client that was absent for many refills has one quantum and no more."""
    scene = new_scene(quantum=100)
    for letter in "abcde":
        scene.arrive("busy", 10 * letter)
    scene.arrive("idle", "few")
    scene.serve_all()
    assert scene.deficit("busy").order == 100 - 5 * 320 + 12 * 100
    assert scene.deficit("idle").order == 100


@pytest.mark.parametrize("weights", [(1, 1), (1, 2), (2, 3), (0.5, 2)])
def test_backlogged_clients_share_by_weight(weights: tuple[float, float]) -> None:
    """Two clients that always wait are served in proportion to their weights."""
    scene = new_scene(quantum=84)
    for letter in map(chr, range(ord("!"), ord("!") + 40)):
        for client, weight in zip(("ada", "bob"), weights, strict=True):
            scene.arrive(client, letter + client[0], limit=10, weight=weight)
    served: Counter[str] = Counter()
    for _ in range(30):
        request = scene.order[-1]
        served[scene.requests[request].client] += 1
        scene.serve(request, output=10)
    assert served["ada"] == pytest.approx(30 * weights[0] / sum(weights), abs=1)


def test_a_small_request_passes_one_that_does_not_fit() -> None:
    """A small request uses the remaining room if its client is eligible."""
    scene = new_scene(settings=SMALL_BUDGET)
    running = scene.arrive("ada", "eight...")
    large = scene.arrive("bob", "six...")
    small = scene.arrive("cyd", "tw")
    assert scene.order == [running, small]
    (passed,) = scene.dispatched[small].decision.passed_over
    assert passed.request == large
    scene.start(running)
    assert scene.order == [running, small, large]


def test_a_client_in_debt_passes_no_request() -> None:
    """Small requests of a client in debt do not starve a large request of an eligible client."""
    scene = new_scene(quantum=100, settings=SMALL_BUDGET)
    running = scene.arrive("ada", "eight...")
    large = scene.arrive("bob", "six...")
    next_of_debtor = scene.arrive("ada", "tw")
    assert scene.order == [running]
    scene.start(running)
    assert scene.order == [running, large, next_of_debtor]


def test_room_is_kept_for_a_request_that_was_passed_often_enough() -> None:
    """An endless series of small requests does not keep a large one waiting for ever."""
    scene = new_scene(patience=2, settings=SMALL_BUDGET)
    running = [scene.arrive("ada", "eight...")]
    large = scene.arrive("bob", "1234567")
    for _ in range(5):
        small = scene.arrive("cyd", "!")
        if small in scene.dispatched:
            running.append(small)
    assert scene.order == running
    assert len(running) == 3
    for request in running:
        scene.start(request)
    assert large in scene.dispatched


def test_at_a_reordering_engine_a_refill_waits_for_unstarted_requests() -> None:
    """Without the wait, which is limited, such an engine would serve the others' long matches before an uncached
    request for ever.
    """
    scene = Scene("rr+dlpm", DlpmParameters(quantum=300), workers=(), settings=TWO_AT_A_TIME)
    scene.join("w1", reorders=True)
    heavy = scene.arrive("heavy", "document 1")
    cold = scene.arrive("light", "hello")
    more = [scene.arrive("heavy", f"document {number}") for number in (2, 3, 4)]
    scene.serve(heavy)
    assert scene.order == [heavy, cold]
    scene.wait(9.9)
    scene.progress(cold, 0)
    assert scene.order == [heavy, cold, more[0]]


def test_at_an_engine_that_serves_in_order_no_refill_waits() -> None:
    """At such an engine, an unstreamed call or one that starts slowly would delay all others for nothing."""
    scene = Scene("rr+dlpm", DlpmParameters(quantum=300), settings=TWO_AT_A_TIME)
    heavy, cold = scene.arrive("heavy", "document 1"), scene.arrive("light", "hello")
    more = scene.arrive("heavy", "document 2")
    scene.serve(heavy)
    assert scene.order == [heavy, cold, more]


@pytest.mark.parametrize(("every", "turn"), [(4, 11), (8, 15)])
def test_a_client_does_not_starve_its_own_uncached_requests(every: int, turn: int) -> None:
    """Of one client's requests the longest match goes first, but one that is the oldest at two looks goes next: they
    are as many turns apart as set, or as it has requests waiting.
    """
    parameters = DlpmParameters(quantum=1e9, oldest_every=every)
    scene = Scene("rr+dlpm", parameters, settings=ONE_AT_A_TIME)
    scene.arrive("ada", "document")
    cold = scene.arrive("ada", "else")
    for letter in "abcde":
        scene.arrive("ada", "document" + letter)
    for number in range(turn):
        scene.serve(scene.order[-1])
        scene.arrive("ada", f"document{number}")
    assert scene.order.index(cold) == turn
