"""Counts warnings and errors that repeat, instead of repeating them."""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

QUIET_SECONDS: Final = 60.0
"""Seconds for which a message is not repeated after it was written."""
ACCESS_LOGGER: Final = "router.access"
MESSAGES: Final = 1000
"""Messages remembered, those written last."""


@dataclass(slots=True)
class Written:
    """A message that was written, and may have been repeated since."""

    record: logging.LogRecord
    """As it was written."""
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
        self._written: OrderedDict[tuple[str, int, str], Written] = OrderedDict()
        """In the order in which the messages were written."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record."""
        self._write_counts(record.created)
        if record.levelno < logging.WARNING or record.name == ACCESS_LOGGER:
            return True  # a call is never the same as another one
        key = (record.name, record.levelno, record.getMessage())
        if (known := self._written.get(key)) is not None:
            known.repeats += 1
            return False
        self._written[key] = Written(record)
        if len(self._written) > MESSAGES:
            oldest = self._written.popitem(last=False)[1]
            self._write_count(oldest, record.created - oldest.record.created)
        return True

    def _write_counts(self, now: float) -> None:
        """Write how often messages were repeated whose time is over."""
        while self._written:
            key, oldest = next(iter(self._written.items()))
            if now - oldest.record.created < QUIET_SECONDS:
                return
            del self._written[key]
            self._write_count(oldest, now - oldest.record.created)

    def _write_count(self, written: Written, seconds: float) -> None:
        if written.repeats:
            given = written.record
            times = "once more" if written.repeats == 1 else f"{written.repeats} times more"
            text, args = "%s (%s in %.0f s)", (given.getMessage(), times, seconds)
            count = logging.LogRecord(given.name, given.levelno, "", 0, text, args, None)
            self._handler.acquire()
            try:
                self._handler.emit(count)  # past this filter
            finally:
                self._handler.release()
