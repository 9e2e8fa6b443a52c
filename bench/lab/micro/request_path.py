"""Count the files and functions through which the router takes one streamed chat of 8 chunks.

The router runs in this process, from its command line, with one emulated worker that takes 20 ms per token. A client in
a thread sends the same chat several times, and the shortest path counts. A change of file is a call into a function of
another file than that of the call before; resuming a coroutine counts as a call.
"""

import argparse
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from bench.report.exits import refuse
from router.runtime.emulate import COMMAND, start_emulated_workers

ROUTER: Final = str(Path(__file__).parents[3] / "router") + os.sep
CHUNKS: Final = 8
START_SECONDS: Final = 60
HTTP_CLIENT: Final = os.path.join("upstream", "http_client.py")
BODY: Final = {
    "model": "emulated",
    "stream": True,
    "max_tokens": CHUNKS,
    "messages": [{"role": "user", "content": "Hi"}],
}


class Step(NamedTuple):
    """A call of one of the router's functions."""

    file: str
    function: str


class Way(NamedTuple):
    """What a part of the way is made of."""

    files: int
    functions: int
    changes: int


@dataclass(slots=True)
class Recorder:
    """A profile function that records calls into the router while `on`."""

    on: bool = False
    steps: list[Step] = field(default_factory=list)
    decisions: list[tuple[int, int]] = field(default_factory=list)
    """Where in `steps` each handling of `Arrived` begins and ends."""
    _deciding: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Record the event of the interpreter."""
        if not self.on:
            return
        if event == "return" and frame is self._deciding:
            self.decisions[-1] = self.decisions[-1][0], len(self.steps)
            self._deciding = None
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(ROUTER):
            return
        if frame.f_code.co_qualname == "Scheduler.handle" and type(frame.f_locals["event"]).__name__ == "Arrived":
            self.decisions.append((len(self.steps), len(self.steps)))
            self._deciding = frame
        self.steps.append(Step(file.removeprefix(ROUTER), frame.f_code.co_qualname))


def measured(steps: Sequence[Step]) -> Way:
    """Count the files, the functions and the changes of file."""
    changes = sum(before.file != after.file for before, after in pairwise(steps))
    return Way(len({step.file for step in steps}), len(set(steps)), changes)


def chunks(steps: Sequence[Step]) -> list[Sequence[Step]]:
    """Cut out the steps of each block of the answer, from the worker's socket on; without the first and the last."""
    starts = [
        at for at, step in enumerate(steps) if step.file == HTTP_CLIENT and step.function.endswith(".data_received")
    ]
    return [steps[start:end] for start, end in pairwise(starts)][1:-1]


def trace(repeats: int) -> list[Recorder]:
    """Run the router and send it the chat; the recorder of each."""
    port = free_port()
    recorder, recorders = Recorder(), list[Recorder]()
    failures: list[str] = []

    def play() -> None:
        try:
            wait_until_ready(port)
            for number in range(repeats + 2):
                recorder.steps, recorder.decisions = [], []
                recorder.on = True
                _chat(port)
                time.sleep(0.05)  # the router settles the request after its last byte
                recorder.on = False
                if number >= 2:  # the first calls open connections
                    recorders.append(Recorder(steps=recorder.steps, decisions=recorder.decisions))
        except (OSError, ValueError) as error:
            failures.append(str(error))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    with start_emulated_workers(1, [*COMMAND, "--step-times", "20,0,0"]) as (worker,):
        client = threading.Thread(target=play)
        client.start()
        _serve(port, worker.url, recorder)
        client.join()
    if failures:
        refuse("bench", failures[0])
    return recorders


def _serve(port: int, worker: str, recorder: Callable[[FrameType, str, object], None]) -> None:
    flags = ["serve", "--port", str(port), "--worker", worker, "--poll-interval", "1000", "--log-level", "error"]
    arguments, sys.argv = sys.argv, ["d2lpm", *flags]
    sys.setprofile(recorder)
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_module("router", run_name="__main__", alter_sys=False)
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        sys.argv = arguments


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_until_ready(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise ValueError(f"the router was not ready within {START_SECONDS} s")


def _chat(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200 or not text.endswith(b"data: [DONE]\n\n"):
        raise ValueError(f"the chat was answered with {answer.status}")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="chats, of which the shortest path counts (5)"
    )
    parser.add_argument("--steps", action="store_true", help="also print each call of the shortest chunk")


def run(options: argparse.Namespace) -> None:
    """Print a table."""
    recorders = trace(options.repeats)
    requests = [measured(recorder.steps) for recorder in recorders]
    decisions = [measured(recorder.steps[slice(*span)]) for recorder in recorders for span in recorder.decisions]
    blocks = [block for recorder in recorders for block in chunks(recorder.steps)]
    print(f"{'':12}{'files':>8}{'functions':>12}{'changes of file':>18}")
    parts = {"request": requests, "decision": decisions, "chunk": [measured(block) for block in blocks]}
    for name, paths in parts.items():
        shortest = min(paths, key=lambda path: path.changes)
        print(f"{name:12}{shortest.files:8}{shortest.functions:12}{shortest.changes:18}")
    if options.steps:
        for step in min(blocks, key=lambda block: measured(block).changes):
            print(f"  {step.file}: {step.function}")
