"""What all tests share."""

import os
from collections import Counter

import pytest
from hypothesis import settings

from router.cli.compiled import is_compiled
from tests.support.processes import ONE_ONLY, STARTED, needs_one_process, process_count

# A busy machine must not fail a property by its clock, and a check of a change must not depend on luck.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked for one process, when routers have several, or for interpreted code, when the code is
    compiled.
    """
    interpreted = item.get_closest_marker("interpreted")
    if interpreted is not None and is_compiled():
        pytest.skip(f"with interpreted code only: {interpreted.args[0]}")
    mark = item.get_closest_marker("one_process")
    if mark is not None and process_count() > 1:
        needs_one_process(*mark.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran with routers of several processes, and how many could not, and why."""
    if process_count() == 1:
        return
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    line = STARTED.format(process_count())
    tests = {report.nodeid for report in reports if line in report.capstdout}
    texts = [str(report.longrepr[2]) for report in terminalreporter.getreports("skipped")]
    reasons = Counter(text.partition(ONE_ONLY)[2] for text in texts if ONE_ONLY in text)
    terminalreporter.section(f"routers of {process_count()} processes")
    terminalreporter.line(f"{len(tests)} tests have started one; {reasons.total()} were skipped for these reasons:")
    for why, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {why}")
