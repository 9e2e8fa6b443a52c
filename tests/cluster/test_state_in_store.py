"""The state in the store of a cluster: what is saved is loaded, and only what is new is sent."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import msgspec
import pytest

from router.cluster.state_in_store import StateInStore, StateManifest, is_newer, stored_state
from router.cluster.store import ClusterStore, SavedElsewhere, SaveRefused, StoreUnreachable
from router.core.model.cost import Tokens
from router.core.model.events import CacheReport
from router.core.model.request import ClientId, WorkerId
from router.core.model.saved import Cache, Clients, SavedClient
from router.persistence.state_file import FORMAT, NewerState, StateLine, encode_header, new_header
from tests.support.running import until


class MemoryStore:
    """Keeps the state as the store does, for one epoch."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.answers: list[asyncio.Event] = []
        """What each of the next saves waits for."""
        self.sent: list[int] = []
        """How many pieces each save has sent."""

    async def save(
        self, epoch: int, replaced: str, version: str, manifest: bytes, gone: Sequence[str], new: Mapping[str, bytes]
    ) -> None:
        if self.answers:
            await self.answers.pop(0).wait()
        if self.error is not None:
            raise self.error
        if epoch != 3:
            raise SaveRefused
        if replaced and self.kept.get("version") != replaced.encode():
            raise SavedElsewhere
        if not replaced:
            self.kept.clear()
        for name in gone:
            del self.kept[name]
        self.kept |= {"version": version.encode(), "manifest": manifest, **new}
        self.sent.append(len(new))


def clients(*served: int) -> list[StateLine]:
    """A piece for each client."""
    return [
        Clients((SavedClient(ClientId(f"client-{number}"), 1.0, Tokens(tokens, 0, 0)),))
        for number, tokens in enumerate(served)
    ]


class Scene:
    """What saves a state that the test sets."""

    def __init__(self, epoch: int = 3, cache_seconds: float = 0.0) -> None:
        self.store = MemoryStore()
        self.accounts = clients(1, 2, 3)
        self.caches: list[StateLine] = []
        self.saves = 0
        self.state = StateInStore(
            cast("ClusterStore", self.store),
            epoch,
            lambda: self.accounts,
            lambda: iter(self.caches),
            lambda: new_header("dlpm", b"s" * 16),
            cache_seconds,
            self.count,
        )

    def count(self) -> None:
        self.saves += 1

    def loaded(self) -> Sequence[object]:
        """The pieces that the next leader finds."""
        found = stored_state(self.store.kept)
        assert found is not None
        return found.pieces


async def test_only_new_pieces_are_sent_and_old_ones_removed() -> None:
    """What is stored is always the whole state of the last save, and nothing else."""
    scene = Scene()
    await scene.state.save()
    scene.accounts = clients(1, 2, 4)
    await scene.state.save()
    await scene.state.save()
    assert scene.store.sent == [3, 1, 0]
    assert scene.loaded() == clients(1, 2, 4)
    assert len(scene.store.kept) == 5
    assert scene.saves == 3


async def test_a_store_that_is_empty_again_gets_the_whole_state() -> None:
    """It is saved in the very next save, whatever the store has had before."""
    scene = Scene()
    await scene.state.save()
    scene.store.kept.clear()
    await scene.state.save()
    assert scene.loaded() == clients(1, 2, 3)
    assert scene.store.sent == [3, 3]


async def test_after_a_save_without_an_answer_the_whole_state_is_sent() -> None:
    """Nobody knows what the store has taken; the fronts are told of nothing that may not be saved."""
    scene = Scene()
    await scene.state.save()
    scene.store.error = StoreUnreachable("gone")
    await scene.state.save()
    assert (scene.saves, scene.state.failing, scene.state.failures) == (1, True, 1)
    scene.store.error = None
    await scene.state.save()
    assert (scene.saves, scene.state.failing, scene.store.sent) == (2, False, [3, 3])


async def test_one_save_at_a_time() -> None:
    """A hand-over saves while a save is under way: what is stored last is what the fronts are told of last."""
    scene, slow = Scene(), asyncio.Event()
    scene.store.answers = [slow]
    first = asyncio.create_task(scene.state.save())
    await until(lambda: not scene.store.answers)
    scene.accounts = clients(1, 2, 4)
    second = asyncio.create_task(scene.state.save())
    for _ in range(10):
        await asyncio.sleep(0)
    slow.set()
    await asyncio.gather(first, second)
    assert scene.loaded() == clients(1, 2, 4)
    assert scene.store.sent == [3, 1]


@pytest.mark.parametrize("how", ["the store says so", "a front has said so"])
async def test_a_leader_that_is_superseded_saves_nothing(how: str) -> None:
    """What the next leader has restored stays as it is."""
    scene = Scene(epoch=2 if how == "the store says so" else 3)
    scene.state.retired = how == "a front has said so"
    await scene.state.save()
    assert not scene.store.kept
    assert not scene.saves


async def test_caches_are_saved_more_rarely() -> None:
    """In between, those that were saved last stay part of the state."""
    cached: list[StateLine] = [Cache(WorkerId("w"), "m", CacheReport(born=1.0))]
    scene = Scene(cache_seconds=3600.0)
    scene.caches = list(cached)
    await scene.state.save()
    scene.caches.clear()
    await scene.state.save()
    assert scene.loaded() == [*clients(1, 2, 3), *cached]


def test_there_is_no_state_in_an_empty_store_and_a_damaged_one_is_refused() -> None:
    """A piece that is missing is seen."""
    assert stored_state({}) is None
    manifest = msgspec.msgpack.encode(StateManifest(b"{}", ("piece",)))
    with pytest.raises(ValueError, match="1 of its pieces"):
        stored_state({"manifest": manifest})
    with pytest.raises(ValueError, match="it is not a state file"):
        stored_state({"manifest": manifest, "piece": b""})


@pytest.mark.parametrize("newer", [0, 1])
def test_the_state_of_a_newer_router_is_recognized(newer: int) -> None:
    """A replica of the version before does not lead then, and says so; it would lose what clients owe."""
    header = replace(new_header("dlpm", b"secret"), d2lpm_state=FORMAT + newer)
    manifest = msgspec.msgpack.encode(StateManifest(encode_header(header), ()))
    assert is_newer(manifest) is bool(newer)
    if newer:
        with pytest.raises(NewerState, match="of a newer router"):
            stored_state({"manifest": manifest})
    else:
        assert stored_state({"manifest": manifest}) is not None


@pytest.mark.parametrize("manifest", [None, b"", b"damaged"])
def test_no_state_and_a_damaged_one_are_not_those_of_a_newer_router(manifest: bytes | None) -> None:
    """A replica may lead then."""
    assert not is_newer(manifest)
