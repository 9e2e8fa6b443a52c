"""How many files the router may have open, and how many it may come to need: each connection is one."""

import resource
from contextlib import suppress
from typing import Final

SPARE: Final = 64
"""For the libraries, the log, what is saved, and the sockets that listen."""
PER_WORKER: Final = 4
"""For polls of a worker and its KV events."""


def raise_limit() -> int:
    """Take as many as the system allows; returns how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # where the hard limit is none at all, the kernel's own is less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def needed(connections: int, workers: int, in_flight: int | None) -> int:
    """How many files so many connections of clients may need, with as many calls as may be `in_flight` at one worker.

    None where nothing bounds these but the clients' connections.
    """
    upstream = connections if in_flight is None else min(connections, workers * in_flight)
    return connections + upstream + PER_WORKER * workers + SPARE
