"""The lease in Kubernetes: every conflict, expiry and clock skew case of client-go's leader election."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from router.cluster.kubernetes_lease import EPOCH, RECORD, KubernetesLease
from router.cluster.lease import LeaderRecord, Renewal, StoreView
from router.cluster.store import ClusterStore, StoreUnreachable
from router.upstream.discovery.kubernetes import KubernetesApi
from tests.support.lease_api import LeaseApi, lease_api
from tests.support.running import TIMEOUT_S, until

NAME = "llm"
LEASE_SECONDS, START_SECONDS = 3, 10
"""How long a lease lasts by default, and that of a new leader."""


class Store:
    """The store of the state, which notes what it is told."""

    def __init__(self) -> None:
        self.claimed: list[int] = []
        self.down = False

    async def __aenter__(self) -> "Store":
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def claim(self, epoch: int, replica: str) -> None:  # noqa: ARG002 - the signature of ClusterStore
        if self.down:
            raise StoreUnreachable("the store is down")
        self.claimed.append(epoch)

    async def waiting(self, replica: str = "") -> Sequence[str]:
        return [replica]


class Scene:
    """Replicas before one API, each with a clock of its own that the test sets."""

    def __init__(self, api: LeaseApi, stack: AsyncExitStack) -> None:
        self.api = api
        self.store = Store()
        self.time = 1000.0
        """What all clocks show."""
        self._stack = stack

    async def replica(self, token: Path | None = None) -> KubernetesLease:
        """A process of a replica."""
        address = KubernetesApi(self.api.url, "default", token)
        made = KubernetesLease(address, NAME, cast("ClusterStore", self.store), lambda: self.time)
        return await self._stack.enter_async_context(made)

    async def leader(self, name: str = "a") -> tuple[KubernetesLease, LeaderRecord]:
        """A replica that leads."""
        lease = await self.replica()
        record = await lease.acquire(wanted(name), 0)
        assert record is not None
        return lease, record

    @property
    def spec(self) -> dict[str, Any]:
        return self.api.spec(NAME)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with lease_api() as api, AsyncExitStack() as stack:
        yield Scene(api, stack)


def wanted(replica: str) -> LeaderRecord:
    return LeaderRecord(0, replica, f"run-of-{replica}", "10.0.0.5:7000", 12.3456789)


async def shows(lease: KubernetesLease, view: StoreView) -> None:
    """Wait until the watch has shown this."""
    async with asyncio.timeout(TIMEOUT_S):
        while await shown(lease) != view:  # noqa: ASYNC110 - the lease sets no event
            await asyncio.sleep(0.002)


async def shown(lease: KubernetesLease) -> StoreView | None:
    try:
        return await lease.view()
    except StoreUnreachable:
        return None


async def test_the_first_replica_creates_the_lease_with_the_fields_of_client_go(scene: Scene) -> None:
    """Readers such as `kubectl get lease` see who leads; annotations say where, and the store is told the epoch."""
    _, record = await scene.leader()
    assert (record.epoch, record.replica) == (1, "a")
    spec = scene.spec
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", START_SECONDS, 0)
    assert spec["acquireTime"] == spec["renewTime"] or spec["acquireTime"] < spec["renewTime"]
    assert len(spec["renewTime"]) == len("2006-01-02T15:04:05.000000Z")
    notes = scene.api.leases[NAME]["metadata"]["annotations"]
    assert (notes[RECORD], notes[EPOCH]) == (record.encoded(), "1")
    assert scene.store.claimed == [1]


async def test_of_two_that_create_the_lease_one_is_refused(scene: Scene) -> None:
    """Conflict 1: AlreadyExists. The loser is a candidate like any other."""
    lease = await scene.replica()
    scene.api.before_write = [(NAME, {"holderIdentity": "b", "leaseDurationSeconds": 10})]
    assert await lease.acquire(wanted("a"), 0) is None
    assert scene.spec["holderIdentity"] == "b"


async def test_of_two_that_take_an_ended_lease_one_is_refused(scene: Scene) -> None:
    """Conflict 2: the version has changed since it was read, so the write changes nothing."""
    _, record = await scene.leader("a")
    other = await scene.replica()
    assert (await other.view()).leader == record
    scene.time += START_SECONDS
    scene.api.before_write = [(NAME, {"holderIdentity": "c"})]
    assert await other.acquire(wanted("b"), 0) is None
    assert scene.spec["holderIdentity"] == "c"


async def test_a_renewal_that_another_write_has_crossed_is_made_again(scene: Scene) -> None:
    """Conflict 3: someone has edited the Lease; its holder holds it all the same, and the edit stays."""
    lease, record = await scene.leader()
    scene.api.before_write = [(NAME, {"strategy": "OldestEmulationVersion"})]
    assert await lease.renew(record, 2.0) is Renewal.KEPT
    assert (scene.spec["strategy"], scene.spec["leaseDurationSeconds"]) == ("OldestEmulationVersion", LEASE_SECONDS)


async def test_a_leader_that_another_has_followed_is_superseded(scene: Scene) -> None:
    """Conflict 4: it was cut off for longer than the lease lasts. It changes nothing."""
    first, record = await scene.leader("a")
    other = await scene.replica()
    scene.time += START_SECONDS
    second = await other.acquire(wanted("b"), 0)
    assert second is not None
    assert (second.epoch, scene.spec["leaseTransitions"]) == (2, 1)
    scene.time += LEASE_SECONDS
    assert await first.renew(record, 2.0) is Renewal.SUPERSEDED
    await first.release(record)
    await first.raise_epoch(record, 9)
    assert scene.spec["holderIdentity"] == "b"
    assert scene.api.leases[NAME]["metadata"]["annotations"][EPOCH] == "2"


async def test_a_lease_ends_when_it_has_not_changed_for_its_duration(scene: Scene) -> None:
    """Expiry 1: on the clock of the one that looks, and from when it first saw the lease as it is."""
    lease, record = await scene.leader()
    await lease.renew(record, 2.0)
    scene.time += 100
    late = await scene.replica()
    assert (await late.view()).leader == record
    scene.time += LEASE_SECONDS - 0.1
    assert await late.acquire(wanted("b"), 0) is None
    assert await lease.renew(record, 2.0) is Renewal.KEPT
    await until(lambda: _seen(late) == scene.api.leases[NAME]["metadata"]["resourceVersion"])
    scene.time += LEASE_SECONDS - 0.1
    assert (await late.view()).leader == record
    scene.time += 0.2
    assert await late.view() == StoreView(None, 1)


def _seen(lease: KubernetesLease) -> str | None:
    seen = lease._seen.lease
    return None if seen is None else seen.metadata.version


async def test_a_new_leader_has_longer_until_it_serves(scene: Scene) -> None:
    """Expiry 2: what it takes is longer than usual; its first renewal once it serves sets the usual time."""
    lease, record = await scene.leader()
    other = await scene.replica()
    scene.time += START_SECONDS - 0.1
    assert (await other.view()).leader == record
    await lease.renew(record, 2.0)
    assert scene.spec["leaseDurationSeconds"] == LEASE_SECONDS


async def test_a_busy_leader_has_longer(scene: Scene) -> None:
    """Expiry 3: the lease lasts as long as it asks for, and a second more, in whole seconds."""
    lease, record = await scene.leader()
    await lease.renew(record, 5.5)
    assert scene.spec["leaseDurationSeconds"] == 7


@pytest.mark.parametrize("written", ["1999-01-01T00:00:00.000000Z", "2199-01-01T00:00:00.000000Z"])
async def test_clocks_need_not_agree(scene: Scene, written: str) -> None:
    """Clock skew: what a leader writes as the time, by a clock that is years off, decides nothing."""
    _, record = await scene.leader()
    scene.api.change(NAME, renewTime=written, acquireTime=written, leaseDurationSeconds=2)
    other = await scene.replica()
    assert (await other.view()).leader == record
    assert await other.acquire(wanted("b"), 0) is None
    scene.time += 2
    assert (await other.view()).leader is None
    assert await other.acquire(wanted("b"), 0) is not None


async def test_a_released_lease_is_taken_at_once(scene: Scene) -> None:
    """Release: nobody holds it, for one second at most, and the epoch goes on from the one that it had."""
    lease, record = await scene.leader("a")
    await lease.release(record)
    assert (scene.spec["holderIdentity"], scene.spec["leaseDurationSeconds"]) == ("", 1)
    other = await scene.replica()
    assert await other.view() == StoreView(None, 1)
    second = await other.acquire(wanted("b"), 0)
    assert second is not None
    assert (second.epoch, scene.spec["leaseTransitions"]) == (2, 1)


async def test_the_next_run_of_the_same_replica_takes_its_lease_at_once(scene: Scene) -> None:
    """Its earlier run is dead: the supervisor never runs two. The epoch is above a floor, too."""
    await scene.leader("a")
    again = await (await scene.replica()).acquire(replace(wanted("a"), run="next"), 6)
    assert again is not None
    assert again.epoch == 7


async def test_a_leader_that_a_front_knows_better_writes_the_higher_epoch(scene: Scene) -> None:
    """Then it is superseded itself, and the next one begins above."""
    lease, record = await scene.leader()
    await lease.raise_epoch(record, 7)
    assert await lease.renew(record, 2.0) is Renewal.SUPERSEDED
    assert (await lease.view()).epoch == 7
    third = await lease.acquire(wanted("a"), 0)
    assert third is not None
    assert third.epoch == 8


async def test_a_lease_that_was_deleted_is_written_again_by_its_leader(scene: Scene) -> None:
    """As with a store that comes back empty. One that began at 1 meanwhile is followed by the higher epoch."""
    lease = await scene.replica()
    record = await lease.acquire(wanted("a"), 6)
    assert record is not None
    scene.api.delete(NAME)
    await shows(lease, StoreView(None, 0))
    _, usurper = await scene.leader("b")
    assert usurper.epoch == 1
    await shows(lease, StoreView(usurper, 1))
    assert await lease.renew(record, 2.0) is Renewal.KEPT
    assert (await lease.view()) == StoreView(record, 7)


async def test_while_the_api_does_not_answer_the_leader_only_knows_that(scene: Scene) -> None:
    """It goes on, and renews once the API answers again; a candidate takes nothing meanwhile."""
    lease, record = await scene.leader()
    scene.api.down = True
    assert await lease.renew(record, 2.0) is Renewal.UNREACHABLE
    with pytest.raises(StoreUnreachable, match="503"):
        await lease.view()
    with pytest.raises(StoreUnreachable):
        await lease.acquire(wanted("b"), 0)
    scene.api.down = False
    assert await lease.renew(record, 2.0) is Renewal.KEPT
    assert (await lease.view()).leader == record


async def test_without_a_role_the_api_says_so(scene: Scene) -> None:
    """403 is a fault like any other: replicas wait, and the log has the reason."""
    scene.api.forbidden = True
    lease = await scene.replica()
    with pytest.raises(StoreUnreachable, match="403"):
        await lease.view()


async def test_a_watch_shows_who_leads_without_asking(scene: Scene) -> None:
    """Fronts and candidates look at least twice a second; the API is asked once for each watch."""
    follower = await scene.replica()
    assert await follower.view() == StoreView(None, 0)
    await until(lambda: ("WATCH", "") in scene.api.calls)
    _, record = await scene.leader()
    await shows(follower, StoreView(record, 1))
    assert scene.api.calls.count(("WATCH", "")) <= 2


@pytest.mark.parametrize("how", ["ended", "too old"])
async def test_a_watch_that_ends_is_begun_again(scene: Scene, how: str) -> None:
    """What has changed in between is read first."""
    follower = await scene.replica()
    await until(lambda: ("WATCH", "") in scene.api.calls)
    scene.api.cut_watches() if how == "ended" else scene.api.expire_watches()
    _, record = await scene.leader()
    await shows(follower, StoreView(record, 1))
    await until(lambda: scene.api.calls.count(("WATCH", "")) >= 3)


async def test_the_lease_of_another_program_is_not_taken(scene: Scene) -> None:
    """Its name was chosen twice; the log says so."""
    scene.api.put(NAME, {"spec": {"holderIdentity": "another-controller", "leaseDurationSeconds": 15}})
    lease = await scene.replica()
    with pytest.raises(StoreUnreachable, match="another-controller, which is no replica"):
        await lease.acquire(wanted("a"), 0)


async def test_the_token_of_the_pod_is_read_for_each_call(scene: Scene, tmp_path: Path) -> None:
    """Kubernetes renews it."""
    token = tmp_path / "token"
    token.write_text("first\n")
    lease = await scene.replica(token)
    token.write_text("second\n")
    await lease.acquire(wanted("a"), 0)
    assert {("GET", "Bearer first"), ("POST", "Bearer second")} <= set(scene.api.calls)


async def test_a_replica_that_cannot_reach_the_store_of_the_state_leaves_the_lease_to_others(scene: Scene) -> None:
    """It could restore nothing, and save nothing."""
    lease = await scene.replica()
    scene.store.down = True
    with pytest.raises(StoreUnreachable, match="the store is down"):
        await lease.acquire(wanted("a"), 0)
    assert scene.spec["holderIdentity"] == ""


async def test_a_leader_tells_a_store_that_was_emptied_its_epoch(scene: Scene) -> None:
    """Without it no save would be accepted. While the store does not answer, the lease is held all the same."""
    lease, record = await scene.leader()
    scene.store.down = True
    await lease.renew(record, 2.0)
    scene.time += 1.0
    await until(lambda: lease._store_failing)
    assert await lease.renew(record, 2.0) is Renewal.UNREACHABLE
    assert scene.spec["leaseDurationSeconds"] == LEASE_SECONDS
    scene.store.down = False
    scene.store.claimed.clear()
    scene.time += 1.0
    await lease.renew(record, 2.0)
    await until(lambda: scene.store.claimed == [1])
    assert await lease.renew(record, 2.0) is Renewal.KEPT
