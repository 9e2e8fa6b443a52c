"""The two formats of the log say the same, and no value can forge a line."""

import io
import json
import logging
import sys
from typing import Any

import pytest

from router.telemetry.logs.log_format import FIELDS, JsonFormat, TextFormat

NASTY = 'a b="c"\nERROR forged \u2028\ud800'


def record(text: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("router.test", logging.WARNING, "", 0, text, args, None)
    setattr(made, FIELDS, fields)
    return made


def as_json(made: logging.LogRecord, process: str = "") -> Any:
    line = JsonFormat(process).format(made)
    assert "\n" not in line
    return json.loads(line)


def test_both_formats_have_the_same_fields() -> None:
    """Text shows as name=value what JSON shows as members."""
    made = record("%s left", "w1", worker="w1", queue_ms=1.25, tries=2)
    line = as_json(made, "front-1")
    assert line.pop("time").endswith("+00:00")
    assert line == {
        **{"level": "warning", "logger": "router.test", "message": "w1 left", "process": "front-1"},
        **{"worker": "w1", "queue_ms": 1.25, "tries": 2},
    }
    text = TextFormat("front-1").format(made)
    assert text.endswith("WARNING front-1 router.test: w1 left worker=w1 queue_ms=1.25 tries=2")


@pytest.mark.parametrize("value", [NASTY, "", "a=b", 'say "hi"', "é"])
def test_a_value_cannot_forge_a_line_or_a_field(value: str) -> None:
    """A value of any text stays on its line, in quotes if it could be taken for several words."""
    made = record("a call", client=value)
    assert as_json(made)["client"] == value
    line = TextFormat().format(made)
    assert line.isascii()
    assert line.isprintable()
    assert line.endswith(f"client={value!a}")


def test_a_message_cannot_forge_a_line_or_reach_the_terminal() -> None:
    """A name from outside stays on its line, without control characters; other letters stay as they are."""
    made = record("no worker serves %s", f"é\x1b[2J{NASTY}\x9b1m")
    assert "\x1b" in as_json(made)["message"]
    line = TextFormat().format(made)
    assert line.isprintable()
    assert line.endswith(r"""no worker serves é\x1b[2Ja b="c"\nERROR forged \u2028\ud800\x9b1m""")


def test_an_exception_is_part_of_its_line() -> None:
    """A traceback is one member of the JSON line, and follows the line of text."""
    try:
        raise ValueError("broken")
    except ValueError:
        made = logging.LogRecord("router.test", logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    assert as_json(made)["exception"].endswith("ValueError: broken")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormat())
    handler.handle(made)
    assert stream.getvalue().endswith("ValueError: broken\n")
