"""Policies compared before engines that run already: the table, what is left running, and mistakes."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from bench.__main__ import main
from bench.lab.engines.command import HEAD, Row, table
from bench.lab.engines.servers import Counted, counted, emptied
from tests.support.running import TIMEOUT_S
from tests.support.workers_http import call, eventually, series, text, worker

SHORT = "in_flight=4,documents=2,lights=1,light_in_flight=1,think=0.01,tokens=60,question=8,output=4"
FLAGS = ("--seconds", "2", "--warmup", "0.25", "--workload", f"own-documents:{SHORT}")


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[str, str]]:
    """Two emulated engines, of which one speaks like SGLang."""
    with worker() as one, worker(dialect="sglang") as other:
        yield one, other


def test_each_policy_has_a_row(engines: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are of calls that were made, an engine that keeps its cache is named, and no call is left running."""
    out = tmp_path / "out.json"
    one, other = engines
    main(["engines", one, f"{other}/v1", "--policies", "dlpm_home,rr+fcfs", "--rounds", "1", *FLAGS, "--out", str(out)])
    output, log = capsys.readouterr()
    head, *lines = output.splitlines()
    assert all(name in head for name in HEAD)
    names = ["dlpm_home", "rr+fcfs"]
    assert [line.split()[:2] for line in lines] == [[name, "1"] for name in names]
    rows = json.loads(out.read_text())["rows"]
    assert [row["policy"] for row in rows] == names
    for row in rows:
        assert row["tokens_per_s"] >= row["output_tokens_per_s"]
        assert 0 < row["counted_hit_rate"] < 1
    assert f"engines: {one} does not empty its prefix cache" in log
    assert f"engines: {other} does not empty" not in log
    asyncio.run(idle(engines))


def test_ctrl_c_ends_the_router_and_prints_the_finished_rounds(engines: tuple[str, str], tmp_path: Path) -> None:
    """No round has finished here, so the table is empty; the log ends once the router, which shares it, has ended."""
    out = tmp_path / "out.json"
    flags = ("--seconds", "900", "--workload", f"own-documents:{SHORT}", "--out", str(out))
    with subprocess.Popen(
        [sys.executable, "-m", "bench", "engines", *engines, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            asyncio.run(called(engines[0]))
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert (process.returncode, len(output.splitlines())) == (130, 1)
    assert json.loads(out.read_text())["rows"] == []


async def called(url: str) -> None:
    """Wait until an engine has answered one more call."""
    async with aiohttp.ClientSession() as http:
        before = (await series(http, url))["vllm:request_success_total"]

        async def more() -> bool:
            return (await series(http, url))["vllm:request_success_total"] > before

        await eventually(more)


async def idle(engines: tuple[str, str]) -> None:
    """Wait until no engine runs any call: SGLang empties its cache only then, and its gauges lag."""
    one, other = engines
    async with aiohttp.ClientSession() as http:

        async def none_runs() -> bool:
            seen = await series(http, one)
            return not seen["vllm:num_requests_running"] + seen["vllm:num_requests_waiting"]

        await eventually(none_runs)
        assert await emptied(http, other)


async def test_counters_and_caches_are_those_of_both_engines(engines: tuple[str, str]) -> None:
    """A repeated prompt counts as cached at either engine, until the cache was emptied where that is possible."""
    async with aiohttp.ClientSession() as http:
        for url, cached in zip(engines, (True, False), strict=True):
            prompt = text(list(range(40)), model="tiny")
            await call(http, f"{url}/v1/completions", prompt)
            before = await counted(http, [url])
            await call(http, f"{url}/v1/completions", prompt)
            middle = await counted(http, [url])
            assert middle.hit_rate_since(before) == pytest.approx(0.9)
            assert await emptied(http, url) is not cached
            await call(http, f"{url}/v1/completions", prompt)
            rate = (await counted(http, [url])).hit_rate_since(middle)
            assert rate == pytest.approx(0.9 if cached else 0.0)


def test_an_engine_without_counters_leaves_no_hit_rate() -> None:
    """Neither does a time without prompts."""
    assert Counted(10.0, None).hit_rate_since(Counted(0.0, None)) is None
    assert Counted(10.0, 5.0).hit_rate_since(Counted(10.0, 5.0)) is None


def test_medians_are_of_what_is_known() -> None:
    """A figure that one round lacks is that of the others; one that all lack is a dash."""
    rest = (None, None, 0.1, 0.2, None, 4, 0.5, 0.0)
    rows = [Row("vtc", 1, 100.0, 10.0, *rest), Row("vtc", 2, 300.0, 30.0, 0.5, *rest[1:])]
    assert table(rows)[-1].split() == [
        "vtc",
        "median",
        "200",
        "20",
        "0.500",
        "-",
        "0.100",
        "0.200",
        "-",
        "4",
        "0.500",
        "0.000",
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "no server at http://127.0.0.1:9: "),
        (("--policies", "dlpm_hom"), "unknown policy 'dlpm_hom'; did you mean dlpm_home?"),
        (("--rounds", "0"), "there must be a round"),
        (("--seconds", "5"), "seconds must be finite, and more than the warm-up"),
        (("--workload", "own-documents:lights=0"), "in_flight, documents, lights and light_in_flight must be"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], expected: str
) -> None:
    """It gives exit status 2 and nothing on standard output."""
    with pytest.raises(SystemExit) as caught:
        main(["engines", "http://127.0.0.1:9", *flags])
    output, log = capsys.readouterr()
    assert (caught.value.code, output) == (2, "")
    assert f"engines: error: {expected}" in log


def test_engines_with_different_models_are_refused(
    engines: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names both, and no router has been started."""
    with worker(model="other") as stranger, pytest.raises(SystemExit):
        main(["engines", engines[0], stranger, *FLAGS])
    assert f"{engines[0]} serves 'tiny', but {stranger} serves 'other'" in capsys.readouterr().err
