"""`d2lpm top` in a pseudo-terminal: what it shows is what /fairness reports."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from typing import Any, Final

from router.cli.screen import compact, seconds
from tests.cli.test_top import cells, served
from tests.support.running import TIMEOUT_S

LINES, COLUMNS = 30, 150
CODES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HOME: Final = "\x1b[H"
"""Begins each frame: all of the screen is painted anew."""
SHOWN: Final = ("client", "weight", "waiting", "running", "wait p50", "wait p95", "lag", "deficit", "cost")
"""Columns of clients that stand still while the router is at rest."""


class Terminal:
    """A pseudo-terminal with `d2lpm top` in it."""

    def __init__(self, url: str) -> None:
        self._side, its_side = pty.openpty()
        fcntl.ioctl(its_side, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        command = [sys.executable, "-m", "router", "top", url, "--interval", "0.2"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=its_side, stdout=its_side, stderr=its_side, env=environment, start_new_session=True
        )
        os.close(its_side)
        self._written = ""

    def press(self, keys: bytes) -> None:
        """Press keys. Only what is painted from now on counts."""
        self._written = ""
        os.write(self._side, keys)

    async def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Return the lines of the first whole frame of which this holds."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for frame in reversed(self._written.split(HOME)[1:-1]):
                    if condition(lines := [CODES.sub("", line).rstrip() for line in frame.splitlines()]):
                        return lines
                self._written += (await asyncio.to_thread(os.read, self._side, 65536)).decode()

    async def ended(self) -> int:
        """Return the exit status, and read what is painted until then: a full terminal blocks whoever writes to it."""
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(OSError):  # nobody has the other side open any more
                while await asyncio.to_thread(os.read, self._side, 65536):
                    pass
            return await asyncio.to_thread(self.process.wait)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        os.close(self._side)


def expected(name: str, fairness: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a client's row, worked out from the JSON of /fairness."""
    entry = fairness["clients"][name]
    texts = {
        "client": name,
        "weight": compact(entry["weight"]),
        "waiting": compact(entry["queued"]),
        "running": compact(entry["running"]),
        "wait p50": seconds(entry["wait_p50_s"]),
        "wait p95": seconds(entry["wait_p95_s"]),
        "lag": compact(entry["service_lag"]),
        "deficit": compact(min(deficit["order"] for deficit in entry["deficit"].values())),
        "cost": compact(entry["service"]["cost"]),
    }
    assert tuple(texts) == SHOWN
    return texts


async def test_a_terminal_shows_what_fairness_reports() -> None:
    """The tables have each client and worker of /fairness with its figures, and details have every field; q ends it."""
    async with served("ann", "bob", "eve") as (_, router):
        fairness = await router.fairness()
        (worker,) = fairness["workers"]
        terminal = Terminal(router.url)
        try:
            lines = await terminal.until(lambda lines: any(line.startswith(worker) for line in lines))
            head = next(line for line in lines if line.startswith("client "))
            titles = [title.removesuffix(" ▼") for title in cells(head)]
            rows = {cells(line)[0]: dict(zip(titles, cells(line), strict=True)) for line in lines if "user-" in line}
            assert rows.keys() == fairness["clients"].keys()
            for name, row in rows.items():
                assert {title: row[title] for title in SHOWN} == expected(name, fairness)
            terminal.press(b"\t\r")
            lines = await terminal.until(lambda lines: any(line.startswith("kv_tokens") for line in lines))
            details = dict(cells(line)[:2] for line in lines if len(cells(line)) >= 2)
            report = fairness["workers"][worker]
            assert details["url"] == report["url"]
            assert details["window requests"] == str(report["window"]["requests"])
            assert details["service_gap_bound"] == str(report["service_gap_bound"])
            assert details["cache believed"] == str(report["cache"]["believed"])
            terminal.press(b"q")
            assert await terminal.ended() == 0
        finally:
            terminal.close()
