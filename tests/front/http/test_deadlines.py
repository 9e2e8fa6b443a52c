"""What a client owes and until when, by a clock that is moved by hand."""

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
        """As of an event loop's, it does not matter if it has gone off already."""
        if self in self._timers:
            self._timers.remove(self)


class Clock:
    """As much of an event loop as deadlines need."""

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
        """Let time pass, and what is due happen in its order."""
        end = self._now + seconds
        while due := [timer for timer in self._timers if timer.when <= end]:
            first = min(due, key=lambda timer: timer.when)
            self._timers.remove(first)
            self._now = first.when
            first.call()
        self._now = end


class Client:
    """Notes for what it was too late."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.deadlines = Deadlines(LIMITS, self.clock)  # type: ignore[arg-type]
        self.late: list[Awaiting | str] = []
        self.read = 0
        """Bytes."""

    def owes(self, owed: Awaiting | None) -> None:
        self.deadlines.expect(owed, self.late.append)

    def does_not_read(self) -> None:
        self.deadlines.expect_reading(lambda: self.late.append("reading"), lambda: self.read)


def test_a_client_that_reads_has_as_long_again() -> None:
    """Each time that it has read enough; one that has not is late."""
    client = Client()
    client.does_not_read()
    for _ in range(3):
        client.read += READ_BYTES
        client.clock.wait(LIMITS.write_seconds)
        assert not client.late
    client.read += READ_BYTES - 1
    client.clock.wait(LIMITS.write_seconds)
    assert client.late == ["reading"]


@pytest.mark.parametrize(
    ("owed", "seconds"),
    [(Awaiting.HEAD, LIMITS.head_seconds), (Awaiting.BODY, LIMITS.body_seconds), (Awaiting.REST, LINGER_SECONDS)],
)
def test_each_has_its_time_however_often_it_is_asked_for(owed: Awaiting, seconds: float) -> None:
    """That it is still owed gives no more of it; and it is over once."""
    client = Client()
    client.owes(owed)
    client.clock.wait(seconds - 1)
    client.owes(owed)
    assert not client.late
    client.clock.wait(1)
    assert client.late == [owed]
    client.clock.wait(1000)
    assert client.late == [owed]


def test_what_has_come_is_not_late() -> None:
    """What is owed next has a time of its own."""
    client = Client()
    client.owes(Awaiting.HEAD)
    client.clock.wait(9)
    client.owes(Awaiting.BODY)
    client.clock.wait(29)
    client.owes(None)
    client.clock.wait(1000)
    assert not client.late


@pytest.mark.parametrize(("content", "late"), [(3000, []), (2999, [Awaiting.BODY])])
def test_a_body_has_as_long_again_if_enough_of_it_came(content: int, late: list[Awaiting]) -> None:
    """So many bytes a second since the last time, not since its beginning."""
    client = Client()
    client.owes(Awaiting.BODY)
    client.deadlines.body_bytes += 9000
    client.clock.wait(30)
    client.deadlines.body_bytes += content
    client.clock.wait(30)
    assert client.late == late


def test_who_reads_in_time_is_not_late() -> None:
    """Time runs from when it stopped, and anew when it stops again."""
    client = Client()
    client.does_not_read()
    client.clock.wait(40)
    client.does_not_read()
    client.deadlines.cancel_reading()
    client.clock.wait(40)
    client.does_not_read()
    client.clock.wait(59)
    assert not client.late
    client.clock.wait(1)
    assert client.late == ["reading"]


def test_who_is_gone_owes_nothing() -> None:
    """Neither way."""
    client = Client()
    client.owes(Awaiting.HEAD)
    client.does_not_read()
    client.deadlines.cancel()
    client.clock.wait(1000)
    assert not client.late
