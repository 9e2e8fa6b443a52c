"""A workload over HTTP: its records, its failures, the command, and its agreement with virtual time."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from bench.__main__ import main
from bench.demo.processes import fleet
from bench.live import completions
from bench.live.clients import LiveLoad, run_load
from bench.live.command import load_warnings
from bench.live.player import Player
from bench.live.recorder import LiveResult
from bench.report.records import Record
from bench.report.summary import Summary, summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.parts.spec import parse_spec
from bench.workloads.parts.traffic import Call, Client, Ending, Outcome, Workload
from bench.workloads.registry import WORKLOADS
from tests.bench.sim.simulated import Scripted, own_prompt
from tests.support.running import running_router
from tests.support.scripted_engine import DONE, event, scripted_engine, usage_chunk
from tests.support.scripted_engine import Call as Received
from tests.support.workers_http import eventually, series, worker

PATIENCE = 60.0
SECONDS = 1000.0
"""Seconds, longer than any test: these loads end when their calls have ended."""
ASKED = Call(0.0, own_prompt(1, 40), output_tokens=5)

Answer = Callable[[Received], Awaitable[None]]


async def loaded(url: str, *calls: tuple[str, Call], **settings: object) -> LiveResult:
    """Run these calls and return the result."""
    load = LiveLoad(url, Scripted(calls), **{"seconds": SECONDS, "model": "m", **settings})  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE):
        return await run_load(load)


async def answered(answer: Answer, call: Call = ASKED, **settings: object) -> tuple[Record, LiveResult]:
    """Return the record of one call that is answered like this."""
    async with scripted_engine() as server:
        running = asyncio.create_task(loaded(server.url, ("c1", call), **settings))
        await answer(await server.call())
        ended = await running
    (record,) = ended.result.records
    return record, ended


async def whole(call: Received) -> None:
    """Answer with a comment, two tokens in one event, three in another, and the usage."""
    used = {"prompt_tokens": 40, "completion_tokens": 2}
    first = event({"choices": [{"text": "a b"}], "usage": used})
    second = event({"choices": [{"text": " c d e"}], "usage": {**used, "completion_tokens": 5}})
    await call.stream(b": waiting\n\n", first[:9], first[9:] + second, usage_chunk(40, 5, cached=16), DONE)


async def test_a_call_is_recorded_as_its_client_saw_it() -> None:
    """Tokens and cached tokens are the server's; what only our router reports stays empty."""
    record, ended = await answered(whole)
    assert (record.client, record.outcome) == ("c1", Outcome.DONE)
    assert (record.input_tokens, record.cached_tokens, record.output_tokens) == (40, 16, 5)
    assert record.started is not None
    assert record.finished is not None
    assert 0 <= record.arrived <= record.started <= record.finished
    assert (record.worker, record.dispatched, record.predicted_cached_tokens) == (None, None, None)
    summary = ended.summary()
    assert summary["hit_rate"] == 16 / 40
    assert summary["throughput_tokens_per_s"] == pytest.approx(45 / SECONDS)
    assert summary["workers"] == {}
    assert (summary["clients"]["c1"]["service"], summary["clients"]["c1"]["client_service"]) == (24 + 10, 40 + 10)


async def test_the_server_gets_what_the_workload_asks() -> None:
    """Prompt and length are unchanged, client and session are named, and all token ids are in the vocabulary."""
    received = []

    async def answer(call: Received) -> None:
        received.append(call)
        await whole(call)

    await answered(answer, replace(ASKED, session="s 1"), key_prefix="p-", stream_interval=7, vocabulary=1020)
    (call,) = received
    assert call.headers["x-session-id"] == "s 1"
    wanted = {"model": "m", "user": "p-c1", "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_interval": 7}
    assert call.json.items() >= wanted.items()
    assert call.json["prompt"] == [token % 1020 for token in ASKED.prompt.tokens]
    assert call.headers["authorization"] == "Bearer p-c1"


async def unavailable(call: Received) -> None:
    await call.respond(503, b'{"error": {"message":\n"nobody"}}')


async def refused(call: Received) -> None:
    await call.respond(429, b"full")


async def dropped(call: Received) -> None:
    await call.respond(503, b"none", "x-d2lpm-dropped-reason: no_worker")


async def broken(call: Received) -> None:
    await call.stream(event({"error": {"message": "worker_broke"}}))


async def cut_short(call: Received) -> None:
    await call.stream(event({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 40, "completion_tokens": 1}}))


async def without_usage(call: Received) -> None:
    await call.stream(event({"choices": [{"text": "a"}]}), DONE)


async def no_json(call: Received) -> None:
    await call.stream(b"data: {nonsense\n\n", DONE)


async def reset(call: Received) -> None:
    await call.begin()
    call.reset()


@pytest.mark.parametrize(
    ("answer", "outcome", "expected"),
    [
        (unavailable, Outcome.FAILED, '503: {"error": {"message": "nobody"}}'),
        (refused, Outcome.REJECTED, "429: full"),
        (dropped, Outcome.REJECTED, "503: none"),
        (broken, Outcome.FAILED, "worker_broke"),
        (cut_short, Outcome.FAILED, "ended before its usage"),
        (without_usage, Outcome.FAILED, "ended before its usage"),
        (no_json, Outcome.FAILED, "JSONDecodeError"),
        (reset, Outcome.FAILED, "Client"),
    ],
)
async def test_a_call_that_fails_is_a_record(answer: Answer, outcome: Outcome, expected: str) -> None:
    """The load continues, the reason is one line, and only what arrived counts as served."""
    record, ended = await answered(answer)
    assert (record.outcome, record.cached_tokens) == (outcome, None)
    ((reason, times),) = ended.failures.items()
    assert times == 1
    assert expected in reason
    assert "\n" not in reason
    assert load_warnings(ended)[0] == f"1 calls ended with {reason}"


async def test_a_client_that_leaves_is_cancelled() -> None:
    """A cancelled call closes the connection at the servers' pace and is no failure; an event without usage is one
    token.
    """

    async def wait(call: Received) -> None:
        await call.begin()
        await call.write(event({"choices": [{"text": "a"}]}))
        await call.wait_closed()

    record, ended = await answered(wait, Call(0.0, ASKED.prompt, 5, cancel_after=100.0), speed=100.0)
    assert (record.outcome, record.output_tokens) == (Outcome.CANCELLED, 1)
    assert record.finished is not None
    assert record.finished - record.arrived >= 100.0
    assert not ended.failures


async def test_an_answer_may_come_whole() -> None:
    """A call that does not stream gets its answer whole, and has no first token."""
    received = []

    async def answer(call: Received) -> None:
        received.append(call.json)
        used = {"prompt_tokens": 40, "completion_tokens": 5, "prompt_tokens_details": None}
        await call.respond(200, json.dumps({"choices": [{"text": "a b c d e"}], "usage": used}).encode())

    record, ended = await answered(answer, Call(0.0, ASKED.prompt, 5, streamed=False))
    assert "stream" not in received[0]
    assert (record.outcome, record.started, record.cached_tokens, record.output_tokens) == (Outcome.DONE, None, 0, 5)
    assert ended.totals.prompt_tokens == 40


async def test_the_next_turn_contains_an_answer_of_equal_length() -> None:
    """The next turn's prompt has an answer as long as the received one."""
    endings = []

    def then(_: Call, ending: Ending) -> Iterable[Call]:
        endings.append(ending)
        return [Call(ending.at, ASKED.prompt.followed_by(ending.answer), 3)]

    with worker(model="m") as url:
        ended = await loaded(url, ("c1", Call(0.0, ASKED.prompt, 5, then=then)))
    assert [record.input_tokens for record in ended.result.records] == [40, 45]
    assert [record.output_tokens for record in ended.result.records] == [5, 3]
    assert (endings[0].outcome, len(endings[0].answer)) == (Outcome.DONE, 5)


async def test_our_router_distinguishes_the_clients() -> None:
    """Each client has its own account there, and the records contain what the router's headers report."""
    calls = [(f"c{number % 3}", Call(0.0, own_prompt(number % 3, 400), 4)) for number in range(9)]
    with worker(model="m") as url:
        async with running_router(url) as router:
            ended = await loaded(router.url, *calls)
            assert len((await router.fairness())["clients"]) == 3
    assert [record.outcome for record in ended.result.records] == [Outcome.DONE] * 9
    assert len({record.worker for record in ended.result.records} - {None}) == 1
    assert all(record.dispatched is not None for record in ended.result.records)
    assert sum(record.cached_tokens or 0 for record in ended.result.records) > 0


async def test_time_runs_as_fast_as_the_servers() -> None:
    """A call is made no earlier than its time by the faster clock."""
    arrived = []

    async def make(_client: Client, _call: Call) -> Ending:
        arrived.append(player.now)
        return Ending(Outcome.DONE, player.now)

    player = Player(200.0, make)
    await player.play(Client("c1", [Call(at, ASKED.prompt, 1) for at in (0.0, 5.0, 10.0)]))
    assert all(at >= wanted for at, wanted in zip(arrived, (0.0, 5.0, 10.0), strict=True))


@pytest.mark.parametrize(
    "line", [b": waiting", b"", b"data: [DONE]", b"event: ping", b"id: 3"], ids=lambda line: line.decode() or "empty"
)
def test_comments_do_not_count_as_tokens(line: bytes) -> None:
    """Comments and the end mark contain no token."""
    assert completions.event(line) is None


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command as a process, and wait for it to end."""
    line = [sys.executable, "-m", "bench", "load", *arguments]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_the_command_writes_the_simulators_report(tmp_path: Path) -> None:
    """The report has the flags, the summary and the records of two clients in a closed loop."""
    out = tmp_path / "out.json"
    workload = "short:client_count=2,concurrency=2,sessions=6"
    with worker() as url:
        main(["load", f"{url}/v1/", "--workload", workload, "--seconds", "60", "--json", str(out), "--records"])
    written = json.loads(out.read_text())
    assert written["options"]["workload"] == workload
    assert written["requests"]["done"] == 12
    assert [record["output_tokens"] for record in written["records"]] == [8] * 12
    assert set(written["clients"]) == {"c1", "c2"}
    assert (written["workers"], written["failures"], written["interrupted"]) == ({}, {}, False)


def test_the_command_replays_recorded_sessions(tmp_path: Path) -> None:
    """Each session that ends is followed by another one until the time is over."""
    recording, out = tmp_path / "sessions.jsonl", tmp_path / "out.json"
    session = {"tool_tokens": 40, "system_tokens": 8, "requests": [[0, 100, 4, 0, 1, 0, "tool_use"]]}
    recording.write_text(json.dumps(session) + "\n", "utf-8")
    with worker() as url:
        trace = f"sessions,client_count=2,concurrency=1:{recording}"
        main(["load", url, "--trace", trace, "--seconds", "1", "--json", str(out)])
    written = json.loads(out.read_text())
    assert written["options"]["trace"] == trace
    assert written["requests"]["done"] > 2
    assert set(written["clients"]) == {"c1", "c2"}


def test_ctrl_c_gives_the_report_so_far() -> None:
    """The figures are of the time until the interrupt, and the exit status is a shell's."""
    with worker() as url, command(url, "--workload", "short:client_count=1,concurrency=1", "--seconds", "900") as load:
        asyncio.run(wait_for_calls(url))
        load.send_signal(signal.SIGINT)
        output, log = load.communicate(timeout=PATIENCE)
    report = json.loads(output)
    assert (load.returncode, log, report["interrupted"]) == (130, "", True)
    assert report["seconds"] < 900
    assert report["requests"]["done"] > 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "no server at http://127.0.0.1:{port}: "),
        (("--workload", "nobody's"), 'unknown name "nobody\'s"'),
        (("--trace", "sessions:/none"), "cannot read /none"),
        (("--trace", "nobodys:/none"), "unknown trace 'nobodys'"),
        (("--warmup", "60"), "seconds must be finite"),
        (("--speed", "0"), "speed must be positive"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], expected: str) -> None:
    """Mistakes, and an unreachable server, give exit status 2 and nothing on standard output."""
    with socket.socket() as closed_port:
        closed_port.bind(("127.0.0.1", 0))
        port = closed_port.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            main(["load", f"http://127.0.0.1:{port}", *flags])
    output, log = capsys.readouterr()
    assert (caught.value.code, output) == (2, "")
    assert log.startswith(f"load: error: {expected.format(port=port)}")
    assert log.count("\n") == 1


async def wait_for_calls(url: str) -> None:
    """Wait until the worker has finished some calls."""
    async with aiohttp.ClientSession() as http:

        async def finished() -> bool:
            return (await series(http, url))["vllm:request_success_total"] > 3

        await eventually(finished)


def test_a_missing_package_is_reported() -> None:
    """One line reports that an installed router has no aiohttp, and the other commands work without it."""
    program = "import sys; sys.modules['aiohttp'] = None; from bench.__main__ import main; main(['load', 'http://x'])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "bench: error: aiohttp is not installed; it comes with the extra `dev` (make dev)\n"


SPEED = 2.0
HARDWARE = "a10g-llama-7b"
SAME = "documents:documents=12,tokens=4000,client_count=3,rate=0,concurrency=3,output=32"
"""Nine of the twelve documents fit into each of the two caches: all hit as long as each stays at one worker."""
KV_TOKENS = 36_000
WARMUP, END = 8.0, 38.0
RUNS = 4


def test_virtual_time_and_sockets_agree() -> None:
    """The same workload on the same fleet has a hit rate within 3 points and a throughput within 10 %.

    Over sockets time is real, and where processes are late to run, the figures depend on the machine. So steps are slow
    and requests long compared with the delays of a busy machine, and the caches have room for another document: without
    that, a tie in time would decide which one is evicted, and it would miss from then on. A machine that was too busy
    all the same has a lower throughput, so one of several runs must have the right one.
    """
    workload = parse_spec(SAME, WORKLOADS)
    scenario = Scenario("d2lpm", workload, (WorkerSpec(HARDWARE, kv_tokens=KV_TOKENS),) * 2, END, WARMUP)
    simulated = summarise(Simulation(scenario).run())
    wanted = pytest.approx(simulated["throughput_tokens_per_s"], rel=0.1)
    throughputs: list[float] = []
    while wanted not in throughputs and len(throughputs) < RUNS:
        summary = over_sockets(workload)
        assert summary["hit_rate"] == pytest.approx(simulated["hit_rate"], abs=0.03)
        throughputs.append(summary["throughput_tokens_per_s"])
    assert wanted in throughputs


def over_sockets(workload: Workload) -> Summary:
    """Run the workload before a fleet of processes, where no call may fail."""
    flags = ("--speed", str(SPEED), "--hardware", HARDWARE, "--kv-tokens", str(KV_TOKENS))
    with fleet(2, flags, ("--policy", "d2lpm", "--poll-interval", str(0.5 / SPEED))) as url:
        live = asyncio.run(run_load(LiveLoad(url, workload, END, WARMUP, speed=SPEED, stream_interval=20)))
    assert not live.failures
    return live.summary()
