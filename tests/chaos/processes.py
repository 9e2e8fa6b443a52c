"""The processes: emulated workers that can be killed and restarted, and a router in front of them."""

import asyncio
import contextlib
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any, Final

import aiohttp

from tests.support.processes import process_flags

from .asks import MODEL

SPEAKS: Final = re.compile(r"(?:workers: \S+ \S+ on|d2lpm: listening on) http://[^:]+:(?P<port>\d+)")
PATIENCE: Final = 180.0
"""Seconds in which a process must begin to listen."""
LOOK: Final = 0.05
"""Seconds between two polls of a condition."""
LOOK_SECONDS: Final = 1.0
"""Seconds after which a look at the router is given up."""
GONE: Final = (FileNotFoundError, ProcessLookupError)
"""What it raises to read a file of a process that has ended; the second one if it ended after the file was opened."""
LISTENS: Final = "0A"
"""The state of a listening socket in /proc/net/tcp."""
END: Final = 60.0
"""Seconds that a process has to exit after SIGTERM."""


class Server:
    """A process that listens for calls."""

    def __init__(
        self,
        module: str,
        *flags: str,
        log: Path | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
        within: Sequence[str] = (),
    ) -> None:
        """`port`: where it listens after each start; 0 for a new one each time; `host`: at which address; `within`:
        words before the command, which run it elsewhere.
        """
        self.source: Path | None = None
        """The folder with the code of the next start; None for this repository's."""
        self.port = port
        self._wanted = port
        self._host = host
        named = () if host == "127.0.0.1" else ("--host", host)
        self._command = [*within, sys.executable, "-m", module, *flags, *named]
        self._log = log
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """The URL that it listens on."""
        return f"http://{self._host}:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it listens. Raises RuntimeError if it does not."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("D2LPM_")}
        if self.source is not None:
            environment["PYTHONPATH"] = str(self.source)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log.open("ab")) if self._log else None
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--port",
                str(self._wanted),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=environment,
                cwd=self.source,
            )
        async with asyncio.timeout(PATIENCE):
            self.port = await self._greeted()

    async def _greeted(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if found := SPEAKS.match(line.decode()):
                return int(found["port"])
        raise RuntimeError(f"{' '.join(self._command)} has ended before it listened")

    def signal(self, number: Signals) -> None:
        """Send a signal if the process runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self, number: Signals = SIGKILL) -> int | None:
        """End it by a signal, or by SIGKILL after a timeout; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            process.send_signal(SIGCONT)  # a stopped process does not handle SIGTERM
        try:
            async with asyncio.timeout(END):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        return process.returncode


def worker(dialect: str, *flags: str, host: str = "127.0.0.1") -> Server:
    """Return an emulated worker, which also ends when this process does."""
    return Server("workers", "--dialect", dialect, "--model", MODEL, "--exit-with-parent", *flags, host=host)


@contextlib.asynccontextmanager
async def running_workers(
    number: int, speed: float, batch: int, host: str = "127.0.0.1"
) -> AsyncIterator[list[Server]]:
    """Run workers, half of them vLLM and half SGLang. `speed`: of their hardware; `batch`: calls that run at once."""
    flags = ("--hardware", "a100-mistral-7b", "--speed", str(speed), "--max-running", str(batch))
    made = [worker(("vllm", "sglang")[each % 2], *flags, host=host) for each in range(number)]
    try:
        await asyncio.gather(*(each.start() for each in made))
        yield made
    finally:
        await asyncio.gather(*(each.end() for each in made))


def router(
    log: Path,
    workers: Sequence[str],
    *flags: str,
    port: int = 0,
    host: str = "127.0.0.1",
    within: Sequence[str] = (),
) -> Server:
    """Return the router in front of workers at these URLs, as `d2lpm serve` starts it.

    `port`, `host` and `within`: as in `Server`.
    """
    named = [flag for url in workers for flag in ("--worker", url)]
    return Server("router", "serve", *named, *process_flags(), *flags, log=log, port=port, host=host, within=within)


def sockets(pid: int) -> int:
    """Count the sockets that a process has open."""
    return sum(link.startswith("socket:") for link in _open_files(pid))


def _open_files(pid: int) -> Iterator[str]:
    """Yield what each open file of a process is, except of those that it closes meanwhile."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(each)


def router_processes(pid: int) -> dict[str, int]:
    """Return the processes that the supervisor of a router with `--processes` has started, by name, with their ids.

    Children are in the order of their start, so the second scheduler is the standby.
    """
    found = dict[str, int]()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split():
        words = _words(child)
        if "process" in words:
            name = words[words.index("process") + 1]
            found["standby" if name in found else name] = int(child)
    return found


def signal_all(proxy: Server, number: Signals) -> None:
    """Send SIGSTOP, SIGCONT or SIGKILL to all processes of a router.

    The supervisor is stopped first, so that it starts none in their place, and is sent the signal last: once it is
    killed, its children are no longer its own.
    """
    proxy.signal(SIGSTOP)
    for pid in router_processes(proxy.pid).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    proxy.signal(number)


def _words(pid: str) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except GONE:
        return []


def runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended and is not waited for does not."""
    try:
        return _stat(pid)[0] != "Z"
    except GONE:
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped; it is so a moment after it was sent SIGSTOP."""
    return _stat(pid)[0] == "T"


def cpu_ticks(pid: int) -> int:
    """Return the CPU time that a process has used, in the kernel's ticks."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12])


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on. Raises one of `GONE` if there is none."""
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()


def connections(pid: int, port: int) -> int:
    """Count the connections of clients that a process has accepted at this port."""
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in _open_files(pid)}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text("ascii").splitlines()[1:]]
    return sum(int(row[1].split(":")[1], 16) == port and row[3] != LISTENS and row[9] in inodes for row in rows)


async def is_ready(http: aiohttp.ClientSession, proxy: Server) -> bool:
    """Return whether the router says that it is ready, and its scheduler runs."""
    async with http.get(f"{proxy.url}/ready") as response:
        return response.status == 200 and (await response.json()).get("degraded") != "scheduler away"


async def holds(
    http: aiohttp.ClientSession, proxy: Server, true: Callable[[aiohttp.ClientSession, Server], Awaitable[bool]]
) -> bool:
    """Return whether something is true of the router. It is not while the router does not answer."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            return await true(http, proxy)
    return False


async def get_json(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the answer of a control path."""
    async with http.get(url) as response:
        response.raise_for_status()
        body: dict[str, Any] = await response.json()
        return body


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds. Raises TimeoutError if it never does."""
    async with asyncio.timeout(PATIENCE):
        while not await true():  # noqa: ASYNC110 - nobody is there to set an event
            await asyncio.sleep(LOOK)
