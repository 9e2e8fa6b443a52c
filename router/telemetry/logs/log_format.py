"""The formats of the log: a line of text or of JSON per record, with the same fields."""

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

import orjson

from router.telemetry.logs.repeats import CountRepeats

FIELDS: Final = "d2lpm_fields"
"""The attribute of a log record with values by name, which JSON shows as members and text as name=value."""
IN_TEXT_ALREADY: Final = frozenset({"method", "path", "status"})
"""Fields that the message of a line of text has."""
PLAIN: Final = re.compile(r"[!#-<>-~]+")
"""A value that needs no quotes: printable ASCII without spaces, quotes and equal signs."""
UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, which a terminal may obey, other ends of lines, and halves of surrogate pairs."""
LogFormat = Literal["text", "json"]


def set_up_log(level: str, kind: LogFormat, process: str) -> None:
    """Write the log of this process to standard error.

    `level`: the lowest severity; `process`: its name, empty if there is only one.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormat(process) if kind == "json" else TextFormat(process))
    handler.addFilter(CountRepeats(handler))
    logging.basicConfig(handlers=[handler], level=level.upper())


class TextFormat(logging.Formatter):
    """Time, level, process, logger and message; then the fields as name=value."""

    def __init__(self, process: str = "") -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}{' ' if process else ''}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback. What is not printable is escaped, so that no name forges a line."""
        record.message = UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], record.message)
        given = fields_of(record).items()
        words = [f"{name}={_word(value)}" for name, value in given if name not in IN_TEXT_ALREADY]
        return " ".join([super().formatMessage(record), *words])


class JsonFormat(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON. Names that are not text are escaped, so that every line is valid."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["process"] = self._process
        line |= fields_of(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str).decode()
        except orjson.JSONEncodeError:  # half a surrogate pair
            return json.dumps(line, default=str)


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Return the fields of a record; none for most records."""
    fields: Mapping[str, object] = getattr(record, FIELDS, {})
    return fields


def _word(value: object) -> str:
    """Return a value as one word. It is quoted if it could be taken for more than one, or for a line of its own."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if PLAIN.fullmatch(text) else ascii(text)
