"""Feeds a reader inputs one by one, and watches that none crashes, hangs or leaves anything behind."""

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
"""Lines of Python that an input may take: a constant, and for each of its bytes."""
CPU_SECONDS: Final = 20
"""Of the processor, that an input and those up to the next one watched may take; for what has no steps."""
LEFT_BYTES: Final = 64 * 1024
LEFT_BYTES_PER_INPUT: Final = 16
"""That the inputs of a window may leave behind: what caches and free lists take, and less than one object for each."""
GROWTH_BYTES: Final = 16 * 2**20
"""By which the process may grow from a fifth of the inputs on."""


class Target(NamedTuple):
    """A reader and what it is fed."""

    name: str
    make: Callable[[Random], bytes]
    """An input."""
    run: Callable[[bytes, Random], bool]
    """Read it, and check what came of it; whether it was accepted. Whatever it raises is a failure."""


class Hung(BaseException):
    """Too long for one input. No Exception, which a reader might take for its own."""


class Failure(AssertionError):
    """What an input did, and which one it was."""


class Outcome(NamedTuple):
    """What a run showed."""

    inputs: int
    accepted: int
    cpu_seconds: float
    most_steps: int
    """Of one input, of those that were watched by steps."""
    left_bytes: int
    """After the last window of inputs."""
    growth_bytes: int
    """Of the process, from a fifth of the inputs to their end."""


def fuzz(target: Target, inputs: int, seed: int = 0, first: int = 0, watch_every: int = 1) -> Outcome:
    """Run a target; inputs are numbered, and each is made from the seed and its number alone.

    Every `watch_every`-th is watched by its steps. Raises Failure.
    """
    random = Random()
    accepted = most_steps = left = 0
    before = rss = _rss()
    window = range(first + inputs - max(1, inputs // 10), first + inputs)
    began = time.process_time()
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
    told = (
        ""
        if left < LEFT_BYTES + LEFT_BYTES_PER_INPUT * len(window)
        else "; ".join(map(str, tracemalloc.take_snapshot().statistics("lineno")[:5]))
    )
    tracemalloc.stop()
    rss = _rss()
    if told or rss - before > GROWTH_BYTES:
        raise Failure(f"{target.name}: {left} bytes are left, the process grew by {rss - before}: {told}")
    return Outcome(inputs, accepted, time.process_time() - began, most_steps, left, rss - before)


def _count_steps(run: Callable[[], bool], limit: int) -> tuple[int, bool]:
    """The lines that are executed, and the result. Raises Hung beyond the limit."""
    steps = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG001 - as sys.settrace has it
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
    """Raise Hung where the process works for longer than this from now on; 0 for no limit."""

    def stop(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signal has it
        raise Hung(f"more than {seconds} s")

    signal.signal(signal.SIGVTALRM, stop if seconds else signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _rss() -> int:
    """Bytes of memory that the process has now."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
