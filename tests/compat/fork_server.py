"""Programs of vLLM's environment as forks of one process that has imported vLLM and its tests once."""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.engine.processes import Server

PROGRAM = Path(__file__).parent / "plugin" / "forks.py"


class ForkedProcess:
    """A process that `ForkServer` has started, with the part of `subprocess.Popen` that servers need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return None while it runs, then 0, whatever its exit status was."""
        return 0 if select.select([self._ended], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and return 0. Raises TimeoutExpired after `timeout` seconds."""
        if not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return 0

    def terminate(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, signal.SIGTERM)


class ForkServer:
    """Starts `vllm` and `pytest`. They end with it, and it ends with this process. May be used from several threads."""

    def __init__(self, python: Path, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        """`python`: that of vLLM's environment; `folder`: with vLLM's tests; `environment`: that of all programs."""
        self._command = ["setpriv", "--pdeathsig", "TERM", str(python), str(PROGRAM)]
        self._folder, self._environment, self._log = folder, environment, log
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start it; it can take jobs at once, and starts them when its imports are done."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env={**os.environ, **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.communicate()

    def fork(self, program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess:
        """Start a program. Raises RuntimeError if the fork server has ended; its log says why."""
        job = {"program": program, "arguments": [*arguments], "environment": {**environment}, "log": str(log)}
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                print(json.dumps(job), file=self._process.stdin, flush=True)
                answer = self._process.stdout.readline()
            except BrokenPipeError:
                answer = ""
        if not answer:
            raise RuntimeError(f"the fork server has ended; see {self._log}")
        return ForkedProcess(int(answer))


class ForkedVllm(Server):
    """A vLLM server that is forked."""

    def __init__(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, forks: ForkServer
    ) -> None:
        """`arguments`: those of the command `vllm`."""
        super().__init__(name, arguments, environment, log)
        self._arguments = [part.format(port=self.port) for part in arguments]
        self._forks = forks

    def start(self) -> None:
        self._process = self._forks.fork("vllm", self._arguments, self._environment, self.log)
