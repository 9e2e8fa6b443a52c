"""Run vLLM's own API tests three times: at a vLLM server, and at the router before one such server and before two.

Prints a table, and each test that passes direct and fails through the router; such a test that `suites.ONE_PROCESS`
does not list makes the exit status 1. `make test-compat` runs it. Usage: python -m tests.compat [SUITE...]
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine.fleet import OFFLINE

from .desk import Desk
from .environments import ENGINE, VLLM_TESTS
from .hub import make_hub
from .source import source_folder
from .suites import ONE_PROCESS, SUITES

HERE = Path(__file__).parent
ROUTES: Mapping[str, int] = {"direct": 0, "one worker": 1, "two workers": 2}
"""The number of workers behind the router, or 0 without one."""
FILE_SECONDS = 1800
TEST_SECONDS = 300
Results = Mapping[str, str]
"""The text of each test's failure by its name; empty if it passed. Tests that were skipped are left out."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs vLLM's test files in the environment of the tests."""

    source: Path
    home: Path
    logs: Path
    desk: Desk

    def run(self, file: str) -> Results:
        """Return the results of one file, whose tests go where the desk now sends them."""
        results = self.logs / "results"
        results.write_text("")
        options = ("-p", "url_server", "-p", "no:cacheprovider", "-q", "-o", f"faulthandler_timeout={TEST_SECONDS}")
        command = [VLLM_TESTS, "-m", "pytest", *options, "-o", "faulthandler_exit_on_timeout=true", file]
        environment = {
            **os.environ,
            **OFFLINE,
            "HF_HOME": str(self.home),
            "PYTHONPATH": str(HERE / "plugin"),
            "COMPAT_DESK": self.desk.url,
            "COMPAT_RESULTS": str(results),
        }
        with (self.logs / "pytest").open("ab") as log:
            subprocess.run(
                [str(part) for part in command],
                cwd=self.source,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=FILE_SECONDS,
                check=False,
            )
        return read(results)


def read(file: Path) -> Results:
    """Return the results that the plugin wrote; a test fails if one of its phases does."""
    found: dict[str, str] = {}
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        if entry["outcome"] != "skipped":
            failure = "" if entry["outcome"] == "passed" else entry["text"] or "failed"
            found[entry["test"]] = found.get(entry["test"]) or failure
    return found


def last_error(failure: str) -> str:
    """Return the first line of what pytest says about the last error of a failure."""
    lines = failure.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("E  ")]
    firsts = [number for number in starts if number - 1 not in starts]
    return lines[firsts[-1]].removeprefix("E").strip() if firsts else lines[0]


@dataclass(slots=True)
class Table:
    """What is counted, by suite and route."""

    passed: dict[tuple[str, str], int] = field(default_factory=collections.Counter)
    ran: dict[tuple[str, str], int] = field(default_factory=collections.Counter)
    listed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def add(self, suite: str, results: Mapping[str, Results]) -> None:
        """Count one file's results by route."""
        for route, found in results.items():
            self.ran[suite, route] += len(found)
            self.passed[suite, route] += sum(not failure for failure in found.values())
        for test in (test for test, failure in results["direct"].items() if not failure):
            failures = {
                route: failure for route, found in results.items() if (failure := found.get(test, "it did not run"))
            }
            if failures:
                reason = ONE_PROCESS.get(test) or ONE_PROCESS.get(test.partition("[")[0])
                said = reason or last_error(next(iter(failures.values())))
                seen = f"{test}\n    before {' and '.join(failures)}: {said}"
                (self.listed if reason else self.differing).append(seen)

    def print(self) -> None:
        print(f"\n{'passed of run':16}" + "".join(f"{route:>14}" for route in ROUTES))
        for suite in dict.fromkeys(suite for suite, _ in self.ran):
            counts = [f"{self.passed[suite, route]} of {self.ran[suite, route]}" for route in ROUTES]
            print(f"{suite:16}" + "".join(f"{count:>14}" for count in counts))
        for title, tests in (("of one process alone", self.listed), ("through the router alone", self.differing)):
            print(f"\n{len(tests)} fail {title}", *tests, sep="\n  ")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {', '.join(SUITES)}; default: all")
    parser.add_argument("--logs", type=Path, help="a folder for the output of servers and tests")
    asked = parser.parse_args(arguments)
    chosen = {suite: SUITES[suite] for suite in asked.suites or SUITES}
    with tempfile.TemporaryDirectory() as temporary:
        logs = asked.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        table = run_all(chosen, logs)
    table.print()
    return 1 if table.differing else 0


def run_all(suites: Mapping[str, Sequence[str]], logs: Path) -> Table:
    source = source_folder(VLLM_TESTS)
    home = make_hub(source)
    table = Table()
    with Desk(ENGINE / "vllm", home, logs) as desk:
        runs = Runs(source, home, logs, desk)
        for suite, files in suites.items():
            for file in files:
                results = {}
                for route, desk.workers in ROUTES.items():
                    results[route] = runs.run(f"tests/entrypoints/{file}")
                    passed = sum(not failure for failure in results[route].values())
                    print(f"{file}, {route}: {passed} of {len(results[route])} pass", flush=True)
                table.add(suite, results)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
