"""The scripts of the lease and of the state, in a real Valkey or Redis server."""

from collections.abc import AsyncIterator

import pytest

from router.cluster.lease import START_SECONDS, LeaderRecord, Renewal
from router.cluster.store import (
    ClusterStore,
    SavedElsewhere,
    SaveRefused,
    StoreUnreachable,
    new_record,
    store_address,
)
from tests.cluster.replicas.replicas import Store, free_port


@pytest.fixture
async def server() -> AsyncIterator[Store]:
    """An empty server."""
    store = Store(await free_port())
    await store.start()
    yield store
    await store.end()


@pytest.fixture
async def store(server: Store) -> AsyncIterator[ClusterStore]:
    """The keys of a cluster in it."""
    async with ClusterStore(store_address(server.url), 30.0) as made:
        yield made


async def leader(store: ClusterStore, replica: str, floor: int = 0) -> LeaderRecord:
    """A replica that takes the lease."""
    record = await store.acquire(new_record(replica, f"run-of-{replica}", "127.0.0.1:7"), floor)
    assert record is not None
    return record


async def test_one_replica_at_a_time_has_the_lease_and_each_epoch_is_higher(store: ClusterStore) -> None:
    """Another gets it once it is released; a replica's own next run gets it at once."""
    first = await leader(store, "a")
    assert await store.acquire(new_record("b", "run", "127.0.0.1:8"), 0) is None
    again = await leader(store, "a")
    await store.release(first)
    assert (await store.view()).leader == again
    await store.release(again)
    third = await leader(store, "b")
    assert (first.epoch, again.epoch, third.epoch) == (1, 2, 3)
    assert (await store.view()).epoch == 3


async def test_a_look_says_how_long_the_lease_lasts(store: ClusterStore) -> None:
    """As the store counts it: for nobody's lease that is no time."""
    assert (await store.view()).seconds_left == 0
    assert await store.renew(await leader(store, "a"), 15.0) is Renewal.KEPT
    assert START_SECONDS < (await store.view()).seconds_left <= 15.0


async def test_a_leader_that_was_followed_does_not_get_the_lease_back(store: ClusterStore) -> None:
    """Its renewal says so, and changes nothing."""
    first = await leader(store, "a")
    assert await store.renew(first, 2.0) is Renewal.KEPT
    await store.release(first)
    second = await leader(store, "b")
    assert await store.renew(first, 2.0) is Renewal.SUPERSEDED
    assert (await store.view()).leader == second


async def test_an_empty_store_gets_the_epoch_of_the_leader_back(server: Store, store: ClusterStore) -> None:
    """One that has begun there at 1 meanwhile is followed; after the leader's death, a floor has the same effect."""
    record = await leader(store, "a", floor=6)
    await server.end()
    assert await store.renew(record, 2.0) is Renewal.UNREACHABLE
    with pytest.raises(StoreUnreachable):
        await store.view()
    await server.start()
    usurper = await leader(store, "b")
    assert usurper.epoch == 1
    assert await store.renew(record, 2.0) is Renewal.KEPT
    assert await store.renew(usurper, 2.0) is Renewal.SUPERSEDED
    assert (await store.view()).leader == record
    assert (await leader(store, "a", floor=9)).epoch == 10


async def test_a_leader_below_what_a_front_has_obeyed_makes_room_for_a_higher_one(store: ClusterStore) -> None:
    """Only who holds the lease can raise the epoch."""
    low = await leader(store, "a")
    await store.raise_epoch(low, 7)
    assert await store.renew(low, 2.0) is Renewal.SUPERSEDED
    assert (await leader(store, "a")).epoch == 8
    await store.raise_epoch(low, 70)
    assert (await store.view()).epoch == 8


async def test_the_state_is_saved_by_the_leader_alone_and_in_steps(store: ClusterStore) -> None:
    """A step from another version than the stored one is refused, and so is a leader that was followed."""
    first = await leader(store, "a")
    await store.save(first.epoch, "", "1.1", b"m1", (), {"x": b"1", "y": b"2"})
    await store.save(first.epoch, "1.1", "1.2", b"m2", ["x"], {"z": b"3"})
    with pytest.raises(SavedElsewhere):
        await store.save(first.epoch, "1.1", "1.3", b"m3", (), {})
    second = await leader(store, "a")
    with pytest.raises(SaveRefused):
        await store.save(first.epoch, "1.2", "1.3", b"m3", (), {})
    assert second.epoch == 2
    assert await store.load() == {"version": b"1.2", "manifest": b"m2", "y": b"2", "z": b"3"}


async def test_who_waits_is_known_until_it_leads(store: ClusterStore) -> None:
    """A replica that takes the lease waits no more."""
    await store.waiting("a")
    assert set(await store.waiting("b")) == {"a", "b"}
    await leader(store, "a")
    assert await store.waiting() == ["b"]
