"""The limit of open files, and how many the router may need: each connection is one."""

import resource
from contextlib import suppress
from typing import Final

SPARE: Final = 64
"""Files for libraries, the log, saved state and listening sockets."""
PER_WORKER: Final = 4
"""Files for polling one worker and for its KV events."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit that now applies."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # fails if the hard limit is infinite, as the kernel has a maximum of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def needed(connections: int, workers: int, in_flight: int | None) -> int:
    """Return how many files may be needed for this many client connections and workers.

    `in_flight`: the most calls in flight at one worker; None if only the client connections bound them.
    """
    upstream = connections if in_flight is None else min(connections, workers * in_flight)
    return connections + upstream + PER_WORKER * workers + SPARE
