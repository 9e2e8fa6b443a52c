"""Counts warnings and errors that repeat, instead of repeating them."""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

QUIET_SECONDS: Final = 60.0
"""Seconds for which a message is not repeated after it was written."""
ACCESS_LOGGER: Final = "router.access"
MESSAGES: Final = 1000
"""Messages remembered, those written last."""


class Message(NamedTuple):
    """What makes two records the same."""

    logger: str
    level: int
    text: str
    error: type[BaseException] | None
    """That whose traceback is with it, if any."""


@dataclass(slots=True)
class Written:
    """When a message was written, and how often it was repeated since. No record: its traceback would hold bodies."""

    created: float
    """In seconds since 1970."""
    repeats: int = 0
    """How often it came again since."""


class CountRepeats(logging.Filter):
    """Lets a handler write a warning or error at most once in `QUIET_SECONDS`, and then how often it was repeated.

    What is counted is written with the first record of any kind after that time. Times are those of the records.
    """

    def __init__(self, handler: logging.Handler) -> None:
        """`handler`: writes the counts."""
        super().__init__()
        self._handler = handler
        self._written: OrderedDict[Message, Written] = OrderedDict()
        """In the order in which the messages were written."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record. Threads log, too, so only one is here at a time."""
        self._handler.acquire()
        try:
            return self._is_new(record)
        finally:
            self._handler.release()

    def _is_new(self, record: logging.LogRecord) -> bool:
        self._write_counts(record.created)
        if record.levelno < logging.WARNING or record.name == ACCESS_LOGGER:
            return True  # a call is never the same as another one
        error = record.exc_info[0] if record.exc_info else None
        message = Message(record.name, record.levelno, record.getMessage(), error)
        if (known := self._written.get(message)) is not None:
            known.repeats += 1
            return False
        self._written[message] = Written(record.created)
        if len(self._written) > MESSAGES:
            self._write_count(*self._written.popitem(last=False), record.created)
        return True

    def _write_counts(self, now: float) -> None:
        """Write how often messages were repeated whose time is over."""
        while self._written:
            message, oldest = next(iter(self._written.items()))
            if now - oldest.created < QUIET_SECONDS:
                return
            del self._written[message]
            self._write_count(message, oldest, now)

    def _write_count(self, message: Message, written: Written, now: float) -> None:
        if written.repeats:
            times = "once more" if written.repeats == 1 else f"{written.repeats} times more"
            text, args = "%s (%s in %.0f s)", (message.text, times, now - written.created)
            count = logging.LogRecord(message.logger, message.level, "", 0, text, args, None)
            self._handler.emit(count)  # past this filter
