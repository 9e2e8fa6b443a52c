"""Run vLLM's own API tests three times: at a vLLM server, and at the router before one such server and before two.

Prints a table, and each test that passes direct and fails through the router; such a test that `suites.EXCUSED`
does not list makes the exit status 1. `make test-compat` runs it. Usage: python -m tests.compat [SUITE...]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.engine.fleet import OFFLINE

from .desk import Desk
from .environments import ENGINE, VLLM_TESTS
from .hub import make_hub
from .results import ROUTES, Results, Table, read
from .source import source_folder
from .suites import EXCUSED, SUITES

HERE = Path(__file__).parent
FILE_SECONDS = 1800
TEST_SECONDS = 300


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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {', '.join(SUITES)}; default: all")
    parser.add_argument("--logs", type=Path, help="a folder for the logs; default: a new one")
    asked = parser.parse_args(arguments)
    chosen = {suite: SUITES[suite] for suite in asked.suites or SUITES}
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="compat-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"logs of servers and tests: {logs}", flush=True)
    table = Table(EXCUSED)
    try:
        run_all(chosen, logs, table)
    finally:
        table.print()  # also of a run that is interrupted
    return 1 if table.differing or table.broken else 0


def run_all(suites: Mapping[str, Sequence[str]], logs: Path, table: Table) -> None:
    source = source_folder(VLLM_TESTS)
    home = make_hub(source)
    with Desk(ENGINE / "vllm", home, logs) as desk:
        runs = Runs(source, home, logs, desk)
        for suite, files in suites.items():
            for file in files:
                try:
                    table.add(suite, run_everywhere(runs, file))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    table.broken.append(f"{file}: {error}")


def run_everywhere(runs: Runs, file: str) -> Mapping[str, Results]:
    """Return one file's results by route. Raises RuntimeError or TimeoutExpired if a run does not come to its end."""
    results = {}
    for route, workers in ROUTES.items():
        runs.desk.workers = workers
        results[route] = runs.run(f"tests/entrypoints/{file}")
        passed = sum(not failure for failure in results[route].values())
        print(f"{file}, {route}: {passed} of {len(results[route])} pass", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
