"""The keys of a cluster, without a server: `replicas/test_store` has the scripts in one."""

import asyncio
from typing import Any

import pytest

from router.cluster.lease import Renewal
from router.cluster.store import ClusterStore, StoreUnreachable, new_record, store_address

REFUSES = b"-READONLY You can't write against a read only replica.\r\n"
TAKES = b":1\r\n"


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


async def test_a_store_that_refuses_is_looked_up_again() -> None:
    """Its name may lead to another server by now, as after a failover: the old one lives on, and only reads."""
    answers = iter((REFUSES, TAKES))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = next(answers)
        while line := await reader.readline():  # `*N`, the words that follow, each after its length
            words = []
            for _ in range(int(line[1:])):
                length = int((await reader.readline())[1:])
                words.append((await reader.readexactly(length + 2))[:-2])
            writer.write(answer if words[0] == b"EVAL" else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    record = new_record("replica", "run", "127.0.0.1:1")
    async with server, ClusterStore(store_address(f"redis://127.0.0.1:{port}/name")) as store:
        assert [await store.renew(record, 2.0) for _ in range(2)] == [Renewal.UNREACHABLE, Renewal.KEPT]
