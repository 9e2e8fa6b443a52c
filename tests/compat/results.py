"""The results of vLLM's tests, and the table of those that pass direct and through the router."""

import collections
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROUTES: Mapping[str, int] = {"direct": 0, "one worker": 1, "two workers": 2}
"""The number of workers behind the router, or 0 without one."""
NOT_STARTED = "the server does not start: see its log"
"""The error of a test whose server does not start."""
Results = Mapping[str, str]
"""The text of each test's failure by its name; empty if it passed. Tests that were skipped are left out."""


def read(file: Path) -> Results:
    """Return the results that the plugin wrote; a test fails if one of its phases does.

    Raises RuntimeError if pytest has not come to its end, or found no test: its log says why.
    """
    *entries, last = [json.loads(line) for line in file.read_text().splitlines()] or [{}]
    if not last.get("ran"):
        raise RuntimeError("pytest ended without a test, or before its last one; see its log")
    found: dict[str, str] = {}
    for entry in entries:
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

    reasons: Mapping[str, str]
    """Why tests may fail through the router, by their names with or without parameters."""
    passed: dict[tuple[str, str], int] = field(default_factory=collections.Counter)
    ran: dict[tuple[str, str], int] = field(default_factory=collections.Counter)
    excused: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Runs of files that gave no results, and files of which no test got a server: they compare nothing."""

    def add(self, suite: str, results: Mapping[str, Results]) -> None:
        """Count one file's results by route."""
        for route, found in results.items():
            self.ran[suite, route] += len(found)
            self.passed[suite, route] += sum(not failure for failure in found.values())
        if all(NOT_STARTED in failure for failure in results["direct"].values()):
            file = next(iter(results["direct"])).partition("::")[0]
            self.broken.append(f"{file}: {NOT_STARTED}")
        for test in (test for test, failure in results["direct"].items() if not failure):
            failures = {
                route: failure for route, found in results.items() if (failure := found.get(test, "it did not run"))
            }
            if failures:
                reason = self.reasons.get(test) or self.reasons.get(test.partition("[")[0])
                said = reason or last_error(next(iter(failures.values())))
                seen = f"{test}\n    before {' and '.join(failures)}: {said}"
                (self.excused if reason else self.differing).append(seen)

    def print(self) -> None:
        print(f"\n{'passed of run':16}" + "".join(f"{route:>14}" for route in ROUTES))
        for suite in dict.fromkeys(suite for suite, _ in self.ran):
            counts = [f"{self.passed[suite, route]} of {self.ran[suite, route]}" for route in ROUTES]
            print(f"{suite:16}" + "".join(f"{count:>14}" for count in counts))
        kinds = {
            "tests fail for a known reason": self.excused,
            "tests fail through the router alone": self.differing,
            "files did not run": self.broken,
        }
        for title, found in kinds.items():
            print(f"\n{len(found)} {title}", *found, sep="\n  ")
