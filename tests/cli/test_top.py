"""The command `d2lpm top`: what it shows of a router, in a terminal and to scripts, and what its keys do."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
from tests.support.workers_http import worker


def client(cost: float = 0.0, queued: int = 0, lag: float = 0.0) -> ClientReport:
    return ClientReport(1.0, Service(0, 0, 0, cost), queued, 0, None, None, {}, service_lag=lag)


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


def test_a_port_without_the_operators_paths_is_reported_with_what_to_do() -> None:
    """A router with --admin-port has no /fairness at its other port, nor has one on a public address without a key."""
    with worker() as without_fairness:
        call = f"import sys; from router.cli.main import main; sys.exit(main(['top', '{without_fairness}', '--once']))"
        assert "has no /fairness: name the port of --admin-port" in refused(call)


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
    console = Console(width=150)
    with console.capture() as shown:
        console.print(screen.render(30))
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
