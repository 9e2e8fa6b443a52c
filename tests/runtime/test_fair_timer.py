"""Fair timers do not fire for a stall of the router itself."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, cast

import pytest
import uvloop

from router.runtime.fair_timer import GRACE_SECONDS, STALL_SECONDS, FairTimer

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@LOOPS
def test_data_that_arrived_during_a_stall_is_read_before_the_timer_fires(loop: type[asyncio.AbstractEventLoop]) -> None:
    """A late timer lets the loop read first, whatever its order of timers and sockets, and even what was just sent."""

    async def hold() -> list[str]:
        running, happened = asyncio.get_running_loop(), []
        ours, theirs = socket.socketpair()
        with ours, theirs:
            rung = asyncio.Event()
            running.add_reader(ours, lambda: happened.append("read") or running.remove_reader(ours))  # type: ignore[func-returns-value]
            FairTimer(running, 0.01, lambda: happened.append("rang") or rung.set())  # type: ignore[func-returns-value]
            time.sleep(0.01 + 2 * STALL_SECONDS)  # noqa: ASYNC251 - the loop has to stand still
            running.call_soon(theirs.send, b"x")
            await rung.wait()
        return happened

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(hold()) == ["read", "rang"]


@LOOPS
def test_a_timer_of_zero_seconds_has_a_time(loop: type[asyncio.AbstractEventLoop]) -> None:
    """A timer without a delay is due at once, even on a loop that reports no time for it."""

    async def due() -> float:
        running = asyncio.get_running_loop()
        alarm = FairTimer(running, 0.0, lambda: None)
        alarm.cancel()
        return alarm.when - running.time()

    with asyncio.Runner(loop_factory=loop) as runner:
        assert -GRACE_SECONDS < runner.run(due()) <= 0


class Clock:
    """The part of an event loop that a timer needs; its clock advances only by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> "Timer":
        self.timers.append((self.now + seconds, call))
        return Timer(self, call)

    def run(self, now: float) -> None:
        """Advance the clock to this time, and call what is due."""
        self.now = now
        due = [timer for timer in self.timers if timer[0] <= now]
        self.timers = [timer for timer in self.timers if timer[0] > now]
        for _, call in due:
            call()


class Timer(NamedTuple):
    """A timer that can be cancelled."""

    clock: Clock
    call: Callable[[], None]

    def cancel(self) -> None:
        self.clock.timers = [timer for timer in self.clock.timers if timer[1] != self.call]


def alarm(clock: Clock, seconds: float) -> tuple[FairTimer, list[float]]:
    """Return a timer, and the list of the times at which it fires."""
    rang: list[float] = []
    return FairTimer(cast(asyncio.AbstractEventLoop, clock), seconds, lambda: rang.append(clock.now)), rang


@pytest.mark.parametrize(("seconds", "grace"), [(60.0, GRACE_SECONDS), (0.2, 0.2)])
def test_a_late_timer_fires_after_the_grace_period_and_no_later(seconds: float, grace: float) -> None:
    """After a stall the timer allows one second for reading, or its own timeout if that is shorter."""
    clock = Clock()
    _, rang = alarm(clock, seconds)
    clock.run(seconds + 40.0)
    assert rang == []
    clock.run(seconds + 40.0 + grace)
    assert rang == [seconds + 40.0 + grace]


def test_a_punctual_timer_fires_once() -> None:
    """A delay that is no stall, such as a busy loop's, fires the timer once and without a grace period."""
    clock = Clock()
    _, rang = alarm(clock, 5.0)
    clock.run(4.9)
    assert rang == []
    clock.run(5.0 + STALL_SECONDS / 2)
    clock.run(60.0)
    assert rang == [5.0 + STALL_SECONDS / 2]


def test_a_cancelled_timer_does_not_fire() -> None:
    """A cancelled timer fires neither at its time nor in the grace period after it."""
    clock = Clock()
    first, rang = alarm(clock, 5.0)
    first.cancel()
    clock.run(5.0)
    second, rang_late = alarm(clock, 5.0)
    clock.run(40.0)
    second.cancel()
    clock.run(90.0)
    assert rang == rang_late == []
