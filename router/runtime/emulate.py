"""Emulated workers as child processes, for a trial without a GPU.

They are separate programs: this module knows only what they print and their HTTP interface.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from router.errors import ConfigError
from router.runtime.own_python import python_command

COMMAND: Final = python_command("workers", "--dialect", "vllm", "--port", "0", "--exit-with-parent")
READY_LINE: Final = re.compile(r"workers: \S+ (?P<model>\S+) on (?P<url>http://\S+)")
TERMINATE_SECONDS: Final = 5.0
"""Time that a worker has to exit after SIGTERM before it is killed."""


@dataclass(frozen=True, slots=True)
class EmulatedWorker:
    """A running process that serves the API of vLLM."""

    url: str
    model: str


@contextmanager
def start_emulated_workers(count: int, command: Sequence[str] = COMMAND) -> Iterator[list[EmulatedWorker]]:
    """Start this many workers, wait until all of them listen, and stop them on exit.

    The workers also exit by themselves if this process dies. Raises ConfigError if one does not start.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(terminated_on_exit(_start(command), TERMINATE_SECONDS)) for _ in range(count)]
        yield [_ready(process) for process in processes]


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    # A process group of its own, so that Ctrl-C reaches the router only, which drains its requests first.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)


@contextmanager
def terminated_on_exit(process: subprocess.Popen[str], seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Terminate a process on exit, and kill it if it still runs after `seconds`."""
    with process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(process: subprocess.Popen[str]) -> EmulatedWorker:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = READY_LINE.match(line)
    if found is None:
        raise ConfigError(f"an emulated worker did not start; it printed {line.strip()!r}")
    return EmulatedWorker(found["url"], found["model"])
