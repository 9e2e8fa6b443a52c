"""Noisy neighbours: the traffic, the command, the routers that are compared, and that every call is counted."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from itertools import islice
from math import inf
from pathlib import Path

import aiohttp
import pytest

from bench.__main__ import main
from bench.lab.experiments import contestants
from bench.lab.frame.experiment import Row, Value
from bench.lab.frame.measures import max_min
from bench.lab.frame.report import write
from bench.lab.neighbour.driver import Span, Target, drive
from bench.lab.neighbour.experiment import DIRECT, FIGURES, ROUTERS, NoisyNeighbour, Plan, doubts, run, undisturbed
from bench.lab.neighbour.servers import SGLANG_FLAGS, ServerError, contestant, expanded, started
from bench.lab.neighbour.traffic import Neighbours, spoken
from bench.report.records import Record, Result, ServiceSample
from bench.report.summary import summarise
from bench.workloads.parts.traffic import Call, Outcome
from tests.bench.sim.simulated import Scripted, own_prompt
from tests.support.running import TIMEOUT_S
from tests.support.scripted_engine import DONE, event, scripted_engine, usage_chunk
from tests.support.scripted_engine import Call as Received
from tests.support.workers_http import eventually, series, worker
from workers.engine.tokenizer import encode

TINY = Neighbours(heavy=1, light=1, open=3, prefix=200, heavy_input=20, heavy_output=10, rate=4.0)
SPEED = 8.0


def test_heavy_clients_have_a_prefix_of_their_own() -> None:
    """All calls of a heavy client and of no other client begin with its prefix, and a word is a token."""
    clients = Neighbours(heavy=2, light=1, prefix=50).clients(seed=1)
    prompts = [[spoken(call.prompt) for call in islice(client.calls, 3)] for client in clients]
    heads = [{" ".join(prompt.split()[:50]) for prompt in of_one} for of_one in prompts]
    assert [len(own) for own in heads] == [1, 1, 3]
    assert len(set.union(*heads)) == 5
    assert len(set(prompts[0])) == 3
    call = next(iter(Neighbours(heavy=0, light_input=77).clients(seed=1)[0].calls))
    assert len(encode(spoken(call.prompt))) == len(call.prompt) == 77


@pytest.mark.parametrize("wrong", [{"light": 0}, {"open": 0}, {"heavy": -1}, {"light_output": 0}, {"rate": 0.0}])
def test_invalid_traffic_is_refused(wrong: dict[str, int]) -> None:
    """Invalid traffic raises ValueError before anything is started."""
    with pytest.raises(ValueError, match="must be"):
        Neighbours(**wrong)


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({"a": inf, "b": 10.0}, {"a": 90.0, "b": 10.0}),
        ({"a": inf, "b": inf}, {"a": 50.0, "b": 50.0}),
        ({"a": 70.0, "b": 70.0, "c": 10.0}, {"a": 45.0, "b": 45.0, "c": 10.0}),
        ({"a": 1.0}, {"a": 1.0}),
        ({}, {}),
    ],
)
def test_a_fair_share_is_the_demand_and_at_most_an_equal_share(
    asked: dict[str, float], parts: dict[str, float]
) -> None:
    """What small clients do not use is divided among the others."""
    assert max_min(asked, 100.0) == parts


def record(client: str, arrived: float, started: float | None, outcome: Outcome = Outcome.DONE) -> Record:
    """Return a call of 100 tokens, of which 40 are cached, and 10 output tokens."""
    finished = None if outcome is Outcome.UNFINISHED or started is None else started + 1
    times = {"dispatched": None, "started": started, "finished": finished}
    expected = {"input_tokens": 100, "cached_tokens": 40, "predicted_cached_tokens": None, "output_tokens": 10}
    return Record(id="", client=client, outcome=outcome, arrived=arrived, worker=None, why=None, **times, **expected)  # type: ignore[arg-type]


def measured(*records: Record, **service: float) -> dict[str, Value]:
    """Return the figures of ten seconds, of which the first is the warm-up."""
    names = {name.replace("_", "-"): each for name, each in service.items()}
    samples = [ServiceSample(1.0, dict.fromkeys(names, 0.0), {}), ServiceSample(10.0, names, {})]
    result = Result(10.0, 1.0, records, {}, dict.fromkeys(names, 1.0), tuple(samples))
    return dict(NoisyNeighbour().measure(result, summarise(result)))


def test_figures_are_of_the_measured_time() -> None:
    """An unfinished wait counts with its length so far, and a call from the warm-up counts in no wait."""
    figures = measured(
        record("light-1", 0.5, 5.0),
        record("light-1", 2.0, 3.0),
        record("light-1", 4.0, None, Outcome.UNFINISHED),
        record("heavy-1", 1.0, 9.5),
        record("heavy-1", 1.0, 3.0),
        record("heavy-1", 1.0, 3.0, Outcome.FAILED),
        light_1=80.0,
        heavy_1=320.0,
    )
    assert (figures["light TTFT p50"], figures["light TTFT p95"]) == (1.0, 6.0)
    assert (figures["light share"], figures["heavy share"]) == (0.2, 0.8)
    assert figures["fair share"] == 0.4, "two calls of 80 each"
    assert (figures["heavy tokens/s"], figures["tokens/s"]) == (110 / 9, 330 / 9)
    assert [figures[name] for name in ("calls", "done", "unfinished", "failed")] == [6, 4, 1, 1]


def test_there_is_no_fair_share_without_an_answered_call() -> None:
    """A share of the service is missing, too, if nothing at all was served."""
    starved = measured(record("light-1", 2.0, None, Outcome.UNFINISHED), light_1=0.0, heavy_1=240.0)
    assert (starved["light share"], starved["fair share"]) == (0.0, None)
    assert measured(light_1=0.0)["light share"] is None


async def refused(call: Received) -> None:
    await call.respond(429, b"full")


async def unavailable(call: Received) -> None:
    await call.respond(503, b"nobody\nhere")


async def broken(call: Received) -> None:
    await call.stream(event({"error": {"message": "worker_broke"}}))


async def cut_short(call: Received) -> None:
    await call.stream(event({"choices": [{"text": "a"}]}))


async def whole(call: Received) -> None:
    await call.stream(event({"choices": [{"text": "a b"}]}), usage_chunk(40, 5, cached=16), DONE)


@pytest.mark.parametrize(
    ("answer", "outcome", "expected"),
    [
        (whole, Outcome.DONE, None),
        (refused, Outcome.REJECTED, "429: full"),
        (unavailable, Outcome.FAILED, "503: nobody here"),
        (broken, Outcome.FAILED, "worker_broke"),
        (cut_short, Outcome.FAILED, "ended before its usage"),
    ],
)
async def test_a_call_is_text_and_every_outcome_is_recorded(
    answer: Callable[[Received], Awaitable[None]], outcome: Outcome, expected: str | None
) -> None:
    """The key and `user` name the client, and the reason of a failure is one line."""
    asked = Scripted((("light-1", Call(0.0, own_prompt(1, 40), 5)),))
    async with scripted_engine() as server:
        running = asyncio.create_task(drive(Target([server.url], "m"), asked, Span(1000.0, 0.0), 0))
        call = await server.call()
        await answer(call)
        ended = await running
    assert call.headers["authorization"] == "Bearer light-1"
    assert (call.json["user"], call.json["max_tokens"], len(encode(call.json["prompt"]))) == ("light-1", 5, 40)
    (record,) = ended.result.records
    assert record.outcome is outcome
    assert len(ended.failures) == (expected is not None)
    assert all(expected is not None and expected in reason and "\n" not in reason for reason in ended.failures)
    assert ended.totals.cached_tokens == (16 if outcome is Outcome.DONE else 0)


def test_a_contest_counts_every_call(tmp_path: Path) -> None:
    """Over real sockets no call is lost, shares sum to one, and the table has a row for each router and load."""
    plan = Plan([ROUTERS[0], DIRECT], [TINY], Span(8.0, 1.0), SPEED, ("--max-running", "4"))
    progress: list[tuple[int, int]] = []
    (rows,) = run(plan, [0], lambda over, of: progress.append((over, of)))
    assert progress == [(1, 2), (2, 2)]
    assert [row.labels for row in rows] == [{"router": who.name, "heavy": "1"} for who in plan.contestants]
    for row in rows:
        seen = {name: values[0] for name, values in row.values.items()}
        assert seen["failed"] == 0
        assert seen["calls"] == seen["done"] + seen["unfinished"]  # type: ignore[operator]
        assert seen["done"] > 10  # type: ignore[operator]
        assert seen["light calls"] > 10  # type: ignore[operator]
        assert seen["light share"] + seen["heavy share"] == pytest.approx(1.0)  # type: ignore[operator]
        assert seen["tokens/s"] > seen["heavy tokens/s"] > 0  # type: ignore[operator]
        assert 0.25 < seen["hit rate"] < 1.0  # type: ignore[operator]  # a slow machine has few calls after the first ones
    write("neighbour", NoisyNeighbour(), rows, [0], tmp_path)
    assert "| d2lpm | 1 |" in (tmp_path / "neighbour.md").read_text()
    assert {"neighbour.json", "neighbour.md", "neighbour.png"} == {path.name for path in tmp_path.iterdir()}


def test_ctrl_c_prints_the_finished_runs(tmp_path: Path) -> None:
    """No run has finished here, so the table is empty; the exit status is a shell's."""
    out = tmp_path / "out.json"
    with worker() as url:
        line = [sys.executable, "-m", "bench", "neighbour", url, "--seconds", "900", "--json", str(out)]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                asyncio.run(answered(url))
                process.send_signal(signal.SIGINT)
                output, log = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
    assert (process.returncode, log, len(output.splitlines())) == (130, "", 1)
    assert json.loads(out.read_text())["rows"] == []


async def answered(url: str) -> None:
    """Wait until the worker has answered a call."""

    async def some() -> bool:
        return sum(await finished_calls([url])) > 0

    await eventually(some)


async def finished_calls(urls: list[str]) -> list[float]:
    """Return how many calls each worker has answered."""
    async with aiohttp.ClientSession() as http:
        return [(await series(http, url))["vllm:request_success_total"] for url in urls]


def test_the_command_sends_to_several_servers_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each number of heavy clients has one run, in a table and as JSON."""
    out = tmp_path / "out.json"
    traffic = "open=2,prefix=40,rate=8,heavy_output=3,light_output=2"
    with worker() as one, worker() as other:
        flags = ("--heavy", "0,1", "--light", "1", "--seconds", "1", "--traffic", traffic, "--json", str(out))
        main(["neighbour", one, f"{other}/v1", *flags])
        counts = asyncio.run(finished_calls([one, other]))
    rows = json.loads(out.read_text())["rows"]
    assert [row["heavy"] for row in rows] == [0, 1]
    assert [row["calls"] - row["done"] - row["unfinished"] for row in rows] == [0, 0]
    assert rows[0]["light share"] == 1.0
    assert min(counts) > 0
    assert abs(counts[0] - counts[1]) <= 8, "what was open when a run ended"
    head, *lines = capsys.readouterr().out.splitlines()
    assert all(name in head for name in FIGURES)
    assert [line.split()[0] for line in lines] == ["0", "1"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "no server at http://127.0.0.1:9/v1/models: "),
        (("--seconds", "0"), "seconds must be finite"),
        (("--speed", "0"), "there must be a server, and the speed must be positive"),
        (("--traffic", "nobodys=1"), "unknown parameter 'nobodys'"),
        (("--heavy", "1,1"), "--heavy names a number twice"),
        (("--heavy", "many"), "--heavy is no list of numbers: 'many'"),
        (("--light", "0"), "there must be a light client"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], expected: str) -> None:
    """Mistakes, and an unreachable server, give exit status 2 and nothing on standard output."""
    with pytest.raises(SystemExit) as caught:
        main(["neighbour", "http://127.0.0.1:9", *flags])
    output, log = capsys.readouterr()
    assert (caught.value.code, output) == (2, "")
    assert log.startswith(f"neighbour: error: {expected}")
    assert log.count("\n") == 1


def test_any_router_takes_part_by_its_command_line() -> None:
    """An argument with the worker's placeholder is repeated for each worker."""
    own = contestant("own=serve --port {port} --worker={worker} --metrics {other_port}")
    line = expanded(own.command, 80, 81, ["http://a", "http://b"])
    assert line == ["serve", "--port", "80", "--worker=http://a", "--worker=http://b", "--metrics", "81"]
    urls = expanded(SGLANG_FLAGS, 80, 81, ["http://a", "http://b"])
    assert urls[urls.index("--worker-urls") :][:3] == ["--worker-urls", "http://a", "http://b"]


@pytest.mark.parametrize("text", ["name", "=serve {port}", "name=", "name=serve"])
def test_a_router_needs_a_name_and_a_port(text: str) -> None:
    """A contestant without them raises ValueError before anything is started."""
    with pytest.raises(ValueError, match=r"NAME=COMMAND|\{port\}"):
        contestant(text)


def test_an_absent_sglang_router_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The experiment runs without it and with the others."""
    own = "own=serve {port}"
    names = [who.name for who in contestants([own], "python -m sglang_router.launch_router")]
    assert capsys.readouterr().err == ""
    assert [who.name for who in contestants([own], None)] == [name for name in names if name != "sglang-router"]
    assert "no sglang-router here" in capsys.readouterr().err
    assert names == ["d2lpm", "dlpm_home", "sglang-router", "own", "workers in turn"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((sys.executable, "-c", "raise SystemExit('no such policy')"), "own does not serve; it said 'no such policy'"),
        (("/nowhere/router",), "own does not start: No such file or directory: /nowhere/router"),
    ],
)
def test_a_router_that_does_not_start_is_reported(command: tuple[str, ...], expected: str) -> None:
    """The error contains the router's last output."""
    with pytest.raises(ServerError, match=expected), started("own", command):
        pass


def test_a_machine_that_was_too_slow_is_reported() -> None:
    """A single slow round is reported, although no median shows it."""
    lost = {"1": [0.0, 0.01, 0.0], "2": [0.0, 0.3, 0.0]}
    rows = [Row({"router": "d2lpm", "heavy": heavy}, {"time lost": each}) for heavy, each in lost.items()]
    assert list(doubts(rows)) == ["d2lpm, 2: in 1 of 3 rounds the workers were too slow"]


@pytest.mark.parametrize(
    ("lost", "kept"), [((0.0, 0.5), 0.0), ((0.5, 0.02, 0.0), 0.02), ((0.5, 0.4, 0.3, 0.0), 0.3)], ids=str
)
def test_a_disturbed_run_is_repeated(lost: tuple[float, ...], kept: float) -> None:
    """The run is repeated a bounded number of times, whatever its results."""
    tries = iter(lost)
    assert undisturbed(lambda: {"time lost": next(tries)}) == {"time lost": kept}
