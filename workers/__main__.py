"""`python -m workers`: one emulated worker as a process.

Prints one line on standard output when it accepts connections. SIGTERM and SIGINT end it at once, streams included,
with exit status 0.
"""

import os
import signal
import sys
from collections.abc import Callable
from threading import Thread

import uvloop

from workers.server.process import WorkerServer
from workers.settings import parse_settings


def main() -> None:
    settings = parse_settings(sys.argv[1:])
    server = WorkerServer(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.stop)
    if settings.exit_with_parent:
        Thread(target=_at_end_of_input, args=(server.stop,), daemon=True).start()
    print(f"workers: {settings.dialect} {settings.model} on {server.url}", flush=True)
    uvloop.run(server.run())


def _at_end_of_input(stop: Callable[[], None]) -> None:
    """Read standard input to its end: the kernel closes a parent's pipe however the parent dies."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop()


if __name__ == "__main__":
    main()
