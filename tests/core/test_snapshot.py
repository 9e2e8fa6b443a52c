"""A snapshot restores what was saved: deficits, service, matches, and the order of their eviction."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.cache.prefix_tree import PrefixTree
from router.core.cache.saved_prefixes import restore_prefixes, saved_prefixes
from router.core.model.commands import Deficit
from router.core.model.cost import Tokens
from router.core.model.events import CacheReport, WorkerReported
from router.core.model.request import ClientId, GroupId, RequestId, WorkerId
from router.core.model.request import Request as CoreRequest
from router.core.model.saved import (
    Clients,
    Counters,
    Groups,
    Piece,
    Prefixes,
    SavedClient,
    SavedCounter,
    SavedGroup,
    SavedNode,
    SavedTouch,
    UsageRows,
)
from router.core.policies.context import Parameters
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters, DlpmParameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from router.core.snapshot import restore, snapshot
from tests.core.cache.test_prefix_tree import A, B, C, chain, last_touched
from tests.core.scenario import MODEL, ONE_AT_A_TIME, Scene, key

CLIENTS = ("ann", "bob", "cy")
GROUPS = {"bob": "g", "cy": "g"}
FAIR = ("dlpm_home", "d2lpm", "vtc", "lcf")
SMALL = (DlpmParameters(quantum=70.0), DlpmHomeParameters(quantum=70.0, worker_quantum=110.0))

insertions = st.lists(
    st.tuples(st.text("xy", min_size=1, max_size=9), st.sampled_from([A, B, C]), st.sampled_from([0.0, 1.0])),
    max_size=30,
)
histories = st.lists(
    st.tuples(st.sampled_from(CLIENTS), st.text("xy", min_size=1, max_size=6), st.integers(0, 90)), max_size=25
)


def tree_of(history: list[tuple[str, WorkerId, float]], limit: int = 1000) -> tuple[PrefixTree, float]:
    tree, now = PrefixTree(limit), 0.0
    for document, worker, wait in history:
        now += wait
        tree.insert(chain(document), worker, now)
    return tree, now


def restored_tree(pieces: list[Prefixes], now: float) -> PrefixTree:
    tree = PrefixTree(1000)
    restore_prefixes(tree, pieces, now)
    tree.check_integrity()
    return tree


def scene_of(policy: str, history: list[tuple[str, str, int]]) -> Scene:
    """Return a fleet of two workers that served these requests, two at a time, each with the given output tokens."""
    scene = Scene(policy, *SMALL, workers=("w1", "w2"), settings=ONE_AT_A_TIME)
    for client, prompt, output in history:
        scene.now += 1.0
        request = scene.arrive(client, prompt, limit=output, group=GROUPS.get(client))
        if len(scene.dispatched) % 2 and request in scene.dispatched:
            scene.serve(request, output)
    return scene


def counted(pieces: Iterable[Piece]) -> list[Piece]:
    """Return all pieces but the prefixes, whose workers may be in another order."""
    return [piece for piece in pieces if isinstance(piece, Clients | Counters | Groups | UsageRows)]


def restored(policy: str, pieces: list[Piece], now: float, *workers: str) -> Scene:
    scene = Scene(policy, *SMALL, workers=(), settings=ONE_AT_A_TIME)
    restore(scene.scheduler, pieces, now)
    scene.now = now
    for worker in workers:
        scene.join(worker)
    return scene


@given(insertions)
def test_a_restored_tree_matches_and_evicts_like_the_one_saved(history: list[tuple[str, WorkerId, float]]) -> None:
    """Every prefix is held by the same workers, has the same age, and is evicted in the same order."""
    tree, now = tree_of(history)
    copy = restored_tree(list(saved_prefixes(tree, now, 1000, 1000)), now + 50)
    documents = {document[:end] for document, _, _ in history for end in range(1, len(document) + 1)}
    while True:
        for document in documents:
            assert copy.match(chain(document)) == tree.match(chain(document))
            for worker in (A, B, C):
                touched = last_touched(tree, chain(document), worker)
                assert last_touched(copy, chain(document), worker) == (None if touched is None else touched + 50)
        assert copy.chunks == tree.chunks
        if not tree.chunks:
            break
        for worker in (A, B, C):
            assert copy.evict(worker, 1) == tree.evict(worker, 1)


@given(insertions, insertions, st.integers(1, 8))
def test_a_tree_may_change_while_it_is_saved(
    before: list[tuple[str, WorkerId, float]], meanwhile: list[tuple[str, WorkerId, float]], evicted: int
) -> None:
    """Everything saved was held at some time since saving began, and nothing saved contradicts the rest."""
    tree, now = tree_of(before)
    documents = {document for document, _, _ in (*before, *meanwhile)}
    most = {
        (document, worker): tree.match(chain(document)).get(worker, 0) for document in documents for worker in (A, B, C)
    }
    pieces = []
    changes = iter(meanwhile)
    for piece in saved_prefixes(tree, now, 1000, 1000, piece_touches=1):
        pieces.append(piece)
        for document, worker, _ in (change for change, _ in zip(changes, range(2), strict=False)):
            tree.insert(chain(document), worker, now)
            tree.evict(worker, evicted)
            for (each, holder), held in most.items():
                most[each, holder] = max(held, tree.match(chain(each)).get(holder, 0))
    copy = restored_tree(pieces, now)
    for (document, worker), held in most.items():
        assert copy.match(chain(document)).get(worker, 0) <= max(held, 0)


def test_the_newest_prefixes_are_saved_first() -> None:
    """If not all prefixes are saved, each worker in turn saves its newest; limits hold for prefixes and for chunks."""
    tree, now = tree_of([(word, worker, 1.0) for word in ("xxxx", "yyyy", "xyxy") for worker in (A, B)])
    two = restored_tree(list(saved_prefixes(tree, now, 2, 1000)), now)
    assert [two.match(chain(word)) for word in ("xyxy", "yyyy")] == [{A: 4, B: 4}, {}]
    four = restored_tree(list(saved_prefixes(tree, now, 1000, 7)), now)
    assert four.chunks == 4
    assert four.match(chain("xyxy")) == {A: 4, B: 4}


@pytest.mark.parametrize("policy", [*FAIR, "d2lpm+vtc_predict", "client_rr+dlpm", "pooled_fcfs", "rpm", "preble"])
@given(history=histories)
@settings(max_examples=20)
def test_deficits_service_and_matches_survive(policy: str, history: list[tuple[str, str, int]]) -> None:
    """Whatever was served, a restored scheduler has its deficits, service and matches; requests in flight are gone."""
    scene = scene_of(policy, history)
    for request in list(scene.requests):
        scene.cancel(request)
    pieces = list(snapshot(scene.scheduler, scene.now))
    copy = restored(policy, pieces, 7.0, "w1", "w2")
    copy.scheduler.ledger.check_conservation()
    for client in map(ClientId, CLIENTS):
        for worker in map(WorkerId, ("w1", "w2")):
            assert copy.deficit(client, worker) == scene.deficit(client, worker)
    accounts = scene.scheduler.ledger.accounts
    assert {client: account.served for client, account in copy.scheduler.ledger.accounts.items()} == {
        client: account.served for client, account in accounts.items() if account.served != Tokens()
    }
    for _, prompt, _ in history:
        asked = CoreRequest(RequestId("q"), ClientId("q"), MODEL, (key(prompt),))
        assert copy.scheduler.prefixes.match(asked) == scene.scheduler.prefixes.match(asked)
    assert counted(snapshot(copy.scheduler, 7.0)) == counted(pieces)


@pytest.mark.parametrize("policy", FAIR)
@given(history=histories)
@settings(max_examples=20)
def test_a_snapshot_changes_nothing(policy: str, history: list[tuple[str, str, int]]) -> None:
    """Snapshots after each event change no later command, so a journal replays without them."""
    plain, watched = scene_of(policy, history), Scene(policy, *SMALL, workers=("w1", "w2"), settings=ONE_AT_A_TIME)
    for client, prompt, output in history:
        watched.now += 1.0
        list(snapshot(watched.scheduler, watched.now))
        request = watched.arrive(client, prompt, limit=output, group=GROUPS.get(client))
        if len(watched.dispatched) % 2 and request in watched.dispatched:
            watched.serve(request, output)
    assert watched.dispatched == plain.dispatched
    assert list(snapshot(watched.scheduler, watched.now)) == list(snapshot(plain.scheduler, plain.now))


@pytest.mark.parametrize("policy", ["dlpm_home", "d2lpm"])
def test_debts_hold_until_clients_contend_again(policy: str) -> None:
    """The first clients after a restart find an empty queue, which forgives no debt; an idle fleet later does."""
    rows = (SavedCounter(ClientId("ann"), None if policy == "dlpm_home" else WorkerId("w1"), -500.0, 70.0),)
    scene = restored(policy, [Counters("order", rows)], 0.0, "w1")
    for client in ("bob", "cy"):
        scene.serve(scene.arrive(client, "x"))
        assert scene.deficit("ann").order == -500.0
    running = [scene.arrive(client, "xy") for client in ("bob", "cy", "dan")]
    scene.serve_all()
    assert len(running) == 3
    scene.arrive("bob", "x")
    assert scene.deficit("ann").order == 70.0


@pytest.mark.parametrize("policy", ["dlpm_home", "d2lpm"])
def test_a_groups_debt_holds_as_long(policy: str) -> None:
    """A group's debt survives a restart even if none of its members is remembered."""
    rows = (SavedGroup(GroupId("g"), None if policy == "dlpm_home" else WorkerId("w1"), -500.0, 70.0),)
    scene = restored(policy, [Groups(rows)], 0.0, "w1")
    scene.start(scene.arrive("bob", "x"))
    scene.arrive("eve", "x", group="g")
    assert scene.deficit("eve").order == -500.0


@pytest.mark.parametrize("policy", FAIR)
def test_a_group_gains_nothing_by_a_restart(policy: str) -> None:
    """The debt is the group's own and not only its members', so a new member does not go before others."""
    scene = Scene(policy, *SMALL, workers=("w1",), settings=ONE_AT_A_TIME)
    scene.arrive("dan", "x")
    for number in range(4):
        scene.arrive(f"member{number}", "xyxy", limit=90, group="g")
        scene.arrive("bob", "y")
    for _ in range(9):
        (running,) = scene.scheduler.attempts
        scene.serve(running, 90 if running.startswith("member") else 0)
    saved = [piece for piece in snapshot(scene.scheduler, scene.now) if isinstance(piece, Groups)]
    assert [row.group for piece in saved for row in piece.rows] == ["g"]
    copy = restored(policy, list(snapshot(scene.scheduler, scene.now)), scene.now, "w1")
    first = copy.arrive("dan", "x")
    known, stranger, again = copy.arrive("bob", "y"), copy.arrive("eve", "xyxy", group="g"), copy.arrive("bob", "y")
    for request in (first, known, again):
        copy.serve(request)
    assert copy.order == [first, known, again, stranger]


def test_a_worker_that_restarted_meanwhile_holds_nothing() -> None:
    """A worker has restarted if its first report counts less than its last one before the router's restart; then its
    cache is empty.
    """
    scene = Scene("d2lpm", workers=("w1",))
    scene.serve(scene.arrive("ann", "xxxx"))
    before = CacheReport(computed_tokens=1000.0)
    scene.feed(WorkerReported(WorkerId("w1"), 0, 0, cache=before))
    pieces = list(snapshot(scene.scheduler, scene.now))
    for computed, held in ((1000.0, 128.0), (10.0, 0.0)):
        copy = restored("d2lpm", pieces, 0.0, "w1")
        copy.feed(WorkerReported(WorkerId("w1"), 0, 0, cache=CacheReport(computed_tokens=computed)))
        assert copy.scheduler.mirror.held_tokens(WorkerId("w1")) == held


@pytest.mark.parametrize(
    "piece",
    [
        Clients((SavedClient(ClientId("a"), 0.0, Tokens()),)),
        Clients((SavedClient(ClientId("a"), 1.0, Tokens(-1)),)),
        Counters("order", (SavedCounter(ClientId("a"), None, float("nan"), 1.0),)),
        Counters("placement", (SavedCounter(ClientId("a"), A, 1.0, -1.0),)),
        Groups((SavedGroup(GroupId("g"), A, float("inf"), 1.0),)),
        Groups((SavedGroup(GroupId("g"), A, 1.0, 0.0),)),
        Prefixes((SavedNode(0, b"12345678"),), ()),
        Prefixes((SavedNode(-1, b"1234567"),), ()),
        Prefixes((SavedNode(-1, b""),), ()),
        Prefixes((), (SavedTouch(A, 0, 1.0),)),
        Prefixes((SavedNode(-1, b"12345678"),), (SavedTouch(A, -1, 1.0),)),
        Prefixes((SavedNode(-1, b"12345678"),), (SavedTouch(A, 0, float("inf")),)),
    ],
)
def test_contradictory_pieces_are_rejected_as_a_whole(piece: Piece) -> None:
    """An invalid piece, and all pieces before it, leave the scheduler as it was."""
    scheduler = Scheduler(POLICIES["dlpm_home"], SchedulerSettings(), Parameters(), Random(0))
    good = Clients((SavedClient(ClientId("b"), 1.0, Tokens(1, 2, 3)),))
    with pytest.raises(ValueError, match="invalid"):
        restore(scheduler, [good, piece], 0.0)
    assert list(snapshot(scheduler, 0.0)) == []
    assert scheduler.policy.deficit(ClientId("a"), A) == Deficit()
