"""How many processes the routers of the tests have: one, or `make test PROCESSES=3`.

With several, `running_router` and the tests that start the command `d2lpm serve` run a scheduler and fronts as
processes. A test that reaches into the router's objects is skipped then, with the reason: one process suits it.
"""

import os
from typing import Final, NoReturn

import pytest

VARIABLE: Final = "PROCESSES"
"""The environment variable with the number."""
ONE_ONLY: Final = "with one process only: "
"""How the reason begins for which a test is skipped."""
STARTED: Final = "a router of {} processes"
"""What each test that starts such a router prints, so that the tests can be counted."""


def process_count() -> int:
    """Return how many processes a router has."""
    return int(os.environ.get(VARIABLE) or 1)


def process_flags() -> tuple[str, ...]:
    """Return the flags that give `d2lpm serve` its processes: none for one. Later flags override them."""
    if process_count() == 1:
        return ()
    note_start()
    return ("--processes", str(process_count()))


def note_start() -> None:
    """Say on standard output that a router of several processes starts."""
    print(STARTED.format(process_count()))


def needs_one_process(why: str) -> NoReturn:
    """Skip a test that cannot run with several processes."""
    pytest.skip(ONE_ONLY + why)
