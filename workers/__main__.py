"""Run one emulated worker as a process: `python -m workers`.

Prints its address to standard output once it accepts connections, and on a second line where other engines reach it, if
they do. SIGTERM and SIGINT end the process at once with exit status 0, cutting open streams.
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
    try:
        server = WorkerServer(settings)
    except OSError as error:
        print(f"workers: cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.stop)
    if settings.exit_with_parent:
        Thread(target=_at_end_of_input, args=(server.stop,), daemon=True).start()
    print(f"workers: {settings.dialect} {settings.model} on {server.url}", flush=True)
    if server.side_url is not None:
        print(f"workers: {settings.role}, for other engines on {server.side_url}", flush=True)
    uvloop.run(server.run())


def _at_end_of_input(stop: Callable[[], None]) -> None:
    """Call `stop` at the end of standard input: the kernel closes a parent's pipe however the parent dies."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop()


if __name__ == "__main__":
    main()
