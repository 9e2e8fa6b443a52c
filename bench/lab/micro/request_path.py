"""Count the files and functions through which the router takes one streamed chat of 8 chunks.

The router runs in this process, from its command line, with one emulated worker that takes 20 ms per token. A client in
a thread sends the same chat several times, and the shortest path counts of those whose chunks came one by one. A change
of file is a call into a function of another file than that of the call before; resuming a coroutine counts as a call.
What the event loop also calls while there is no chat, such as the measurement of its lag, does not count: how often
that comes in between depends on the machine. Nor does a constructor that calls nothing, whether it is written out or a
dataclass's: it only stores what it is given.
"""

import argparse
import asyncio
import dis
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection
from itertools import groupby, pairwise
from operator import attrgetter
from types import CodeType, FrameType
from typing import Final, NamedTuple

from bench.lab.micro.own_router import ROUTER, run_router
from router.runtime.emulate import COMMAND, start_emulated_workers

CHUNKS: Final = 8
LOOP: Final = asyncio.Runner.run.__code__
"""The event loop, which calls everything."""
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


WITHOUT_A_CHAT: Final = frozenset(
    {Step("process/server.py", "DrainingServer.on_tick"), Step("telemetry/loop_lag.py", "LoopLag._measure")}
)
"""What the event loop calls ten times a second, with a chat or without."""


class Way(NamedTuple):
    """What a part of the way is made of."""

    files: int
    functions: int
    changes: int


@cache
def only_stores(code: CodeType) -> bool:
    """Return whether this is a constructor that calls nothing."""
    return code.co_name == "__init__" and not any(each.opname.startswith("CALL") for each in dis.get_instructions(code))


@dataclass(slots=True)
class Recorder:
    """A profile function that records calls into the router while `on`."""

    on: bool = False
    steps: list[Step] = field(default_factory=list)
    decisions: list[tuple[int, int]] = field(default_factory=list)
    """Where in `steps` each handling of `Arrived` begins and ends."""
    left_out: frozenset[Step] = WITHOUT_A_CHAT
    """What the event loop calls that is not recorded."""
    _deciding: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Record the event of the interpreter."""
        if not self.on:
            return
        if event == "return" and frame is self._deciding:
            self.decisions[-1] = self.decisions[-1][0], len(self.steps)
            self._deciding = None
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(ROUTER) or only_stores(frame.f_code):
            return
        if callback_of(frame) in self.left_out:
            return
        if frame.f_code.co_qualname == "Scheduler.handle" and type(frame.f_locals["event"]).__name__ == "Arrived":
            self.decisions.append((len(self.steps), len(self.steps)))
            self._deciding = frame
        self.steps.append(step_of(frame.f_code))


def step_of(code: CodeType) -> Step:
    """Return a call of this function of the router."""
    return Step(code.co_filename.removeprefix(ROUTER), code.co_qualname)


def callback_of(frame: FrameType) -> Step:
    """Return the router's function by which the event loop came to this frame of the router."""
    first, caller = frame, frame.f_back
    while caller is not None and caller.f_code is not LOOP:
        if caller.f_code.co_filename.startswith(ROUTER):
            first = caller
        caller = caller.f_back
    return step_of(first.f_code)


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


def one_by_one(recorders: Sequence[Recorder]) -> list[Recorder]:
    """Leave out the chats of which several chunks came in one block, as on a busy machine: their way is shorter."""
    blocks = [len(chunks(recorder.steps)) for recorder in recorders]
    return [recorder for recorder, count in zip(recorders, blocks, strict=True) if count == max(blocks)]


def trace(repeats: int) -> list[Recorder]:
    """Run the router and send it the chat; the recorder of each."""
    recorder, recorders = Recorder(), list[Recorder]()

    def play(port: int) -> None:
        for number in range(repeats + 2):
            recorder.steps, recorder.decisions = [], []
            recorder.on = True
            _chat(port)
            time.sleep(0.05)  # the router settles the request after its last byte
            recorder.on = False
            if number >= 2:  # the first calls open connections
                recorders.append(Recorder(steps=recorder.steps, decisions=recorder.decisions))

    with start_emulated_workers(1, [*COMMAND, "--step-times", "20,0,0"]) as (worker,):
        sys.setprofile(recorder)
        try:
            run_router(["--worker", worker.url, "--poll-interval", "1000"], play)
        finally:
            sys.setprofile(None)
    return recorders


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
    parser.add_argument("--visits", action="store_true", help="also print each visit to a file by the shortest request")


def run(options: argparse.Namespace) -> None:
    """Print a table."""
    recorders = one_by_one(trace(options.repeats))
    requests = [measured(recorder.steps) for recorder in recorders]
    decisions = [measured(recorder.steps[slice(*span)]) for recorder in recorders for span in recorder.decisions]
    blocks = [block for recorder in recorders for block in chunks(recorder.steps)]
    print(f"{'':12}{'files':>8}{'functions':>12}{'changes of file':>18}")
    parts = {"request": requests, "decision": decisions, "chunk": [measured(block) for block in blocks]}
    for name, paths in parts.items():
        shortest = min(paths, key=lambda path: path.changes)
        print(f"{name:12}{shortest.files:8}{shortest.functions:12}{shortest.changes:18}")
    if options.visits:
        shortest_request = min(recorders, key=lambda recorder: measured(recorder.steps).changes)
        for file, visit in groupby(shortest_request.steps, attrgetter("file")):
            print(f"  {file}: {' '.join(step.function.rpartition('.')[2] for step in visit)}")
    if options.steps:
        for step in min(blocks, key=lambda block: measured(block).changes):
            print(f"  {step.file}: {step.function}")
