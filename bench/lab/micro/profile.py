"""Measure what each stage of the router costs a streamed chat: CPU microseconds per request and per chunk.

The router runs in this process, from its command line; workers and clients are processes of their own, whose answers
and prompts are made beforehand. In a burst, a worker sends its 16 chunks at once; paced, one every 20 ms. A timer of
CPU time interrupts the process, and each time counts for the stage whose function was running: a stage is a folder or
file of the router, with the libraries that it calls. The parts of one table can be compared. On a shared machine two
tables can differ by a third; so compare two versions in turn, by their totals.
"""

import argparse
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from opcode import opmap
from types import FrameType
from typing import Final, NamedTuple

from bench.lab.micro.canned_peers import CHUNKS, canned_workers, drive
from bench.lab.micro.own_router import ROUTER, run_router

LIBRARIES: Final = os.sep + "site-packages" + os.sep
SAMPLE_SECONDS: Final = 0.001
"""CPU seconds between two samples. Kernels round it up to their tick, often 4 ms."""
LOOP: Final = "event loop, sockets"
STAGES: Final[Mapping[str, str]] = {
    "uvicorn/protocols": "client connection",
    "front/http": "client connection",
    "front/byte_budget": "client connection",
    "auth": "identity, admission",
    "api/answer": "read the answer",
    "front/answer_stream": "read the answer",
    "api": "parse, render, hash",
    "core/model/prompt_key": "parse, render, hash",
    "front": "gateway, relay",
    "process/entry": "gateway, relay",
    "process/server": "gateway, relay",
    "upstream/http_client": "worker connection",
    "upstream/connections": "worker connection",
    "upstream/accepted_fields": "worker connection",
    "channel": "channel",
    "core": "scheduler",
    "telemetry": "metrics, records",
    "upstream": "polls of workers",
}
"""Stages by the beginning of a file's path. Of several that fit, the first counts."""


class Load(NamedTuple):
    """A load that is measured."""

    name: str
    gap_ms: int
    """Between two chunks; 0 for all at once."""
    streams: int
    """Open at a time."""


LOADS: Final = (Load("burst", 0, 16), Load("paced", 20, 100))


@dataclass(slots=True)
class Sampler:
    """A signal handler that counts the samples of each stage while `on`."""

    on: bool = False
    samples: Counter[str] = field(default_factory=Counter)

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Count the stage that runs now."""
        if self.on:
            self.samples[stage_of(frame)] += 1


def stage_of(frame: FrameType | None) -> str:
    """Return the stage of the innermost function that belongs to one; the event loop's if none does.

    Python calls signal handlers between two instructions. At the first one of a function, the time was spent before
    the function was called: by the event loop if nothing else has called it.
    """
    if frame is not None and frame.f_code.co_code[frame.f_lasti] == opmap["RESUME"]:
        frame = frame.f_back
    while frame is not None:
        if (stage := stage_of_file(frame.f_code.co_filename)) is not None:
            return stage
        frame = frame.f_back
    return LOOP


def stage_of_file(file: str) -> str | None:
    """Return the stage that a source file belongs to, if any."""
    part = file.removeprefix(ROUTER) if file.startswith(ROUTER) else file.rpartition(LIBRARIES)[2]
    return next((stage for beginning, stage in STAGES.items() if part.startswith(beginning)), None)


class Measured(NamedTuple):
    """What one load cost."""

    requests: int
    cpu_seconds: float
    samples: Mapping[str, int]

    def micros(self, stage: str) -> float:
        """Return the CPU microseconds of a stage per request."""
        return self.total * self.samples.get(stage, 0) / max(1, sum(self.samples.values()))

    @property
    def total(self) -> float:
        """CPU microseconds per request."""
        return self.cpu_seconds * 1e6 / max(1, self.requests)


def measure(load: Load, seconds: float, more: Sequence[str] = ()) -> Measured:
    """Run the router under one load and measure it for this long. `more`: flags of the router."""
    sampler, results = Sampler(), list[Measured]()
    with canned_workers(load.gap_ms) as ports:
        flags = [word for each in ports for word in ("--worker", f"http://127.0.0.1:{each}")]
        signal.signal(signal.SIGPROF, sampler)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
        try:
            run_router([*flags, *more], lambda port: results.append(_measure_client(port, load, seconds, sampler)))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return results[0]


def _measure_client(port: int, load: Load, seconds: float, sampler: Sampler) -> Measured:
    """Run the client, and count samples while it measures."""

    def at_begin_and_end() -> float:
        sampler.on = not sampler.on
        return time.process_time()

    driven = drive(port, load.streams, seconds, at_begin_and_end)
    return Measured(driven.calls, driven.cpu_seconds, sampler.samples)


def table(burst: Measured, paced: Measured) -> Iterator[str]:
    """Yield the lines of the table: per request, and per paced chunk with its part of the request."""
    yield f"{'CPU us of':24}{'a burst request':>18}{'a paced request':>18}{'a paced chunk':>16}"
    for stage in (LOOP, *dict.fromkeys(STAGES.values())):
        paced_micros = paced.micros(stage)
        yield f"{stage:24}{burst.micros(stage):18.1f}{paced_micros:18.1f}{paced_micros / CHUNKS:16.2f}"
    yield f"{'all':24}{burst.total:18.1f}{paced.total:18.1f}{paced.total / CHUNKS:16.2f}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--seconds", type=float, default=10, metavar="S", help="length of each measurement (10)")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of the router, after --, such as -- --otel")


def run(options: argparse.Namespace) -> None:
    """Print a table."""
    burst, paced = [measure(load, options.seconds, options.flags) for load in LOADS]
    for line in table(burst, paced):
        print(line)
