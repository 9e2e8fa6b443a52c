"""Which sessions the gate admits, in which order, and when they lose their places."""

from dataclasses import replace

import pytest

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.events import Fault, Returned
from router.core.model.request import ClientId, Role, Takes, WorkerId
from router.core.policies.sessions.places import Loss
from router.core.policies.sessions.session_admission import PATIENCE
from tests.core.policies.sessions.scenes import ROOM, SMALL, GatedScene
from tests.core.scenario import CHUNK_TOKENS

W1 = WorkerId("w1")


def test_an_open_gate_lets_every_call_go() -> None:
    """While all contexts fit in the cache, no call is held back."""
    scene = GatedScene(kv_chunks=10)
    calls = [scene.call("ada", letter * 3, f"s{letter}") for letter in "abc"]
    assert scene.order == calls


def test_a_session_that_does_not_fit_waits_for_room() -> None:
    """A session whose context exceeds what is left of the cache waits until another has been idle for too long."""
    scene = GatedScene(kv_chunks=10)
    scene.answer(scene.call("ada", "aaaaa", "one"), "aaaaa")
    first = scene.call("ada", "aaaaaa", "one")
    second = scene.call("bob", "bbbbbb", "two")
    scene.call("cyd", "c", "three")  # keeps the worker at work
    scene.answer(first)
    assert scene.is_paused(second)
    scene.wait(39.0)
    assert scene.is_paused(second)
    scene.wait(2.0)
    assert scene.order[-1] == second
    assert scene.gate.places.losses[Loss.IDLE] == 0  # then all that is hot fits, and the gate is open


def test_a_session_whose_turn_ended_gives_way_sooner() -> None:
    """A session that waits for a person loses its place after the shorter limit, and only if somebody waits."""
    scene = GatedScene(kv_chunks=10)
    first, other = scene.call("ada", "aaaa", "one"), scene.call("cyd", "cccc", "three")
    scene.answer(first, ended_turn=True)
    second = scene.call("bob", "bbbbb", "two")
    assert scene.is_paused(second)
    scene.wait(6.0)
    assert scene.order == [first, other, second]
    scene.gate.check_integrity()


def test_calls_with_new_labels_keep_no_places() -> None:
    """A client whose calls each have a new label does not keep the places of these sessions, which do not come back:
    each can be taken after the shorter limit.
    """
    scene = GatedScene(kv_chunks=10)
    for letter in "abcde":
        scene.answer(scene.call("eve", letter * 2, f"invented {letter}"))
    waits = scene.call("bob", "zzzz", "two")
    assert scene.is_paused(waits)
    scene.wait(6.0)
    assert scene.worker_of(waits) == W1
    scene.gate.check_integrity()


def test_another_try_of_a_call_is_no_second_call() -> None:
    """A session whose only call was returned by a worker and tried again has not come back."""
    scene = GatedScene(kv_chunks=10, workers=("w1", "w2"))
    call = scene.call("eve", "a" * 10, "invented")
    scene.feed(Returned(call, accepted=False, fault=Fault.ERROR))
    scene.answer(call)
    scene.call("ada", "b" * 10, "one")
    waits = scene.call("bob", "c" * 8, "two")
    assert scene.is_paused(waits)
    scene.wait(6.0)
    assert not scene.is_paused(waits)


def test_a_session_with_a_place_goes_on_while_others_wait() -> None:
    """Calls of a session that has a place go to its worker, however many sessions wait."""
    scene = GatedScene(kv_chunks=10)
    first = scene.call("ada", "aaaaaa", "one")
    waiting = [scene.call("bob", letter * 6, letter) for letter in "xyz"]
    scene.answer(first, "aaaaaab")
    second = scene.call("ada", "aaaaaabc", "one")
    assert scene.worker_of(second) == W1
    assert all(map(scene.is_paused, waiting))


def test_a_spent_turn_gives_way_to_a_client_with_less_service() -> None:
    """Once a session has had its turn, a client that was served less takes its place at the end of its call; one that
    was served as much does not.
    """
    scene = GatedScene(kv_chunks=10)
    first = scene.call("ada", "aaaaaa", "one")
    second = scene.call("bob", "bbbbbb", "two")
    scene.answer(first, "aaaaaab", output=10)
    assert scene.is_paused(second)
    scene.start(again := scene.call("ada", "aaaaaabc", "one"))
    scene.progress(again, 300)
    assert scene.is_paused(second)  # not while a call is under way
    scene.finish(again, 300, cached=192)
    assert scene.worker_of(second) == W1
    assert scene.gate.places.losses[Loss.TURN] == 1


def test_a_client_far_ahead_gives_way_before_its_turns_are_spent() -> None:
    """A client that was served more than another one will have been after its session's turn loses a place to it
    between calls, though the turn of that place is not spent; one that is less far ahead keeps it.
    """
    scene = GatedScene(kv_chunks=10, parameters=replace(SMALL, grace=2 * CHUNK_TOKENS))
    scene.answer(scene.call("ada", "aaaaa", "one"), "aaaaa")
    scene.call("cyd", "ccc", "three")  # keeps the worker at work
    waits = scene.call("bob", "bbbbbb", "two")
    claim = (1 + SMALL.turn) * 6 * CHUNK_TOKENS
    scene.serve(scene.call("ada", "x"), output=100)
    assert scene.is_paused(waits)
    scene.serve(scene.call("ada", "x"), output=int(claim / 2))  # an output token costs 2
    assert scene.worker_of(waits) == W1
    assert scene.gate.places.losses[Loss.AHEAD] == 1


def test_service_beside_its_sessions_counts_where_a_turn_is_spent() -> None:
    """A client with a spent turn loses that place once it has been served more than the one that waits, also by calls
    that belong to no session.
    """
    scene = GatedScene(kv_chunks=10, parameters=replace(SMALL, grace=64, turn=0.1))
    spends, waits = scene.call("ada", "aaaaaa", "one"), scene.call("bob", "bbbbbb", "two")
    scene.answer(scene.call("bob", "b"), output=100)
    scene.answer(spends, output=20)
    assert scene.is_paused(waits)
    scene.answer(scene.call("ada", "a"), output=200)
    assert scene.worker_of(waits) == W1
    assert scene.gate.places.losses[Loss.TURN] == 1


def test_the_client_with_the_least_service_is_next() -> None:
    """Of the waiting sessions, the oldest one of the client that was served least goes first."""
    scene = GatedScene(kv_chunks=10)
    first = scene.call("ada", "aaaaaaaa", "one")
    later = [scene.call("ada", "bbbbbb", "two"), scene.call("bob", "xxxxxx", "x"), scene.call("bob", "yyyyyy", "y")]
    scene.start(first)
    scene.progress(first, 500)
    scene.cancel(first)
    scene.wait(41.0)
    assert scene.order == [first, later[1]]


def test_a_session_that_fits_may_pass_a_large_one_but_not_for_ever() -> None:
    """Smaller sessions pass one that does not fit, until it has been passed often enough; then room is kept for it."""
    scene = GatedScene(kv_chunks=10)
    running = scene.call("ada", "aaaa", "one")
    large = scene.call("bob", "bbbbbbbbb", "large")
    passed = [scene.call(f"client {number}", f"{number}", f"{number}") for number in range(PATIENCE + 3)]
    assert scene.is_paused(large)
    went = []
    for number, call in enumerate(passed):
        if not scene.is_paused(call):
            went.append(number)
            scene.answer(call, ended_turn=True)
            scene.wait(6.0)
    assert len(went) == PATIENCE
    scene.answer(running, ended_turn=True)
    scene.wait(6.0)
    assert not scene.is_paused(large)


def test_a_context_above_the_cache_goes_alone() -> None:
    """A session larger than what sessions may have of the cache goes to a worker where nothing is reserved."""
    scene = GatedScene(kv_chunks=4, workers=("w1", "w2"))
    first = scene.call("ada", "aaa", "one")
    large = scene.call("bob", "bbbbbbbb", "large")
    assert scene.worker_of(large) != scene.worker_of(first)


def test_short_calls_pass() -> None:
    """Calls below the grace, and those of no session, are not held back and reserve nothing."""
    scene = GatedScene(kv_chunks=4, parameters=replace(SMALL, grace=64, by_prefix=False))
    scene.call("ada", "aaaa", "one")
    held = scene.call("bob", "bbb", "two")
    short, unlabelled = scene.call("bob", "b", "short"), scene.call("cyd", "cccccc")
    assert scene.is_paused(held)
    assert {short, unlabelled} < set(scene.order)
    assert scene.reserved == {W1: 4}


def test_without_a_label_a_prompt_continues_its_session() -> None:
    """A call without a label whose prompt begins with an answer to its client continues that session; for another
    client it begins one.
    """
    scene = GatedScene(kv_chunks=10)
    first = scene.call("ada", "aaaaaa")
    scene.answer(first, "aaaaaabb")
    second = scene.call("ada", "aaaaaabbc")
    assert scene.worker_of(second) == W1
    assert scene.is_paused(scene.call("bob", "aaaaaabbc"))
    assert len(scene.gate.table) == 2


def test_without_a_label_a_session_goes_on_though_the_end_of_its_prompt_changed() -> None:
    """A prompt without a label that shares more with the latest prompt of an idle session than its first prompt goes on
    with that session, however much of the end is other.
    """
    scene = GatedScene(kv_chunks=100)
    scene.answer(scene.call("ada", "aaaa"), "aaaab")
    scene.answer(scene.call("ada", "aaaabccccccc"), "aaaabcccccccd")
    for prompt in ("aaaabccccccee", "aaaabccfffffff", "aaaabg"):
        scene.answer(scene.call("ada", prompt))
        assert len(scene.gate.table) == 1
        scene.gate.check_integrity()


def test_without_a_label_prompts_that_begin_alike_are_separate_sessions() -> None:
    """A prompt that shares no more with a session than its first prompt begins another one, as does one that changes
    the end of a prompt that is under way.
    """
    scene = GatedScene(kv_chunks=100)
    scene.answer(scene.call("ada", "aaaaaaab"), "aaaaaaabc")
    scene.answer(scene.call("ada", "aaaaaaabcdddd"), "aaaaaaabcdddde")
    scene.answer(scene.call("ada", "aaaaaaaf"))
    assert len(scene.gate.table) == 2
    running = scene.call("ada", "aaaaaaabcdddd")
    assert len(scene.gate.table) == 2
    scene.call("ada", "aaaaaaabcdddg")
    assert len(scene.gate.table) == 3
    scene.answer(running)
    scene.gate.check_integrity()


def test_two_calls_of_one_context_count_once() -> None:
    """Two calls of a session at once reserve its context once, and it stays until both have ended."""
    scene = GatedScene(kv_chunks=10)
    one, two = scene.call("ada", "aaaa", "one"), scene.call("ada", "aaaa", "one")
    assert scene.reserved == {W1: 4}
    scene.answer(one)
    session = scene.gate.session_of(two)
    assert session is not None
    assert session.hot
    assert scene.reserved == {W1: 4}


def test_calls_under_one_label_that_do_not_extend_one_another_are_separate() -> None:
    """A label may cover several contexts at once, each of which has its own reservation."""
    scene = GatedScene(kv_chunks=20)
    scene.call("ada", "aaaa", "one")
    scene.call("ada", "bbb", "one")
    assert len(scene.gate.table) == 2
    assert scene.reserved == {W1: 7}


def test_a_reservation_follows_a_context_that_shrinks() -> None:
    """After a compaction, which keeps the beginning, the session goes on with what its next call has."""
    scene = GatedScene(kv_chunks=100)
    head = "s" * 32
    scene.answer(scene.call("ada", head + "aaaa", "one"))
    scene.call("ada", head + "b", "one")
    assert len(scene.gate.table) == 1
    assert scene.reserved == {W1: 33}


def test_a_client_with_a_paused_call_is_backlogged() -> None:
    """A client whose call is held back counts as backlogged, until the call goes or is withdrawn."""
    scene = GatedScene(kv_chunks=10)
    scene.start(scene.call("ada", "aaaaaa", "one"))
    paused = scene.call("bob", "bbbbbb", "two")
    assert scene.scheduler.backlog.of_client(ClientId("bob")) == 1
    scene.cancel(paused)
    assert scene.scheduler.backlog.of_client(ClientId("bob")) == 0
    scene.gate.check_integrity()


def test_a_retry_keeps_its_seniority() -> None:
    """A session whose paused call expired or was cancelled goes before younger ones of its client if it comes back
    within the idle limit.
    """
    scene = GatedScene(kv_chunks=10, settings=replace(ROOM, waiting=WaitingLimits(time_to_live=30.0)))
    running = scene.call("ada", "aaaaaa", "one")
    scene.call("bob", "bbbbbb", "old")
    scene.wait(20.0)
    young = scene.call("bob", "cccccc", "young")
    scene.wait(11.0)
    assert len(scene.refusals) == 1
    old = scene.call("bob", "bbbbbb", "old")
    scene.answer(running, ended_turn=True)
    scene.wait(6.0)
    assert not scene.is_paused(old)
    assert scene.is_paused(young)


def test_sessions_of_a_worker_that_left_go_first() -> None:
    """Sessions lose their places with their worker, and then go before older ones of their client."""
    scene = GatedScene(kv_chunks=6, workers=("w1", "w2"))
    calls = [scene.call("ada", letter * 6, letter) for letter in "abc"]
    gone, stays = scene.worker_of(calls[0]), scene.worker_of(calls[1])
    for call in calls[:2]:
        scene.answer(call)
    scene.leave(str(gone))
    assert set(scene.reserved) == {stays}
    back = scene.call("ada", "aaaaaa", "a")
    assert scene.is_paused(back)
    assert [session.label for session in scene.gate.paused.sessions] == ["a", "c"]
    scene.come("w3")
    assert scene.worker_of(back) == "w3"


def test_a_session_loses_its_place_with_the_cache() -> None:
    """When a worker drops its cache, sessions between calls lose their places there."""
    scene = GatedScene(kv_chunks=10)
    scene.answer(scene.call("ada", "aaaa", "one"))
    scene.evict("w1")
    assert scene.reserved == {}
    assert scene.gate.places.losses[Loss.WORKER] == 1


def test_the_last_call_of_a_session_frees_its_place() -> None:
    """A session that its client ends keeps no place."""
    scene = GatedScene(kv_chunks=10)
    scene.answer(scene.call("ada", "aaaa", "one", last=True))
    assert scene.reserved == {}
    assert len(scene.gate.table) == 0


def test_a_drained_fleet_has_no_reservations() -> None:
    """Once no session is hot, nothing is reserved."""
    scene = GatedScene(kv_chunks=10)
    scene.answer(scene.call("ada", "aaaa", "one"))
    assert scene.reserved == {W1: 4}
    scene.wait(41.0)
    scene.answer(scene.call("bob", "b"))
    assert scene.reserved == {W1: 1}


def test_where_contexts_outgrow_the_cache_some_sessions_wait() -> None:
    """Sessions that fitted when they got their places, and do not any more, lose them at their next calls, those of the
    client with most service first.
    """
    scene = GatedScene(kv_chunks=10)
    heavy, light = scene.call("ada", "aaaa", "one"), scene.call("bob", "bbb", "two")
    scene.answer(heavy, "aaaaa", output=2000)
    scene.answer(light, "bbbb")
    grown = scene.call("ada", "aaaaabbb", "one")
    assert scene.is_paused(grown)
    assert not scene.is_paused(scene.call("bob", "bbbbb", "two"))
    assert scene.gate.places.losses[Loss.OVERFULL] == 1


def test_what_a_trimmed_worker_has_left_goes_to_those_that_wait() -> None:
    """Where a session loses its place to one that calls, and more becomes free than that one lacks, a paused session
    that fits goes at once.
    """
    scene = GatedScene(kv_chunks=10)
    for client, prompt in (("ada", "aaaa"), ("bob", "bbbbbb")):
        scene.answer(scene.call(client, prompt, "one"), prompt)
    waits = scene.call("cyd", "c", "one")
    assert scene.is_paused(waits)
    scene.call("ada", "aaaaa", "one")
    assert scene.gate.places.losses[Loss.OVERFULL] == 1
    assert scene.worker_of(waits) == W1
    assert scene.reserved == {W1: 6}


def test_a_context_that_shrinks_lets_a_waiting_session_in() -> None:
    """When a session's next call has less context, what it does not reserve any more goes to a paused session."""
    scene = GatedScene(kv_chunks=100)
    head = "s" * 32
    scene.answer(scene.call("ada", head + "a" * 60, "one"))
    waits = scene.call("bob", "b" * 50, "two")
    assert scene.is_paused(waits)
    scene.call("ada", head + "b", "one")
    assert scene.worker_of(waits) == W1


def test_nobody_loses_a_place_to_growth_that_the_cache_still_holds() -> None:
    """Where contexts have grown beyond what sessions may have, but not beyond the KV cache itself, every session goes
    on where it is, also while another one waits.
    """
    scene = GatedScene(kv_chunks=10, parameters=replace(SMALL, fill=0.8))
    one, two = scene.call("ada", "aaaa", "one"), scene.call("bob", "bbbb", "two")
    scene.answer(one, "aaaa")
    scene.answer(two, "bbbb")
    calls = [scene.call("ada", "aaaaa", "one"), scene.call("bob", "bbbbb", "two")]
    assert scene.reserved == {W1: 10}
    assert [scene.worker_of(call) for call in calls] == [W1, W1]
    assert not any(scene.gate.places.losses.values())
    assert scene.is_paused(scene.call("cyd", "c", "three"))
    for call in calls:
        scene.answer(call, "aaaaa" if call == calls[0] else "bbbbb")
    assert not any(scene.gate.places.losses.values())


def test_a_call_that_ends_at_no_worker_leaves_a_place_to_one_that_waits() -> None:
    """A session whose call its worker has returned, and whose client leaves before another worker has room, is idle
    from then on; once the idle limit is over, one that waits goes.
    """
    one_each = replace(ROOM, window=FixedWindow(requests=1, unstarted_tokens=10**6))
    scene = GatedScene(kv_chunks=10, workers=("w1", "w2"), settings=one_each)
    first, other = scene.call("ada", "aaaaaaaa", "one"), scene.call("cyd", "cccccccc", "three")
    assert (scene.worker_of(first), scene.worker_of(other)) == (W1, "w2")
    scene.answer(first, "aaaaaaaa")
    returned = scene.call("ada", "aaaaaaaaa", "one")
    waits = scene.call("bob", "bbbbbb", "two")
    scene.feed(Returned(returned, accepted=False, fault=Fault.ERROR))
    scene.wait(SMALL.idle)
    scene.cancel(returned)
    assert scene.is_paused(waits)
    scene.wait(SMALL.idle)
    assert scene.worker_of(waits) == W1


def test_new_labels_cost_bounded_memory() -> None:
    """A client that labels every call anew fills the table up to its limit only."""
    scene = GatedScene(kv_chunks=10, parameters=replace(SMALL, limit=5))
    for number in range(30):
        scene.answer(scene.call("ada", chr(ord("a") + number % 26), f"{number}"))
        scene.gate.check_integrity()
    assert len(scene.gate.table) <= 6


def test_a_call_that_may_not_go_where_its_session_has_its_place_is_not_held_back() -> None:
    """A call that cannot name a rank goes to the URL as a whole, though its session has a place at a rank: held back,
    it would keep that place, for which others wait, for ever.
    """
    scene = GatedScene(kv_chunks=10, workers=())
    scene.come("rank", takes=Takes.PINNED)
    scene.come("url", takes=Takes.UNPINNED)
    scene.answer(scene.call("ada", "a" * 8, "x"), "a" * 8)
    waits = scene.call("bob", "b" * 8, "y")
    assert scene.is_paused(waits)
    unpinned = scene.call("ada", "a" * 9, "x", pinned=False)
    assert scene.worker_of(unpinned) == "url"
    assert scene.reserved == {"rank": 9}
    scene.answer(unpinned)
    scene.wait(50.0)
    assert scene.worker_of(waits) == "rank"
    scene.gate.check_integrity()


def test_the_calls_of_one_session_go_only_where_each_may_go() -> None:
    """When a session gets a place, its paused calls go there, but for one that this worker may not be sent."""
    scene = GatedScene(kv_chunks=10, workers=())
    scene.come("rank", takes=Takes.PINNED)
    scene.come("url", takes=Takes.UNPINNED)
    scene.come("both")
    running = [scene.call(client, client[0] * 8, "x") for client in ("ada", "bob")]
    calls = [scene.call("eve", "e" * 9, "y", pinned=pinned) for pinned in (True, False)]
    assert all(map(scene.is_paused, calls))
    scene.call("dan", "d" * 9, "x")
    scene.cancel(next(request for request in running if scene.worker_of(request) == "rank"))
    scene.wait(50.0)
    assert scene.worker_of(calls[0]) == "rank"
    assert scene.worker_of(calls[1]) != "rank"
    scene.gate.check_integrity()


def test_a_paused_call_that_no_worker_with_places_may_be_sent_any_more_goes() -> None:
    """When the last rank leaves that a paused call might have gone to, it goes to the URL as a whole."""
    scene = GatedScene(kv_chunks=10, workers=())
    scene.come("rank", takes=Takes.PINNED)
    scene.come("url", takes=Takes.UNPINNED)
    scene.come("both")
    for client in ("ada", "bob"):
        scene.call(client, client[0] * 8, "x")
    paused = scene.call("eve", "e" * 9, "x", pinned=False)
    assert scene.is_paused(paused)
    scene.leave("both")
    assert scene.worker_of(paused) == "url"
    scene.gate.check_integrity()


@pytest.mark.parametrize("policy", ["dlpm_home", "d2lpm+dlpm"])
def test_a_place_at_a_prefill_worker_binds_the_prompt_of_a_call(policy: str) -> None:
    """While the gate is closed, a session's next call is prefilled where its place is, and decoded anywhere."""
    scene = GatedScene(kv_chunks=10, workers=(), policy=policy)
    for worker in ("p1", "p2"):
        scene.come(worker, role=Role.PREFILL)
    scene.come("d1", role=Role.DECODE)
    first = scene.call("ada", "aaaaaaaa", "one")
    scene.call("bob", "bbbbbbbb", "two")
    scene.prefill(first)
    scene.answer(first, "aaaaaaaa")
    waits = scene.call("cyd", "cccccccc", "three")
    assert scene.is_paused(waits)
    again = scene.call("ada", "aaaaaaaaa", "one")
    assert scene.prefilling[again].worker == scene.prefilling[first].worker
    scene.prefill(again)
    assert scene.worker_of(again) == WorkerId("d1")
    scene.gate.check_integrity()


def test_a_forgotten_client_leaves_its_room_at_once() -> None:
    """A call that waits for that room needs no other event to go."""
    scene = GatedScene(kv_chunks=10, settings=replace(ROOM, client_limit=1))
    first = scene.call("ada", "aaaaaaaa", "one")
    scene.answer(first)
    second = scene.call("bob", "bbbbbbbb", "two")
    assert scene.order == [first, second]


@pytest.mark.parametrize("first", ["m1", "m2"])
def test_models_of_a_decode_worker_that_serves_alone_share_a_pool(first: str) -> None:
    """Whichever of them a call comes for first."""
    scene = GatedScene(workers=())
    scene.join("d1", "m1", "m2", role=Role.DECODE)
    scene.join("w1", "m2")
    pools = scene.gate._pools
    pool = pools(first)
    assert set(pool.workers) == {"d1", "w1"}
    assert pools("m1") is pool
    assert pools("m2") is pool
