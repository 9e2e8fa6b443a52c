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
