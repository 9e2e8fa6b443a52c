"""Emulated workers listen once they are reported as started, and exit with their parent."""

import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import httpx
import pytest

from router.errors import ConfigError
from router.runtime.emulate import start_emulated_workers


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def closed(connection: socket.socket) -> bool:
    """Wait until the other side closes a connection on which it has nothing to say."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it had not accepted it yet
        return True


def interrupted() -> None:
    with start_emulated_workers(1) as workers:
        raise KeyboardInterrupt(workers[0].url)


def test_workers_listen_inside_the_context_and_not_afterwards() -> None:
    """Inside the context each worker listens and serves its model, and afterwards nothing listens at its address."""
    with start_emulated_workers(2) as workers:
        assert len({worker.url for worker in workers}) == 2
        for worker in workers:
            assert worker.model in httpx.get(f"{worker.url}/v1/models", timeout=60).text
    for worker in workers:
        with pytest.raises(ConnectionRefusedError):
            connect(worker.url)


def test_an_exception_ends_the_workers() -> None:
    """If the router fails to start, the workers end, too."""
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    with pytest.raises(ConnectionRefusedError):
        connect(str(caught.value))


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """A router that had no time to clean up leaves no process behind."""
    parent = (
        "from router.runtime.emulate import start_emulated_workers as start\n"
        "with start(1) as w: print(w[0].url, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        with connect(process.stdout.readline().strip()) as connection:
            process.send_signal(signal.SIGKILL)
            assert closed(connection)


@pytest.mark.parametrize("program", ["print('no')", "pass"])
def test_a_worker_that_does_not_start_is_an_error_of_one_line(program: str) -> None:
    """The error quotes what the worker printed instead."""
    with pytest.raises(ConfigError, match="did not start"), start_emulated_workers(1, [sys.executable, "-c", program]):
        pass
