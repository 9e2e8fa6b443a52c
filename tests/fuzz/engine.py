"""Feeds inputs to a reader and checks that none crashes, hangs or leaks memory."""

import gc
import os
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final, NamedTuple

STEPS: Final = 50_000
STEPS_PER_BYTE: Final = 400
"""Lines of Python executed per input at most: a constant, plus a number per byte."""
CPU_SECONDS: Final = 20
"""Seconds of CPU time at most from one watched input to the next, to detect hangs in C code, which has no steps."""
LEFT_BYTES: Final = 64 * 1024
LEFT_BYTES_PER_INPUT: Final = 16
"""Bytes that the inputs of a window may leave allocated: for caches, and less than one object per input."""
GROWTH_BYTES: Final = 16 * 2**20
"""Bytes by which the process may grow after the first fifth of the inputs."""


class Target(NamedTuple):
    """A reader and the generator of its inputs."""

    name: str
    make: Callable[[Random], bytes]
    """Makes an input."""
    run: Callable[[bytes, Random], bool]
    """Reads an input and checks the result. Returns True if it was accepted. Any exception is a failure."""


class Hung(BaseException):
    """An input takes too long. Not an Exception, which a reader might catch."""


class Failure(AssertionError):
    """An input failed. The message has its number and the error."""


class Outcome(NamedTuple):
    """The results of a run."""

    inputs: int
    accepted: int
    cpu_seconds: float
    most_steps: int
    """The most steps of a watched input."""
    left_bytes: int
    """Bytes left allocated after the last window of inputs."""
    growth_bytes: int
    """Growth of the process after the first fifth of the inputs, in bytes."""


def fuzz(target: Target, inputs: int, seed: int = 0, first: int = 0, watch_every: int = 1) -> Outcome:
    """Run a target. Each input depends only on the seed and its number.

    The steps of every `watch_every`-th input are counted. Raises Failure.
    """
    random = Random()
    accepted = most_steps = left = 0
    before = rss = _rss()
    window = range(first + inputs - max(1, inputs // 10), first + inputs)
    start = time.process_time()
    for number in range(first, first + inputs):
        if number == first + inputs // 5:
            gc.collect()
            before = _rss()
        if number == window.start:
            gc.collect()
            tracemalloc.start()
        random.seed(seed << 40 | number)
        data = target.make(random)
        try:
            if number % watch_every:
                accepted += target.run(data, random)
            else:
                _allow_cpu(CPU_SECONDS)
                limit = STEPS + STEPS_PER_BYTE * len(data)
                steps, result = _count_steps(partial(target.run, data, random), limit)
                most_steps, accepted = max(most_steps, steps), accepted + result
        except (Exception, Hung) as error:
            tracemalloc.stop()
            _allow_cpu(0)
            raise Failure(f"{target.name}: input {number} of seed {seed}, {data[:2000]!r}: {error!r}") from error
    _allow_cpu(0)
    del data
    gc.collect()
    left = tracemalloc.get_traced_memory()[0]
    leaks = (
        ""
        if left < LEFT_BYTES + LEFT_BYTES_PER_INPUT * len(window)
        else "; ".join(map(str, tracemalloc.take_snapshot().statistics("lineno")[:5]))
    )
    tracemalloc.stop()
    rss = _rss()
    if leaks or rss - before > GROWTH_BYTES:
        raise Failure(f"{target.name}: {left} bytes are left, the process grew by {rss - before}: {leaks}")
    return Outcome(inputs, accepted, time.process_time() - start, most_steps, left, rss - before)


def _count_steps(run: Callable[[], bool], limit: int) -> tuple[int, bool]:
    """Run and return the number of executed lines and the result. Raises Hung beyond the limit."""
    steps = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG001 - the signature for sys.settrace
        nonlocal steps
        steps += 1
        if steps > limit:
            raise Hung(f"more than {limit} steps")
        return line

    traced = sys.gettrace()
    sys.settrace(line)
    try:
        result = run()
    finally:
        sys.settrace(traced)
    return steps, result


def _allow_cpu(seconds: float) -> None:
    """Raise Hung once the process has used this much CPU time from now on; 0 removes the limit."""

    def stop(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature for signal
        raise Hung(f"more than {seconds} s")

    signal.signal(signal.SIGVTALRM, stop if seconds else signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _rss() -> int:
    """Resident memory of the process in bytes."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
