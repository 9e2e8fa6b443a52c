"""The keys of a cluster, without a server: `replicas/test_store` has the scripts in one."""

from typing import Any

import pytest

from router.cluster.store import ClusterStore, StoreUnreachable, store_address


class Garbled(ClusterStore):
    """Finds what this version of the router does not write."""

    async def _ask(self, answer: Any) -> Any:
        answer.close()
        return [b"of another version", b"7", 1500]


async def test_a_lease_that_is_not_understood_is_a_fault_of_the_store() -> None:
    """Fronts stay with their leader and candidates wait, as while it does not answer."""
    async with Garbled(store_address("redis://127.0.0.1/name")) as store:
        with pytest.raises(StoreUnreachable, match="not understood"):
            await store.view()
