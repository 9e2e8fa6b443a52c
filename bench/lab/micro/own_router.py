"""The router in this process, from its command line, where a profiler can see it."""

import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from http.client import HTTPConnection
from pathlib import Path
from typing import Final

from bench.report.exits import refuse

ROUTER: Final = str(Path(__file__).parents[3] / "router") + os.sep
"""How the path of each of the router's files begins."""
START_SECONDS: Final = 60


def run_router(flags: Sequence[str], play: Callable[[int], None]) -> None:
    """Run the router, and in a thread, once it is ready, `play` with its port; the router ends when that returns.

    An OSError or ValueError in the thread ends this process with its message.
    """
    port, failures = _free_port(), list[str]()

    def play_once_ready() -> None:
        try:
            _wait_until_ready(port)
            play(port)
        except (OSError, ValueError) as error:
            failures.append(str(error))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    client = threading.Thread(target=play_once_ready)
    arguments, sys.argv = sys.argv, ["d2lpm", "serve", "--port", str(port), "--log-level", "error", *flags]
    client.start()
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_module("router", run_name="__main__", alter_sys=False)
    except SystemExit:
        pass
    finally:
        sys.argv = arguments
    client.join()
    if failures:
        refuse("bench", failures[0])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait_until_ready(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise ValueError(f"the router was not ready within {START_SECONDS} s")
