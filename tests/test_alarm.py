"""Timers that ring only once the router has had the time to hear whom they judge."""

import asyncio
import socket
import time

import pytest
import uvloop

from router.alarm import GRACE, LATE, Alarm

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@LOOPS
def test_what_comes_as_the_loop_stood_still_is_read_before_the_alarm(loop: type[asyncio.AbstractEventLoop]) -> None:
    """Whatever the order in which a loop takes up timers and sockets; also what its sender could send only then."""

    async def hold() -> list[str]:
        running, happened = asyncio.get_running_loop(), []
        ours, theirs = socket.socketpair()
        with ours, theirs:
            rung = asyncio.Event()
            running.add_reader(ours, lambda: happened.append("read") or running.remove_reader(ours))  # type: ignore[func-returns-value]
            Alarm(running, 0.01, lambda: happened.append("rang") or rung.set())  # type: ignore[func-returns-value]
            time.sleep(0.01 + 2 * LATE)  # noqa: ASYNC251 - the loop has to stand still
            running.call_soon(theirs.send, b"x")
            await rung.wait()
        return happened

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(hold()) == ["read", "rang"]


@LOOPS
def test_an_alarm_that_is_due_now_has_a_time(loop: type[asyncio.AbstractEventLoop]) -> None:
    """A loop may know no time of a timer without a delay."""

    async def due() -> float:
        running = asyncio.get_running_loop()
        alarm = Alarm(running, 0.0, lambda: None)
        alarm.cancel()
        return alarm.when - running.time()

    with asyncio.Runner(loop_factory=loop) as runner:
        assert -GRACE < runner.run(due()) <= 0
