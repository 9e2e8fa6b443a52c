"""A router with emulated workers, and calls of many clients, as processes of their own."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

ROOT: Final = Path(__file__).parents[2]
CLIENTS: Final = 1000
LISTENING: Final = re.compile(r"listening on (http://\S+),")
HEAVY: Final = "heavy-light:in_flight=40,lights=5"
"""One client with 40 long calls open, beside five that send one at a time."""
SMALL: Final = ("--max-inflight", "12")
"""Settings under which these calls wait in the router, on any machine."""
LIGHT: Final = f"many-clients:client_count={CLIENTS},input=50,output=8"
"""A workload of `bench load` in which each of the clients calls now and then; `,rate=30` is calls per second."""
CALLS_AT_ONCE: Final = 20
END_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Stand:
    """A running router."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Return the processor time of the router so far, without its workers; of its own processes if it has some."""
        return sum(_cpu_seconds(pid) for pid in _family(self.pid))


@contextmanager
def running(*flags: str, workers: int = 3, identity: Sequence[str] = ("user", "address")) -> Iterator[Stand]:
    """Run `d2lpm serve` with emulated workers on a free port of loopback, and end it on exit.

    `identity`: by default clients have the names that they give.
    """
    command = [sys.executable, "-m", "router", "serve", "--port", "0", "--emulate", str(workers)]
    command += [*(word for source in identity for word in ("--identity", source)), *flags]
    with ended(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if listening := LISTENING.search(line):
                yield Stand(listening[1], process.pid)
                return
        raise RuntimeError("the router did not start")


@contextmanager
def load(url: str, *workloads: str, seconds: float = 900.0) -> Iterator[None]:
    """Drive a router with these workloads of `bench load`, each from a process of its own."""
    command = [sys.executable, "-m", "bench", "load", url, "--seconds", str(seconds), "--workload"]
    nowhere = subprocess.DEVNULL
    processes = []
    with ExitStack() as stack:
        for workload in workloads:
            process = subprocess.Popen([*command, workload], cwd=ROOT, stdout=nowhere, stderr=nowhere, text=True)
            processes.append(stack.enter_context(ended(process)))
        yield
        for process in processes:
            assert process.poll() is None, f"a load has ended with {process.returncode}"


def populate(url: str, clients: int = CLIENTS) -> None:
    """Let each of so many clients make one short call, and return once all are answered."""
    with httpx.Client(base_url=url, timeout=120.0) as http, ThreadPoolExecutor(CALLS_AT_ONCE) as callers:

        def call(number: int) -> None:
            body = {"model": "emulated", "prompt": f"Hello from {number}", "max_tokens": 2, "user": f"team-{number:04}"}
            http.post("/v1/completions", json=body).raise_for_status()

        for _ in callers.map(call, range(clients)):
            pass


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Terminate a process on exit, and kill it if it goes on all the same."""
    with process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _family(pid: int) -> list[int]:
    """Return a process of the router and those that it has started, without emulated workers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    own = [
        int(child) for child in children if b"workers" not in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    ]
    return [pid, *own]


def _cpu_seconds(pid: int) -> float:
    threads = Path(f"/proc/{pid}/schedstat").parent.glob("task/*/schedstat")
    return sum(int(thread.read_text("ascii").split()[0]) for thread in threads) / 1e9
