"""Run vLLM's own API tests three times: at a vLLM server, and at the router before one such server and before two.

Prints a table, and each test that passes direct and fails through the router; such a test that `suites.EXCUSED`
does not list makes the exit status 1. `make test-compat` runs it. Usage: python -m tests.compat [SUITE...]
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.engine.fleet import VLLM_ENVIRONMENT

from .desk import Desk
from .environments import VLLM_TESTS
from .fork_server import ForkServer
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

    forks: ForkServer
    logs: Path
    desk: Desk

    def run(self, file: str) -> Results:
        """Return the results of one file, whose tests go where the desk now sends them."""
        results = self.logs / "results"
        results.write_text("")
        options = ("-p", "url_server", "-p", "no:cacheprovider", "-q", "-o", f"faulthandler_timeout={TEST_SECONDS}")
        arguments = (*options, "-o", "faulthandler_exit_on_timeout=true", file)
        environment = {"COMPAT_DESK": self.desk.url, "COMPAT_RESULTS": str(results)}
        pytest = self.forks.fork("pytest", arguments, environment, self.logs / "pytest")
        try:
            pytest.wait(FILE_SECONDS)
        finally:
            pytest.terminate()
        return read(results)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {', '.join(SUITES)}; default: all")
    parser.add_argument("--logs", type=Path, help="a folder for the logs; default: a new one")
    parser.add_argument("--jobs", type=int, default=2, help="files that run at the same time; default: %(default)s")
    asked = parser.parse_args(arguments)
    chosen = {suite: SUITES[suite] for suite in asked.suites or SUITES}
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="compat-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"logs of servers and tests: {logs}", flush=True)
    table = Table(EXCUSED)
    try:
        run_all(chosen, logs, table, asked.jobs)
    finally:
        table.print()  # also of a run that is interrupted
    return 1 if table.differing or table.broken else 0


def run_all(suites: Mapping[str, Sequence[str]], logs: Path, table: Table, jobs: int) -> None:
    """Run all files, `jobs` at the same time, each job with servers of its own."""
    source = source_folder(VLLM_TESTS)
    environment = {**VLLM_ENVIRONMENT, "HF_HOME": str(make_hub(source)), "PYTHONPATH": str(HERE / "plugin")}
    files = iter([(suite, file) for suite, files in suites.items() for file in files])
    lock = threading.Lock()  # of the files and the table

    def run_job(folder: Path) -> None:
        folder.mkdir()
        with Desk(forks, folder) as desk:
            while True:
                with lock:
                    suite, file = next(files, ("", ""))
                if not file:
                    return
                try:
                    results = run_everywhere(Runs(forks, folder, desk), file)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    with lock:
                        table.broken.append(f"{file}: {error}")
                else:
                    with lock:
                        table.add(suite, results)

    with ForkServer(VLLM_TESTS, source, environment, logs / "fork server") as forks, ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(run_job, logs / str(job)) for job in range(jobs)]:
            done.result()


def run_everywhere(runs: Runs, file: str) -> Mapping[str, Results]:
    """Return one file's results by route. Raises RuntimeError or TimeoutExpired if a run does not come to its end."""
    results = {}
    runs.desk.begin_file()
    for route, workers in ROUTES.items():
        runs.desk.workers = workers
        results[route] = runs.run(f"tests/entrypoints/{file}")
        passed = sum(not failure for failure in results[route].values())
        print(f"{file}, {route}: {passed} of {len(results[route])} pass", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
