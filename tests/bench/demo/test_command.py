"""The demo: its figures, how it handles failures, and the complete demo as processes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from urllib.parse import urlsplit

import httpx
import pytest

from bench.demo.command import POLICIES
from bench.demo.figures import Figures, ObservedCall, Phase, Reading, Timetable, figures
from bench.demo.load import Clients, DemoError, read_answer_line
from bench.demo.processes import fleet
from bench.demo.screen import PLAIN_SECONDS, PlainScreen, TerminalScreen
from bench.demo.table import BAR, ROWS, charts, explanation, findings, summary_lines
from bench.demo.trial import Snapshot, Trial
from bench.workloads.parts.prompts import EMPTY, Prompt
from bench.workloads.parts.traffic import Call, Client
from router.core.model.cost import Tokens
from tests.support.scripted_engine import DONE, event, scripted_engine, usage_chunk
from tests.support.scripted_engine import Call as Received

TIMEOUT_SECONDS = 60.0
DEMO_SECONDS = 300.0
"""Timeout for a demo, which starts twelve processes in turn: a busy machine takes 80 s."""
TIMES = Timetable(alone=10, heavy=100, measured=200, end=300)
NAMES = ("heavy", "light-1")
ASKED = Call(0.0, Prompt(EMPTY, (1, 2, 3)), output_tokens=5)

Answer = Callable[[Received], Awaitable[None]]


def live(client: str, arrived: float, started: float | None, finished: float | None, extend: int = 100) -> ObservedCall:
    """Return a finished call that costs `extend` + 100 cost units and hit 100 cached tokens."""
    return ObservedCall(client, arrived, started, finished, Tokens(extend, 100, 50))


def at_end(*calls: ObservedCall, reading: Reading | None = None) -> Figures:
    return figures(calls, NAMES, TIMES, TIMES.end, reading or Reading())


def test_only_calls_that_end_in_the_measured_time_count() -> None:
    """Cost, hit rate and Jain's index cover these calls only, whether or not they began before."""
    seen = at_end(
        live("heavy", 150, 160, 199, extend=9999),
        live("heavy", 150, 160, 201, extend=300),
        live("light-1", 210, 211, 299, extend=100),
        live("light-1", 290, 291, 300, extend=9999),
    )
    assert (seen.heavy.requests, seen.light.requests) == (1, 1)
    assert (seen.heavy.cost, seen.light.cost, seen.cost_per_s) == (400, 200, 6)
    assert seen.hit_rate == pytest.approx(200 / 600)
    assert seen.jain == pytest.approx(600**2 / (2 * (400**2 + 200**2)))


def test_a_call_still_waiting_at_the_end_counts_with_its_wait_so_far() -> None:
    """A call without a token counts, because otherwise a policy that starves clients would look fast."""
    seen = at_end(live("light-1", 220, 221, 222), live("light-1", 230, None, None))
    assert (seen.light.ttft_p50_s, seen.light.ttft_p95_s) == (1, 70)


def test_light_clients_are_measured_alone_before_the_heavy_one() -> None:
    """The figures without the heavy client leave out the first moments and the time beside it."""
    seen = at_end(live("light-1", 5, 50, 51), live("light-1", 60, 62, 63), live("light-1", 150, 199, 200))
    assert (seen.light_alone.requests, seen.light_alone.ttft_p95_s) == (2, 2)


def result(
    light_p95: float | None, hit_rate: float | None = 0.5, answered: int = 100, token_s: float = 0.01
) -> Figures:
    seen = at_end(live("light-1", 210, 211, 212))
    return replace(
        seen,
        light=replace(seen.light, ttft_p95_s=light_p95),
        heavy=replace(seen.heavy, requests=answered),
        hit_rate=hit_rate,
        token_s=token_s,
    )


SHOWN = {
    "d2lpm": result(3.0, 0.8, 180),
    "dlpm_home": result(2.0, 0.9, 190),
    "vtc": result(4.0, 0.3, 130),
    "rr+fcfs": result(24.0, 0.4, 140),
}
"""A run in which the policies differ as the router claims."""


def test_the_findings_state_what_the_run_shows() -> None:
    """Each claim comes with its figures: the waits of light clients, and hit rate and throughput."""
    fair, local = findings(SHOWN)
    assert fair.startswith("Fair: 95 % ")
    assert "within 3.00, 2.00 and 4.00 s under d2lpm, dlpm_home and vtc, and within 24.00 s under rr+fcfs" in fair
    assert fair.endswith("6.0 times as long or more.")
    assert local.startswith(
        "Local: d2lpm and dlpm_home found 0.80 and 0.90 of the input in the caches, vtc and rr+fcfs"
    )
    assert "answered 180 and 190 requests of the heavy client instead of 130 and 140" in local


@pytest.mark.parametrize("waits", [24.0, 30.0, None])
def test_a_run_without_shorter_waits_does_not_claim_them(waits: float | None) -> None:
    """If one fair policy lets light clients wait as long as the plain router does, or its wait is not known, the text
    says so.
    """
    fair, local = findings({**SHOWN, "vtc": result(waits, 0.3, 130)})
    assert fair.startswith("This run does not show that the fair policies shorten the wait of light clients: 95 % ")
    assert local.startswith("Local: ")


@pytest.mark.parametrize(
    "seen", [result(3.0, 0.4, 180), result(3.0, 0.8, 140), result(3.0, None, 180), result(3.0, 0.2, 100)]
)
def test_a_run_without_locality_does_not_claim_it(seen: Figures) -> None:
    """Both the hit rate and the throughput of each policy that follows the caches must be higher than those of all
    others.
    """
    fair, local = findings({**SHOWN, "d2lpm": seen})
    assert fair.startswith("Fair: ")
    assert local.startswith("This run does not show that following the caches pays: d2lpm and dlpm_home found ")


def test_a_machine_that_is_too_busy_causes_a_warning() -> None:
    """If the workers' pace was not the same under every policy, the demo warns about the figures."""
    assert len(findings(SHOWN)) == 2
    busy = findings({**SHOWN, "d2lpm": result(3.0, 0.8, 180, token_s=0.012)})
    assert "under d2lpm they took 20% longer for a token than under dlpm_home" in busy[-1]


def test_every_row_and_column_is_explained() -> None:
    """Below the summary, each figure and each policy in it has its words, within the width."""
    words = explanation(60)
    for name in (*POLICIES, *ROWS):
        assert any(line.startswith(f"{name}: ") for line in words), name
    assert max(map(len, words)) <= 60


def test_the_charts_have_bars_in_proportion() -> None:
    """The longest bar is that of the largest value; a missing value has none."""
    lines = charts({**SHOWN, "vtc": result(None, 0.3, 130)})
    bars = {line.split()[0]: line.count("█") for line in lines[1:5]}
    assert bars == {"d2lpm": round(BAR * 3 / 24), "dlpm_home": round(BAR * 2 / 24), "vtc": 0, "rr+fcfs": BAR}
    assert lines[5:7] == ["", "heavy: requests answered"]
    assert lines[8].split()[-1] == "190"


def test_the_token_time_is_that_of_light_clients_alone_after_the_first_token() -> None:
    """The wait for the first token does not count, and nothing beside the heavy client, where the policies differ."""
    alone = [live("light-1", 15, 20, 69), live("light-1", 30, 40, 89)]
    assert at_end(*alone, live("light-1", 150, 201, 250), live("heavy", 150, 240, 290)).token_s == 1.0


def test_the_summary_has_every_policy_and_every_figure() -> None:
    """Each policy has one column, as wide as the widest figure."""
    head, *rows = summary_lines({"one": result(1.0), "another": result(None, answered=10**9)})
    assert head.split() == ["one", "another"]
    assert len(rows) == len(ROWS)
    assert len({len(row) for row in [head, *rows]}) == 1


def snapshot(phase: Phase, waits: float = 1.0) -> Snapshot:
    seen = result(waits)
    return Snapshot(phase, seen, {"heavy": seen.heavy, "light-1": seen.light}, {"heavy": 96, "light-1": 1})


def drawn(columns: int, lines: int, *snapshots: Snapshot) -> str:
    """Return what is written to a terminal of this size."""
    stream = StringIO()
    screen = TerminalScreen(stream, ["d2lpm", "vtc"], lambda: os.terminal_size((columns, lines)))
    screen.start_policy("d2lpm", "http://127.0.0.1:1")
    for each in snapshots:
        screen.show(each)
    return stream.getvalue()


def test_a_table_is_drawn_over_the_one_before() -> None:
    """The cursor moves up by the height of the last table, and the new table replaces it completely."""
    first, last = snapshot(Phase.ALONE), snapshot(Phase.DONE, waits=77.0)
    table = drawn(200, 50, last).removeprefix("\x1b[J")
    assert "77.00" in table
    assert drawn(200, 50, first, last).endswith(f"\x1b[{table.count(chr(10))}F\x1b[J{table}")


@pytest.mark.parametrize(("columns", "lines"), [(40, 50), (200, 8)])
def test_a_small_terminal_is_not_overrun(columns: int, lines: int) -> None:
    """No line wraps and nothing scrolls; otherwise the next table would not cover this one."""
    table = drawn(columns, lines, snapshot(Phase.MEASURED)).removeprefix("\x1b[J").splitlines()
    assert len(table) < lines
    assert max(map(len, table)) < columns


def test_without_a_terminal_there_is_a_line_at_intervals() -> None:
    """There are no escape sequences; each phase has a line, and a long phase has more."""
    stream, now = StringIO(), 0.0
    screen = PlainScreen(stream, lambda: now)
    screen.start_policy("d2lpm", "http://127.0.0.1:1")
    for phase in (Phase.ALONE, Phase.ALONE, Phase.DONE, Phase.DONE):
        screen.show(snapshot(phase))
    now = PLAIN_SECONDS
    screen.show(snapshot(Phase.DONE))
    lines = [line.split(", ")[0] for line in stream.getvalue().splitlines()]
    assert lines == ["d2lpm at http://127.0.0.1:1", "d2lpm: light alone", "d2lpm: done", "d2lpm: done"]


async def played(answer: Answer) -> list[ObservedCall]:
    """Return what a client sees of one call that is answered like this."""
    async with scripted_engine() as router:
        clients = Clients(router.url, speed=1.0)
        playing = asyncio.create_task(clients.play(Client("light-1", [ASKED]), 0.0))
        await answer(await router.call())
        await playing
        await clients.close()
    return clients.calls


async def test_a_call_sends_what_the_workload_asks() -> None:
    """The router gets the unchanged prompt and length and the client's name; tokens come from the usage."""
    received = []

    async def answer(call: Received) -> None:
        received.append(call.json)
        await call.stream(b": waiting\n\n", event({"choices": [{}], "usage": None}), usage_chunk(3, 5, cached=2), DONE)

    (seen,) = await played(answer)
    assert seen.tokens == Tokens(extend=1, cached=2, output=5)
    assert seen.started is not None
    assert seen.finished is not None
    assert received[0].items() >= {"prompt": [1, 2, 3], "max_tokens": 5, "user": "light-1", "stream": True}.items()


def test_a_heartbeat_is_no_token() -> None:
    """A blank line that the router sends to a waiting client does not end the wait for the first token."""
    call = ObservedCall("light-1", arrived=1.0)
    read_answer_line(call, "", now=2.0)
    assert call.started is None
    read_answer_line(call, 'data: {"choices": [{}]}', now=3.0)
    read_answer_line(call, 'data: {"choices": [{}]}', now=4.0)
    assert call.started == 3.0


async def unavailable(call: Received) -> None:
    await call.respond(503, b'{"error": {"message":\n"nobody"}}')


async def broken(call: Received) -> None:
    await call.stream(event({"error": {"message": "worker_broke"}}))


async def cut_short(call: Received) -> None:
    await call.stream(event({"choices": [{}]}), DONE)


async def dropped(call: Received) -> None:
    await call.begin()
    call.reset()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (unavailable, 'answered 503: {"error": {"message": "nobody"}}'),
        (broken, "a request failed: .*worker_broke"),
        (cut_short, "ended before its usage"),
        (dropped, "the router at http://127.0.0.1:[0-9]+ broke off"),
    ],
)
async def test_a_call_that_fails_ends_the_trial(answer: Answer, message: str) -> None:
    """Figures of a failing fleet would be meaningless, so the trial ends with a one-line error."""
    async with scripted_engine() as router:
        router.poll_answers["/fairness"] = (200, b'{"workers": {}}')
        trial = Trial(router.url, 5.0, [Client("heavy", []), Client("light-1", [ASKED])], TIMES, lambda _: None)
        running = asyncio.create_task(trial.run())
        await answer(await router.call())
        with pytest.raises(DemoError, match=message) as caught:
            await running
        assert "\n" not in str(caught.value)


async def test_a_router_that_is_gone_ends_the_trial() -> None:
    """The trial also ends if the demo's own poll cannot connect."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        trial = Trial(f"http://127.0.0.1:{deaf.getsockname()[1]}", 1.0, [Client("heavy", [])], TIMES, lambda _: None)
        with pytest.raises(DemoError, match="broke off: ConnectError"):
            await trial.run()


async def test_a_router_that_fails_ends_the_trial() -> None:
    """The trial also ends if that poll is answered by an error."""
    async with scripted_engine() as router:
        router.poll_answers["/fairness"] = (500, b"")
        trial = Trial(router.url, 5.0, [Client("heavy", [])], TIMES, lambda _: None)
        with pytest.raises(DemoError, match="broke off: HTTPStatusError") as caught:
            await trial.run()
        assert "\n" not in str(caught.value)


def test_a_worker_that_does_not_start_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """The worker's own message goes to standard error, and the demo's is one line."""
    with pytest.raises(DemoError, match="worker did not start"), fleet(1, ["--hardware", "abacus"], []):
        pass
    assert "unknown hardware 'abacus'" in capfd.readouterr().err


def test_a_router_that_does_not_start_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """The router's own message goes to standard error, and the demo's is one line."""
    with pytest.raises(DemoError, match="router did not start"), fleet(0, [], ["--policy", "nobody's"]):
        pass
    assert 'there is no policy "nobody\'s"' in capfd.readouterr().err


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module as a program in its own session, with an environment setting meant for other routers."""
    environment = {**os.environ, "D2LPM_EMULATE": "1"}
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        try:
            yield started
        finally:
            started.terminate()  # killing it would leave its children running


def test_the_whole_demo() -> None:
    """In a demo of a few seconds every policy serves the load, within its bound if it has one."""
    with process("bench", "demo", "--json", "--seconds", "14", "--speed", "10") as demo:
        output, log = demo.communicate(timeout=DEMO_SECONDS)
    assert (demo.returncode, log) == (0, "")
    report = json.loads(output)
    assert report["load"]["in_flight"] == 96
    assert list(report["policies"]) == list(POLICIES) == ["d2lpm", "dlpm_home", "vtc", "rr+fcfs"]
    for policy, seen in report["policies"].items():
        assert seen["cost_per_s"] > 0, policy
        assert 0 <= seen["hit_rate"] < 1, policy
        assert 0.2 <= seen["jain"] <= 1, policy
        assert (seen["service_gap"] is None) == (policy == "rr+fcfs")
        assert (seen["service_gap_bound"] is None) == (policy in ("vtc", "rr+fcfs"))
        if seen["service_gap_bound"] is not None:
            assert seen["service_gap"] <= seen["service_gap_bound"]
    for clients in ("heavy", "light"):  # on a busy machine, those of one policy may not end in its measured time
        assert sum(seen[clients]["requests"] for seen in report["policies"].values()) > 0
    assert sum(seen["light_alone"]["requests"] for seen in report["policies"].values()) > 0
    assert len(report["findings"]) >= 2


def test_ctrl_c_leaves_nothing_running() -> None:
    """The exit code is a shell's, one line reports the interrupt, and all listening sockets are closed."""
    with process("router", "demo") as demo:
        assert demo.stdout is not None
        url = next(line for line in demo.stdout if line.startswith("d2lpm at ")).split()[-1]
        assert demo.stdout.readline().startswith("d2lpm: light alone")
        workers = [worker["url"] for worker in httpx.get(f"{url}/workers", timeout=TIMEOUT_SECONDS).json()["workers"]]
        os.killpg(demo.pid, signal.SIGINT)
        _, log = demo.communicate(timeout=TIMEOUT_SECONDS)
    assert (demo.returncode, log) == (130, "demo: interrupted; the router and its workers have ended\n")
    assert len(workers) == 2
    for address in map(urlsplit, [url, *workers]):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_SECONDS)
