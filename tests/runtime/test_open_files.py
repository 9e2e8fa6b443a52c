"""The limit of open files, and how many the connections may need."""

import resource
import subprocess
import sys

from router.runtime.open_files import PER_WORKER, SPARE, needed


def test_a_call_needs_a_file_on_each_side() -> None:
    """Files are needed for all clients and for as many calls as can be in flight at the workers, at most one per
    client.
    """
    rest = 2 * PER_WORKER + SPARE
    assert needed(connections=1000, workers=2, in_flight=10) == 1020 + rest
    assert needed(connections=1000, workers=2, in_flight=1024) == 2000 + rest
    assert needed(connections=1000, workers=2, in_flight=None) == 2000 + rest


def test_the_soft_limit_becomes_the_hard_one() -> None:
    """The function returns the limit that applies afterwards, here in a process with a lower soft limit."""
    program = (
        "from resource import *; import router.runtime.open_files as o; "
        "print(o.raise_limit(), *getrlimit(RLIMIT_NOFILE))"
    )
    hard = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    command = ["sh", "-c", f'ulimit -S -n 100; ulimit -H -n {hard}; exec "$0" -c "$1"', sys.executable, program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == [str(hard)] * 3
