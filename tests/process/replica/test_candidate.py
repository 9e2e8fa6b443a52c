"""A replica that leads, and its lease."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec
import pytest

from router.cluster.lease import LeaderRecord, StoreView
from router.cluster.state_in_store import StateManifest
from router.cluster.store import ClusterStore, StoreUnreachable
from router.errors import ConfigError
from router.persistence.state_file import FORMAT, encode_header, new_header
from router.process.replica.candidate import _win, released_in_the_end

RECORD = LeaderRecord(3, "a", "run", "127.0.0.1:7", 0.0)


class Leases:
    """A store that answers, or does not."""

    def __init__(self, *, answers: bool) -> None:
        self.released: list[LeaderRecord] = []
        self._answers = answers

    async def release(self, record: LeaderRecord) -> None:
        if not self._answers:
            raise StoreUnreachable("gone")
        self.released.append(record)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_run_that_fails_gives_the_lease_up(answers: bool) -> None:
    """Another replica leads then, instead of this one, which would fail again; the reason is passed on."""
    leases = Leases(answers=answers)
    with pytest.raises(ConfigError, match="no such file"):
        async with released_in_the_end(cast("ClusterStore", leases), RECORD):
            raise ConfigError("no such file")
    assert leases.released == ([RECORD] if answers else [])


class FreeLease:
    """A store whose lease is free, and whose state is of a newer router at the first looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.waits: list[str] = []

    async def view(self) -> StoreView:
        return StoreView(None, 3)

    async def manifest(self) -> bytes:
        self.looks -= 1
        header = replace(new_header("dlpm", b""), d2lpm_state=FORMAT + (self.looks >= 0))
        return msgspec.msgpack.encode(StateManifest(encode_header(header), ()))

    async def waiting(self, replica: str) -> Sequence[str]:
        self.waits.append(replica)
        return ()

    async def acquire(self, wanted: LeaderRecord, floor: int) -> LeaderRecord:
        assert self.looks < 0
        return replace(wanted, epoch=floor + 1)


async def test_an_older_router_does_not_lead_with_a_newer_state(caplog: pytest.LogCaptureFixture) -> None:
    """It neither takes the lease nor says that it waits, logs that once, and leads once there is no such state."""
    store = FreeLease(3)
    record = await _win(cast("ClusterStore", store), "a", "127.0.0.1:7")
    assert record.epoch == 4
    assert store.waits == []
    assert [each for each in caplog.messages if "newer router" in each] == caplog.messages[:1]


class SlowStore:
    """A store with a clock of its own, which moves while it answers. Its lease ends by itself."""

    def __init__(self, ends_at: float, *delays: float) -> None:
        """`delays`: how long each of the first looks takes; the store has counted at their begin."""
        self.now = 0.0
        self.looks: list[float] = []
        """When it was looked at."""
        self._ends_at = ends_at
        self._delays = [*delays]

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def view(self) -> StoreView:
        self.looks.append(self.now)
        left = self._ends_at - self.now
        self.now += self._delays.pop(0) if self._delays else 0.0
        return StoreView(RECORD if left > 0 else None, 3, max(0.0, left))

    async def manifest(self) -> None:
        """There is no state."""

    async def waiting(self, _: str) -> Sequence[str]:
        return ()

    async def acquire(self, wanted: LeaderRecord, floor: int) -> LeaderRecord:
        return replace(wanted, epoch=floor + 1)


async def test_the_end_of_a_lease_is_no_hand_over_where_the_store_answers_late() -> None:
    """A replica that waits takes the lease at the first look after its end. Only one that was given up early is left
    for half a second longer; an answer that came late does not make it end later.
    """
    store = SlowStore(0.65, 0.4)
    record = await _win(cast("ClusterStore", store), "b", "127.0.0.1:8", store.clock, store.sleep)
    assert record.epoch == 4
    assert store.looks == [0.0, 0.9], "the second look is the first after the end"
