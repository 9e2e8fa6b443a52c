"""The processes of the demo: emulated workers and a router, on free ports."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from bench.demo.load import MODEL, DemoError
from router.errors import ConfigError
from router.runtime.emulate import COMMAND, start_emulated_workers, terminated_on_exit

LISTENING: Final = re.compile(r"d2lpm: listening on (?P<url>http://[^ ,]+)")
STOP_TIMEOUT_SECONDS: Final = 10.0
"""How long the router has to exit after SIGTERM: longer than it gives its requests."""


@contextmanager
def fleet(
    workers: int,
    worker_flags: Sequence[str],
    router_flags: Sequence[str],
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Start workers and a router, yield the router's URL, and stop them all on exit.

    `variables`: of the router's environment, beside those of this process.

    Raises DemoError if one does not start.
    """
    try:
        with start_emulated_workers(workers, [*COMMAND, "--model", MODEL, *worker_flags]) as started:
            addresses = [flag for worker in started for flag in ("--worker", worker.url)]
            with router([*addresses, *router_flags], variables) as url:
                yield url
    except ConfigError as error:
        raise DemoError(str(error)) from None


@contextmanager
def router(flags: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Start a router, yield its URL, and stop it on exit; `variables` as for `fleet`. Raises DemoError."""
    command = [sys.executable, "-m", "router", "serve", "--port", "0", "--log-level", "error", *flags]
    # Settings in the user's environment would change what is compared here.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("D2LPM_")}
    # In its own process group, like the workers, so that Ctrl-C does not stop it before its clients have stopped.
    started = subprocess.Popen(command, env={**kept, **variables}, stdout=subprocess.PIPE, text=True, process_group=0)
    with terminated_on_exit(started, STOP_TIMEOUT_SECONDS) as process:
        yield _url(process)


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    found = LISTENING.match(line := process.stdout.readline())
    if found is None:
        raise DemoError(f"the router did not start; it said {line.strip()!r}")
    return found["url"]
