"""The router as `d2lpm serve` starts it, before emulated workers: each is a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from router.emulate import COMMAND, emulated

LISTENING: Final = re.compile(r"d2lpm: listening on http://(?P<host>[^:]+):(?P<port>\d+)")
MODEL: Final = "emulated"
END: Final = 30.0
"""Seconds that the router has to end when it is told to."""


@dataclass(frozen=True, slots=True)
class Process:
    """A router that listens."""

    address: tuple[str, int]
    pid: int

    @property
    def url(self) -> str:
        """Its address."""
        return "http://{}:{}".format(*self.address)

    @property
    def rss(self) -> int:
        """Bytes of its memory that are in use."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])

    @property
    def descriptors(self) -> int:
        """Files and sockets that it has open."""
        return len([*Path(f"/proc/{self.pid}/fd").iterdir()])

    @property
    def cpu_seconds(self) -> float:
        """That it has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def routed(workers: int, worker_flags: Sequence[str], router_flags: Sequence[str]) -> Iterator[Process]:
    """Start workers and a router; ends them on the way out. RuntimeError if the router does not start."""
    with emulated(workers, [*COMMAND, "--model", MODEL, *worker_flags]) as started:
        named = [flag for worker in started for flag in ("--worker", worker.url)]
        command = [sys.executable, "-m", "router", "serve", "--port", "0", "--log-level", "error"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("D2LPM_")}
        with subprocess.Popen(
            [*command, *named, *router_flags], env=environment, stdout=subprocess.PIPE, text=True, process_group=0
        ) as process:
            try:
                assert process.stdout is not None
                if (found := LISTENING.match(line := process.stdout.readline())) is None:
                    raise RuntimeError(f"the router did not start; it said {line.strip()!r}")
                yield Process((found["host"], int(found["port"])), process.pid)
            finally:
                process.terminate()
                try:
                    process.wait(END)
                except subprocess.TimeoutExpired:
                    process.kill()
