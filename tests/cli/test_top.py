"""The command `d2lpm top`: what it shows of a router, in a terminal and to scripts, and what its keys do."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from router.cli.keyboard import NAMES, split
from router.cli.screen import CLIENT_COLUMNS, Pane, Screen, compact, percent, seconds
from router.core.model.request import WorkerId
from router.telemetry.report import ClientReport, FairnessReport, Service, WorkerReport
from tests.support.running import TIMEOUT_S, RunningRouter, chat, running_router
from tests.support.scripted_engine import ScriptedEngine, scripted_engine

LINES, COLUMNS = 30, 150
CODES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HOME: Final = "\x1b[H"
"""Begins each frame: all of the screen is painted anew."""
SHOWN: Final = ("client", "weight", "waiting", "running", "wait p50", "wait p95", "lag", "deficit", "cost")
"""Columns of clients that stand still while the router is at rest."""


def client(cost: float = 0.0, queued: int = 0, lag: float = 0.0) -> ClientReport:
    return ClientReport(1.0, Service(0, 0, 0, cost), queued, 0, None, None, {}, service_lag=lag)


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

    def close(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        os.close(self._side)


@asynccontextmanager
async def served(*users: str) -> AsyncIterator[tuple[ScriptedEngine, RunningRouter]]:
    """Run a router at rest, at which each of these users has made one call."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for number, user in enumerate(users):
            async with router.post(chat("words " * 100 * (number + 1), user=user)) as post:
                await (await engine.call()).answer()
                await post.read()
        await router.until_all_ended()
        yield engine, router


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


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
            assert await asyncio.to_thread(terminal.process.wait, TIMEOUT_S) == 0
        finally:
            terminal.close()


async def test_one_frame_is_printed_for_scripts() -> None:
    """With --once, every client is printed in lines of one width, however many there are, without control codes."""
    users = [f"u{number}" for number in range(30)]
    async with served(*users) as (_, router):
        command = (sys.executable, "-m", "router", "top", router.url, "--once")
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        printed, _ = await process.communicate()
        fairness = await router.fairness()
        assert process.returncode == 0
        lines = printed.decode().splitlines()
        assert b"\x1b" not in printed
        assert {cells(line)[0] for line in lines if line.startswith("user-")} == fairness["clients"].keys()


def refused(code: str) -> str:
    """Run Python code that must end with exit code 2, and return what it wrote on standard error."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2, done
    return done.stderr


def test_without_rich_or_a_terminal_or_a_router_one_line_says_what_is_missing() -> None:
    """The exit code is 2, and the line names the extra, the flag for scripts, or the URL."""
    call = "from router.cli.main import main; sys.exit(main(['top', 'http://127.0.0.1:9', *{}]))"
    without_rich = f"import sys; sys.modules['rich.console'] = None; {call.format(['--once'])}"
    assert refused(without_rich).endswith("pip install 'd2lpm-router[top]'\n")
    assert "--once prints one frame" in refused(f"import sys; {call.format([])}")
    assert "http://127.0.0.1:9 does not answer" in refused(f"import sys; {call.format(['--once'])}")


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 3), min_size=1),
    st.lists(st.sampled_from(["move", "order", "reverse"])),
)
def test_the_selection_follows_its_row(costs: dict[str, int], actions: list[str]) -> None:
    """Whatever the order and however it changes, only `move` selects another row, and every row stays."""
    pane = Pane("clients", CLIENT_COLUMNS, "cost")
    rows = {name: client(float(cost)) for name, cost in costs.items()}
    pane.show(rows)
    pane.move(0)
    for action in actions:
        before = pane.selected
        {"move": lambda: pane.move(1), "order": lambda: pane.order_by(1), "reverse": pane.reverse}[action]()
        assert pane.selected is not None
        if action != "move":
            assert pane.selected == before
    pane.show(dict(reversed(rows.items())))
    assert pane.table().row_count == len(rows)


def test_rows_are_ordered_by_the_column_chosen() -> None:
    """The arrow keys choose the column; equal rows are in the order of their names."""
    pane = Pane("clients", CLIENT_COLUMNS, "cost")
    pane.show({"b": client(2.0, lag=9.0), "c": client(5.0), "a": client(2.0)})

    def names() -> list[str]:
        return [str(cell) for cell in pane.table().columns[0].cells]

    assert names() == ["c", "a", "b"]
    pane.order_by(-2)
    assert names()[0] == "b"
    pane.reverse()
    assert names()[-1] == "b"


def test_a_table_that_is_too_high_shows_the_rows_around_the_selection() -> None:
    """The row selected is always on the screen, and the heading says how many rows are shown."""
    pane = Pane("clients", CLIENT_COLUMNS, "cost")
    pane.show({f"c{number:02}": client(float(number)) for number in range(40)})
    for line in range(40):
        table = pane.table(7, focused=True)
        assert table.title == "clients: 40, 7 shown"
        assert f"c{39 - line:02}" in [str(cell) for cell in table.columns[0].cells]
        pane.move(1)


def test_details_show_a_name_as_it_is() -> None:
    """Brackets in the name of a worker, as around an IPv6 address, are not markup."""
    name = "[fe80::1]:8000"
    worker = WorkerReport(f"http://{name}", True, 0, 0, 0, None, None, None, None)
    screen = Screen("http://router")
    screen.show(FairnessReport("dlpm", None, {}, Service(0, 0, 0, 0.0), {WorkerId(name): worker}))
    for key in ("tab", "enter"):
        screen.press(key)
    console = Console(width=COLUMNS)
    with console.capture() as shown:
        console.print(screen.render(LINES))
    assert name in shown.get().splitlines()[2]


@given(st.lists(st.sampled_from([*NAMES, b"q", b"r"])))
def test_keys_that_come_together_are_told_apart(codes: list[bytes]) -> None:
    """A terminal may send several keys at once; an escape key is only ambiguous at the end of a block."""
    known = [code for code in codes if code != b"\x1b"]
    assert [*split(b"".join(known))] == [NAMES.get(code, code.decode()) for code in known]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (7.25, "7.25"), (999, "999"), (999.9, "1.00k"), (12345, "12.3k"), (-2.5e6, "-2.50M")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    """A suffix replaces the digits that nobody compares."""
    assert compact(value) == text
    assert (percent(0.1234), percent(None), seconds(0.5)) == ("12.3%", "-", "0.50s")
