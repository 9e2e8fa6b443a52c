"""Warnings that repeat are counted, not repeated."""

import io
import logging
import weakref

from router.telemetry.logs.repeats import ACCESS_LOGGER, MESSAGES, QUIET_SECONDS, CountRepeats


class Log:
    """A handler with the filter, which is fed records of given times."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._handler = logging.StreamHandler(self._text)
        self._handler.addFilter(CountRepeats(self._handler))

    def write(
        self,
        text: str,
        at: float,
        level: int = logging.WARNING,
        name: str = "router.test",
        error: Exception | None = None,
    ) -> None:
        """Log a message, and the error with it, at a time in seconds."""
        about = None if error is None else (type(error), error, error.__traceback__)
        record = logging.LogRecord(name, level, "", 0, text, (), about)
        record.created = at
        self._handler.handle(record)

    @property
    def lines(self) -> list[str]:
        """What was written."""
        return self._text.getvalue().splitlines()


def test_a_repeated_warning_is_written_once() -> None:
    """Within the quiet time, the same warning is written once; a different one is written as well."""
    log = Log()
    for second in range(50):
        log.write("w1 is silent", second)
    log.write("w2 is silent", 50)
    assert log.lines == ["w1 is silent", "w2 is silent"]


def test_repeats_are_counted_in_the_end() -> None:
    """The first record after the quiet time comes behind the count, and then the warning is written again."""
    log = Log()
    for second in (0, 1, 2):
        log.write("w1 is silent", second)
    log.write("all is well", QUIET_SECONDS, logging.INFO)
    log.write("w1 is silent", QUIET_SECONDS + 1)
    assert log.lines == [
        "w1 is silent",
        f"w1 is silent (2 times more in {QUIET_SECONDS:.0f} s)",
        "all is well",
        "w1 is silent",
    ]


def test_a_warning_that_came_once_is_not_counted() -> None:
    """Without repeats there is no count, and the next one is written."""
    log = Log()
    log.write("w1 is silent", 0)
    log.write("w1 is silent", QUIET_SECONDS)
    assert log.lines == ["w1 is silent"] * 2


def test_calls_and_messages_below_a_warning_are_all_written() -> None:
    """The access log and messages for information repeat as they come."""
    log = Log()
    for _ in range(2):
        log.write("joined", 0, logging.INFO)
        log.write("GET / 404", 0, name=ACCESS_LOGGER)
    assert log.lines == ["joined", "GET / 404"] * 2


def test_only_so_many_messages_are_remembered() -> None:
    """Any number of distinct warnings takes bounded memory; of one that is dropped, the count is written."""
    log = Log()
    log.write("first", 0)
    log.write("first", 0)
    for number in range(MESSAGES):
        log.write(f"number {number}", 0)
    assert log.lines.count("first (once more in 0 s)") == 1


def test_another_error_is_no_repeat() -> None:
    """Under the same text, the traceback of another kind of error is written, too."""
    log = Log()
    for error in (ValueError("a"), ValueError("b"), KeyError("c")):
        log.write("it failed", 1.0, error=error)
    assert [line for line in log.lines if "Error" in line] == ["ValueError: a", "KeyError: 'c'"]


def test_what_is_remembered_holds_no_traceback() -> None:
    """The frames of an error, which may hold the body of a call, are gone once it is logged."""

    class Body:
        pass

    log, body = Log(), Body()
    gone = weakref.ref(body)
    error = ValueError("broken", body)
    log.write("it failed", 1.0, error=error)
    del body, error
    assert gone() is None
