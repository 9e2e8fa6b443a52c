"""A store, and replicas of a router that are processes on addresses of 127.0.0.0/8."""

import asyncio
import contextlib
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any, Final

import aiohttp
import trustme

from tests.chaos.processes import Server, router, router_processes, until
from tests.cluster.replicas.environment import STORE, library_path, program
from tests.cluster.replicas.network import REPLICAS, Network
from tests.cluster.test_tls import replica_of

KEY: Final = "the operator of the tests"
OPERATOR: Final = {"authorization": f"Bearer {KEY}"}
NAME: Final = "tests"
LOOPBACK: Final = "127.0.0.1"


class Store:
    """A Valkey or Redis server that keeps nothing on disk: started again, it is empty."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port = port
        self._host = host
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """The URL of the cluster."""
        return f"redis://{self._host}:{self.port}/{NAME}"

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        server = program(STORE)
        assert server is not None, "`make test-cluster` gets one"
        flags = ("--port", str(self.port), "--bind", self._host, "--save", "", "--appendonly", "no")
        self._process = await asyncio.create_subprocess_exec(
            server,
            *flags,
            "--protected-mode",
            "no",
            stdout=DEVNULL,
            env={**os.environ, **library_path()},
            cwd="/",
        )
        await until(self._listens)

    async def _listens(self) -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(self._host, self.port)
            writer.close()
            return True
        return False

    async def end(self, number: Signals = SIGKILL) -> None:
        """End it by a signal."""
        if self._process is not None:
            self._process.send_signal(number)
            await self._process.wait()
            self._process = None


class Replica:
    """One replica of the router."""

    def __init__(self, host: str, server: Server) -> None:
        self.host = host
        """The address of its scheduler while it leads."""
        self.server = server

    def pid(self, name: str) -> int:
        """Return the id of one of its processes."""
        return router_processes(self.server.pid)[name]

    def signal(self, name: str, number: Signals) -> None:
        """Send a signal to one of its processes."""
        os.kill(self.pid(name), number)


async def cut_connections(host: str) -> bool:
    """Have the kernel cut the connections to an address, as a router between machines does that forgets them.

    Returns False if this kernel or this user cannot.
    """
    if (ss := shutil.which("ss")) is None:
        return False
    flags = ("-K", "-H", "-t", "-n", "state", "established", "src", host)
    process = await asyncio.create_subprocess_exec(ss, *flags, stdout=PIPE, stderr=DEVNULL)
    found, _ = await process.communicate()  # it shows what it has cut
    return process.returncode == 0 and bool(found.strip())


class Cluster:
    """Replicas with their store."""

    def __init__(self, store: Store, replicas: Sequence[Replica], http: aiohttp.ClientSession) -> None:
        self.store = store
        self.replicas = replicas
        self._http = http

    async def report(self, replica: Replica | None = None) -> dict[str, Any] | None:
        """Return what a replica, by default the first, shows of the cluster; None if nobody leads."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(2.0):
                async with self._http.get(f"{(replica or self.replicas[0]).server.url}/cluster") as response:
                    if response.status == 200:
                        found: dict[str, Any] = await response.json()
                        return found
        return None

    async def epoch(self) -> int:
        """Return the epoch of the leader."""
        return (await self.whole())["epoch"]  # type: ignore[no-any-return]

    async def whole(self) -> dict[str, Any]:
        """Wait until a leader serves the fronts of all replicas, two replicas wait, and its state is saved.

        Returns its report.
        """
        found: dict[str, Any] = {}

        async def complete() -> bool:
            reports = [await self.report(replica) for replica in self.replicas]
            if None in reports:
                return False
            found.update(reports[0] or {})
            others = len(self.replicas) - 1
            return (
                len({report["epoch"] for report in reports if report}) == 1
                and len(found["fronts"]) == len(self.replicas)
                and len(found["waiting"]) == others
                and found["store"] == "ok"
            )

        await until(complete)
        return found

    async def leader(self) -> Replica:
        """Return the replica that leads."""
        host = (await self.whole())["address"].rpartition(":")[0]
        return next(replica for replica in self.replicas if replica.host == host)

    async def hand_over(self) -> None:
        """Have another replica lead."""
        async with self._http.post(f"{self.replicas[0].server.url}/cluster/handover") as response:
            response.raise_for_status()

    async def higher(self, epoch: int, replica: Replica | None = None) -> float:
        """Wait until a leader with a higher epoch answers at a replica. Returns how many seconds that took."""
        began = asyncio.get_running_loop().time()

        async def leads() -> bool:
            report = await self.report(replica)
            return report is not None and report["epoch"] > epoch

        await until(leads)
        return asyncio.get_running_loop().time() - began


async def free_port() -> int:
    """Return a port that nobody listens at."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


@contextlib.asynccontextmanager
async def running_cluster(
    folder: Path,
    workers: Sequence[str],
    *flags: str,
    count: int = REPLICAS,
    ports: Sequence[int] = (),
    network: Network | None = None,
    kubernetes: str = "",
    source: Path | None = None,
) -> AsyncIterator[Cluster]:
    """Run a store and replicas.

    `folder`: for their logs; `workers`: URLs; `flags`: more of each replica; `count`: how many replicas; `ports`: where
    their fronts listen, by default at new ones; `network`: None for loopback; `kubernetes`: the API that has the lease,
    if not the store; `source`: as in `Server`.
    """
    store = Store(await free_port(), LOOPBACK if network is None else network.store)
    secret = folder / "secret"
    secret.write_text("a secret of the tests")
    tls = replica_of(trustme.CA(), folder, "replica")
    replicas = []
    for number in range(1, count + 1):
        host = f"127.0.0.{10 + number}" if network is None else network.address(number)
        lease = ("--cluster", "kubernetes", "--cluster-store", store.url, "--kubernetes-api", kubernetes)
        where = lease if kubernetes else ("--cluster", store.url)
        own = (*where, "--cluster-address", f"{host}:0", "--processes", "2")
        same = ("--cluster-secret-file", str(secret), "--log-level", "warning", "--admin-key", KEY)
        files = (
            *("--cluster-tls-cert", str(tls.cert)),
            *("--cluster-tls-key", str(tls.key)),
            *("--cluster-tls-ca", str(tls.ca)),
        )
        given = (*own, *same, *files, *flags)
        port = ports[number - 1] if ports else 0
        listens, within = (LOOPBACK, ()) if network is None else (host, network.within(number))
        server = router(folder / f"log-{number}", workers, *given, port=port, host=listens, within=within)
        server.source = source
        replicas.append(Replica(host, server))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=OPERATOR) as http:
        try:
            await store.start()
            await asyncio.gather(*(replica.server.start() for replica in replicas))
            cluster = Cluster(store, replicas, http)
            await cluster.whole()
            yield cluster
        finally:
            await asyncio.gather(*(replica.server.end(SIGTERM) for replica in replicas))
            await store.end()
