"""Deadlines of a connection, with a clock that the test moves."""

from collections.abc import Callable
from functools import partial

import pytest

from router.front.http.connection_limits import FrontLimits
from router.front.http.deadlines import LINGER_SECONDS, READ_BYTES, Awaiting, Deadlines

LIMITS = FrontLimits(head_seconds=10.0, body_seconds=30.0, body_rate=100, write_seconds=60.0)


class Timer:
    def __init__(self, when: float, call: Callable[[], None], timers: list["Timer"]) -> None:
        self.when = when
        self.call = call
        self._timers = timers

    def cancel(self) -> None:
        """Cancel the timer; it can have fired already, as with an event loop's."""
        if self in self._timers:
            self._timers.remove(self)


class Clock:
    """The part of an event loop that deadlines need."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self._now

    def call_later(self, delay: float, call: Callable[..., None], *args: object) -> Timer:
        timer = Timer(self._now + delay, partial(call, *args), self._timers)
        self._timers.append(timer)
        return timer

    def wait(self, seconds: float) -> None:
        """Let time pass and fire the timers in their order."""
        end = self._now + seconds
        while due := [timer for timer in self._timers if timer.when <= end]:
            first = min(due, key=lambda timer: timer.when)
            self._timers.remove(first)
            self._now = first.when
            first.call()
        self._now = end


class Client:
    """Records which deadlines were missed."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.deadlines = Deadlines(LIMITS, self.clock)  # type: ignore[arg-type]
        self.late: list[Awaiting | str] = []
        self.read = 0
        """Bytes read so far."""

    def expect(self, awaiting: Awaiting | None) -> None:
        self.deadlines.expect(awaiting, self.late.append)

    def stop_reading(self) -> None:
        self.deadlines.expect_reading(lambda: self.late.append("reading"), lambda: self.read)


def test_a_client_that_reads_enough_gets_the_same_time_again() -> None:
    """The time is extended after each period in which enough was read."""
    client = Client()
    client.stop_reading()
    for _ in range(3):
        client.read += READ_BYTES
        client.clock.wait(LIMITS.write_seconds)
        assert not client.late
    client.read += READ_BYTES - 1
    client.clock.wait(LIMITS.write_seconds)
    assert client.late == ["reading"]


@pytest.mark.parametrize(
    ("awaiting", "seconds"),
    [(Awaiting.HEAD, LIMITS.head_seconds), (Awaiting.BODY, LIMITS.body_seconds), (Awaiting.REST, LINGER_SECONDS)],
)
def test_a_deadline_is_not_extended_by_expecting_it_again(awaiting: Awaiting, seconds: float) -> None:
    """Expecting the same part again does not extend its time, and it is late only once."""
    client = Client()
    client.expect(awaiting)
    client.clock.wait(seconds - 1)
    client.expect(awaiting)
    assert not client.late
    client.clock.wait(1)
    assert client.late == [awaiting]
    client.clock.wait(1000)
    assert client.late == [awaiting]


def test_a_part_that_arrived_is_not_late() -> None:
    """The next part has a deadline of its own."""
    client = Client()
    client.expect(Awaiting.HEAD)
    client.clock.wait(9)
    client.expect(Awaiting.BODY)
    client.clock.wait(29)
    client.expect(None)
    client.clock.wait(1000)
    assert not client.late


@pytest.mark.parametrize(("content", "late"), [(3000, []), (2999, [Awaiting.BODY])])
def test_a_body_gets_the_same_time_again_if_enough_arrived(content: int, late: list[Awaiting]) -> None:
    """The rate counts since the last period, not since the beginning."""
    client = Client()
    client.expect(Awaiting.BODY)
    client.deadlines.body_bytes += 9000
    client.clock.wait(30)
    client.deadlines.body_bytes += content
    client.clock.wait(30)
    assert client.late == late


def test_a_client_that_reads_in_time_is_not_late() -> None:
    """The time runs from when it stops reading, and starts again when it stops again."""
    client = Client()
    client.stop_reading()
    client.clock.wait(40)
    client.stop_reading()
    client.deadlines.cancel_reading()
    client.clock.wait(40)
    client.stop_reading()
    client.clock.wait(59)
    assert not client.late
    client.clock.wait(1)
    assert client.late == ["reading"]


def test_a_closed_connection_has_no_deadlines() -> None:
    """Neither sending nor reading has a deadline any more."""
    client = Client()
    client.expect(Awaiting.HEAD)
    client.stop_reading()
    client.deadlines.cancel()
    client.clock.wait(1000)
    assert not client.late
