"""Workers and routers as processes, started by command line, so that any router can be compared."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any, Final, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

import orjson

from bench.live import completions

MODEL: Final = "emulated"
WORKER: Final = (sys.executable, "-m", "workers", "--port", "{port}", "--model", MODEL, "--exit-with-parent")
OURS: Final = (sys.executable, "-m", "router", "serve", "--port", "{port}", "--log-level", "error", "--worker={worker}")
SGLANG_FLAGS: Final = (
    *("--host", "127.0.0.1", "--port", "{port}", "--policy", "cache_aware", "--worker-urls", "{worker}"),
    *("--log-level", "error", "--prometheus-port", "{other_port}"),
)
START_SECONDS: Final = 60.0
"""How long a process may take until it answers a call."""
ASK_SECONDS: Final = 2.0
END_SECONDS: Final = 2.0
"""How long a process may take to exit after SIGTERM."""


_LOOPBACK: Final = build_opener(ProxyHandler({}))
"""Bypasses any proxy named in the environment."""


class ServerError(Exception):
    """A process does not serve; the text is one line for the user."""


class Ask(NamedTuple):
    """A call by which a process shows that it serves."""

    path: str
    body: Mapping[str, Any]


COMPLETION: Final = Ask(completions.PATH, {"model": MODEL, "prompt": "hello", "max_tokens": 1})


class EngineQueue(NamedTuple):
    """The queue inside a worker's engine."""

    requests_p95: float
    lost: float
    """Share of its time by which the process was slower than its emulated machine."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A router in the table. Raises ValueError if its command has no port."""

    name: str
    command: Sequence[str]
    """An argument with `{worker}` is repeated for each worker, with its URL.

    `{port}` is the port to listen on, and `{other_port}` is another free one. Without a command, the calls go to the
    workers in turn.
    """

    def __post_init__(self) -> None:
        if self.command and not any("{port}" in argument for argument in self.command):
            raise ValueError(f"the command of {self.name} must have {{port}}, and {{worker}} where the workers go")


def contestant(text: str) -> Contestant:
    """Read `NAME=COMMAND`. Raises ValueError."""
    name, equals, command = text.partition("=")
    if not name or not equals or not command.strip():
        raise ValueError(f"{text!r} is not NAME=COMMAND")
    return Contestant(name, shlex.split(command))


def expanded(command: Sequence[str], port: int, other_port: int, workers: Sequence[str] = ()) -> Sequence[str]:
    """Return the command line for these ports and workers."""
    ports = [each.replace("{port}", str(port)).replace("{other_port}", str(other_port)) for each in command]
    return [
        argument.replace("{worker}", worker)
        for argument in ports
        for worker in (workers if "{worker}" in argument else [""])
    ]


@contextmanager
def started(
    name: str, command: Sequence[str], workers: Sequence[str] = (), ask: Ask = COMPLETION
) -> "Iterator[Server]":
    """Start a process, wait until it answers a call, yield it, and stop it on exit.

    Raises ServerError.
    """
    with _launched(name, command, workers) as server:
        server.wait(ask)
        yield server


@contextmanager
def fleet(count: int, flags: Sequence[str]) -> Iterator[Sequence[str]]:
    """Start fresh emulated workers and yield their URLs. Raises ServerError."""
    with ExitStack() as stack:
        servers = [stack.enter_context(_launched("a worker", [*WORKER, *flags])) for _ in range(count)]
        for server in servers:
            server.wait(COMPLETION)
        yield [server.url for server in servers]


def engine_queue(worker: str) -> EngineQueue:
    """Read the queue of a worker with `--measure` since it started. Raises ServerError."""
    try:
        with _LOOPBACK.open(f"{worker}/emulated/queue", timeout=ASK_SECONDS) as answer:
            seen = orjson.loads(answer.read())
    except OSError as error:
        raise ServerError(f"a worker does not answer any more: {error}") from None
    return EngineQueue(seen["requests_p95"], seen["lost_seconds"] / seen["seconds"])


@dataclass(frozen=True, slots=True)
class Server:
    """A running process."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    """Its output."""

    def wait(self, ask: Ask) -> None:
        """Wait until the process answers a call. Raises ServerError."""
        deadline = time.monotonic() + START_SECONDS
        while not _serves(self.url, ask):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.said.seek(0)
                last = self.said.read().decode(errors="replace").split("\n")[-2:]
                raise ServerError(f"{self.name} does not serve; it said {' '.join(' '.join(last).split())!r}")
            time.sleep(0.1)


@contextmanager
def _launched(name: str, command: Sequence[str], workers: Sequence[str] = ()) -> Iterator[Server]:
    port, other_port = _free_ports(2)
    line = expanded(command, port, other_port, workers)
    # Settings in the user's environment would change what is compared here.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("D2LPM_")}
    with TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                line, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said, process_group=0
            )
        except OSError as error:
            raise ServerError(f"{name} does not start: {error.strerror}: {line[0]}") from None
        try:
            yield Server(name, f"http://127.0.0.1:{port}", process, said)
        finally:
            _end(process)


def _serves(url: str, ask: Ask) -> bool:
    """True if a call is answered: a router that has not found its workers yet listens, but rejects calls."""
    request = Request(url + ask.path, orjson.dumps(ask.body), {"Content-Type": "application/json"})
    try:
        with _LOOPBACK.open(request, timeout=ASK_SECONDS) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its children. Each process is a group of its own, so Ctrl-C does not reach it."""
    with process:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
