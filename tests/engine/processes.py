"""Real servers as child processes: started, awaited, checked, and stopped by their own pid."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import httpx

from .wire import get

STOP_SECONDS = 10.0
FIRST_PORTS = iter(random.sample(range(20_000, 32_000, 2), 6_000))
"""Ports in a random order, each tried once: those given before may not be taken yet."""


def wait_until(condition: Callable[[], bool], seconds: float, what: str, seen: Sequence[object] = ()) -> None:
    """Poll until the condition holds. Raises AssertionError at the deadline, with the last value of `seen`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}; last seen: {seen[-1:]}"
        time.sleep(0.02)


def free_ports(count: int) -> int:
    """Return the first of `count` free consecutive ports, below the range that the system uses for connections.

    A server may take long to start, and until then, and while it is dead, its port is not taken. A connection that took
    it meanwhile could even be one to the dead server, which then reaches itself.
    """
    for first in FIRST_PORTS:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("", port)))
            return first
    raise RuntimeError(f"there are no {count} free ports in a row")


def _read_all(files: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of those files that can still be read."""
    for file in files:
        with contextlib.suppress(OSError):
            yield file.read_text("utf-8", "replace")


class Process(Protocol):
    """What a server needs of its process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its id, and that of its process group."""

    def poll(self) -> int | None:
        """Return None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended. Raises TimeoutExpired after `timeout` seconds."""

    def terminate(self) -> None:
        """Send SIGTERM."""


class Server:
    """One HTTP server on loopback; `start` may be called again after `kill`, on the same port.

    Command and environment contain `{port}` in place of the port. Output goes to `log`; the process runs in `folder`,
    or in that of this process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.port = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        # setpriv ends the child if this process ends without cleaning up, as after SIGTERM.
        self._command = ["setpriv", "--pdeathsig", "TERM", *(part.format(port=self.port) for part in command)]
        self._environment = {key: value.format(port=self.port) for key, value in environment.items()}
        self._folder = folder
        self._process: Process | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._environment},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, path: str, seconds: float) -> None:
        """Wait until GET `path` answers 200. Raises RuntimeError with the end of the log on timeout."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.alive:
            with contextlib.suppress(httpx.TransportError):
                if get(self.url + path).status == 200:
                    return
            time.sleep(0.1)
        what = f"is not ready after {seconds:.0f} s" if self.alive else "has ended"
        raise RuntimeError(f"{self.name} {what}; its log ends:\n{self.log_tail()}")

    def log_tail(self, since: int = 0, characters: int = 4000) -> str:
        """The last of what was printed after the first `since` bytes."""
        return self.log.read_bytes()[since:].decode(errors="replace")[-characters:]

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process and its running children, in seconds."""
        assert self._process is not None, f"{self.name} runs"
        group = self._process.pid
        fields = [text.rpartition(")")[2].split() for text in _read_all(Path("/proc").glob("[0-9]*/stat"))]
        ticks = sum(int(each[11]) + int(each[12]) for each in fields if int(each[2]) == group)
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Send SIGTERM, then kill what is left of the process group."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def stand_still(self) -> None:
        """Stop the process and its children, until `go_on`: the kernel accepts connections, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the process and its children run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process and its children: a worker that dies without notice."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
