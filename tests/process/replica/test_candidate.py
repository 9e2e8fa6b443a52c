"""A replica that leads, and its lease."""

from typing import cast

import pytest

from router.cluster.lease import LeaderRecord
from router.cluster.store import ClusterStore, StoreUnreachable
from router.errors import ConfigError
from router.process.replica.candidate import released_in_the_end

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
