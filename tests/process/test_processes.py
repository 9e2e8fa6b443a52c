"""`d2lpm serve --processes` as real processes: they answer as one router, and survive the death of a front."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from router.runtime.own_python import python_command
from tests.chaos.processes import cpu_ticks, is_stopped, router_processes, runs
from tests.cli.test_main import Router, serving, streamed_call
from tests.support.running import CHAT, TIMEOUT_S, emulated_workers
from tests.support.scripted_engine import DONE, Call, ScriptedEngine, chunk, scripted_engine, usage_chunk
from tests.support.workers_http import eventually

STREAMS: Final = 50
CALM_LOOKS: Final = 100
"""Looks at a process, 10 ms apart, between which one that waits has used no CPU."""
SLOW: Final = ("--step-times", "20,0,0", "--speed", "1")
"""Flags of workers that take 20 ms for each token of an answer."""


def processes_of(router: Router) -> dict[str, int]:
    """The processes that the supervisor has started, by name, with their process ids."""
    return router_processes(router.process.pid)


def folders_in(path: Path) -> list[Path]:
    """The folders of sockets between processes."""
    return list(path.glob("d2lpm-*"))


async def all_processes(router: Router) -> dict[str, int]:
    """The processes of a router with two fronts, once the standby runs, too."""

    async def complete() -> bool:
        return len(processes_of(router)) == 4

    await eventually(complete)
    return processes_of(router)


async def all_ended(processes: Mapping[str, int]) -> None:
    """Wait until none of these processes runs."""

    async def ended() -> bool:
        return not any(map(runs, processes.values()))

    await eventually(ended)


@contextmanager
def two_fronts(folder: Path, *flags: str, steps: Sequence[str] = ()) -> Iterator[Router]:
    """Run a scheduler and two fronts before two emulated workers. `steps`: how fast these are, at once by default."""
    with emulated_workers(2, *steps) as workers:
        given = [flag for worker in workers for flag in ("--worker", worker)]
        with serving(folder, "--processes", "3", "--poll-interval", "0.05", *given, *flags) as router:
            yield router


@asynccontextmanager
async def two_fronts_of_one_engine(folder: Path) -> AsyncIterator[tuple[Router, ScriptedEngine]]:
    """Run a scheduler and two fronts before an engine that answers when the test lets it, however slow the machine."""
    async with scripted_engine() as engine:
        with serving(
            folder, "--processes", "3", "--poll-interval", "0.05", "--window", "off", "--worker", engine.url
        ) as router:
            yield router, engine


@asynccontextmanager
async def client_of(router: Router, workers: int = 2) -> AsyncIterator[aiohttp.ClientSession]:
    """A client, once this many workers are up, whose calls have a connection each."""
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(router.url, connector=connector, timeout=timeout) as http:

        async def ready() -> bool:
            return bool((await get(http, "/ready")).get("workers") == workers)

        await eventually(ready)
        yield http


async def get(http: aiohttp.ClientSession, path: str, **headers: str) -> Any:
    async with http.get(path, headers=headers) as response:
        return await response.json()


async def status(http: aiohttp.ClientSession, path: str, body: object = None) -> int:
    """The status of the answer to a GET, or with a body to a POST."""
    async with http.request("GET" if body is None else "POST", path, json=body) as response:
        return response.status


async def stream(http: aiohttp.ClientSession, tokens: int, **headers: str) -> bytes:
    """The body of a streamed answer, as far as it came."""
    received = b""
    call = streamed_call(model="m", max_tokens=tokens, ignore_eos=True)
    try:
        async with http.post(CHAT, json=call, headers=headers) as response:
            async for block in response.content.iter_any():
                received += block
    except aiohttp.ClientError:
        pass
    return received


async def begun(engine: ScriptedEngine, count: int) -> list[Call]:
    """Wait for so many calls, and stream the first token of each answer."""
    calls = [await engine.call() for _ in range(count)]
    for call in calls:
        await call.begin()
        await call.write(chunk("so far"))
    return calls


async def end(call: Call) -> None:
    """Stream the end of an answer, unless its front is gone."""
    with suppress(ConnectionError):
        await call.write(chunk("", "stop") + usage_chunk(10, 1) + DONE)
        await call.end()


async def answer_all(engine: ScriptedEngine) -> None:
    """Answer every call at once, until this is cancelled."""
    while True:
        await (await engine.calls.get()).answer()


async def metric(http: aiohttp.ClientSession, sample: str) -> dict[str, float]:
    """The values of a metric by its labels, as written."""
    async with http.get("/metrics") as response:
        text = await response.text()
    return {labels: float(value) for labels, value in re.findall(rf"^{sample}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)}


async def calls_by_process(http: aiohttp.ClientSession) -> dict[str, float]:
    """The calls in flight in each process."""
    calls = await metric(http, "d2lpm_process_calls")
    return {labels.split('"')[1]: value for labels, value in calls.items()}


async def check_at_rest(http: aiohttp.ClientSession) -> None:
    """Wait until /fairness shows nothing that waits or runs; while no scheduler runs, it shows nothing at all."""

    async def at_rest() -> bool:
        report = await get(http, "/fairness")
        if "clients" not in report:
            return False
        entries = [*report["clients"].values(), *report["workers"].values()]
        return not any(entry["queued"] or entry["running"] for entry in entries)

    await eventually(at_rest)


async def test_fifty_streams_over_two_fronts_are_all_answered(tmp_path: Path) -> None:
    """Each stream is complete, nothing is left running, and the page of metrics shows every process."""
    with two_fronts(tmp_path) as router:
        async with client_of(router) as http:
            answers = await asyncio.gather(*(stream(http, 20) for _ in range(STREAMS)))
            assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)
            await check_at_rest(http)
            finished = await metric(http, "d2lpm_requests_total")
            assert sum(finished.values()) == STREAMS
            assert set(await calls_by_process(http)) == {"scheduler", "front-1", "front-2"}
        router.signal(signal.SIGTERM)
        code, log = router.end()
    assert code == 0
    assert "Traceback" not in log
    assert "ERROR" not in log


async def test_the_death_of_a_front_harms_only_its_own_streams(tmp_path: Path) -> None:
    """Its streams break off and are settled; those of the other front are complete; a new front takes its place."""
    async with two_fronts_of_one_engine(tmp_path) as (router, engine):
        async with client_of(router, workers=1) as http:
            before = processes_of(router)
            streams = [asyncio.create_task(stream(http, 150)) for _ in range(STREAMS)]
            running = await begun(engine, STREAMS)
            calls: dict[str, float] = {}

            async def all_are_reported() -> bool:
                calls.update(await calls_by_process(http))
                return calls.get("front-1", 0) + calls.get("front-2", 0) == calls["scheduler"] == STREAMS

            await eventually(all_are_reported)
            victim = min(("front-1", "front-2"), key=lambda front: calls[front] or STREAMS)
            os.kill(before[victim], signal.SIGKILL)
            await asyncio.gather(*map(end, running))
            answers = await asyncio.gather(*streams)
            assert sum(answer.endswith(b"data: [DONE]\n\n") for answer in answers) == STREAMS - calls[victim]
            await check_at_rest(http)
            outcomes = await metric(http, "d2lpm_requests_total")
            assert sum(count for labels, count in outcomes.items() if "cancelled" in labels) == calls[victim]

            async def all_report() -> bool:
                return len(await metric(http, "d2lpm_channel_delay_seconds")) == 2

            await eventually(all_report)
            assert processes_of(router)[victim] != before[victim]
            last = asyncio.create_task(stream(http, 5))
            await asyncio.gather(*map(end, await begun(engine, 1)))
            assert (await last).endswith(b"data: [DONE]\n\n")
        router.signal(signal.SIGTERM)
        code, log = router.end()
    assert code == 0
    assert f"{victim} ended with code -9" in log


async def test_no_process_outlives_its_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the supervisor is killed and can tell nobody; its folder is gone, too, whichever process is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with two_fronts(tmp_path) as router:
        async with client_of(router):
            processes = await all_processes(router)
        assert folders_in(tmp_path)
        # The scheduler cannot delete the folder while it is stopped; the kernel ends it as its group loses its parent,
        # but only if it has stopped by then.
        os.kill(processes["scheduler"], signal.SIGSTOP)

        async def scheduler_is_stopped() -> bool:
            return is_stopped(processes["scheduler"])

        await eventually(scheduler_is_stopped)
        router.process.kill()
        await all_ended(processes)
        assert not folders_in(tmp_path)


@pytest.mark.parametrize(
    ("name", "number"), [("scheduler", signal.SIGKILL), ("scheduler", signal.SIGSTOP), ("front-1", signal.SIGSTOP)]
)
async def test_a_process_that_dies_or_hangs_is_started_again(name: str, number: signal.Signals, tmp_path: Path) -> None:
    """The standby takes the scheduler's place, another waits then, and new calls are answered as before."""
    with two_fronts(tmp_path) as router:
        async with client_of(router) as http:
            before = await all_processes(router)
            os.kill(before[name], number)
            await all_ended({name: before[name]})

            async def serves() -> bool:
                answer = await stream(http, 5)
                return answer.endswith(b"data: [DONE]\n\n") and len(processes_of(router)) == 4

            await eventually(serves)
            after = processes_of(router)
            assert after["scheduler"] == before["standby" if name == "scheduler" else "scheduler"]
            assert after["standby"] not in before.values() or name != "scheduler"

            async def all_report() -> bool:
                restarts = await metric(http, "d2lpm_process_restarts_total")
                return len(restarts) == 3 and restarts[f'process="{name}"'] == 1

            await eventually(all_report)
        router.signal(signal.SIGTERM)
        code, log = router.end()
        await all_ended(before | after)
    assert code == 0
    assert f"{name} ended with code -9 (SIGKILL)" in log


@pytest.mark.parametrize("interval", ["0.2", "3600"])
async def test_the_death_of_the_scheduler_harms_no_call(interval: str, tmp_path: Path) -> None:
    """Streams run on, calls that wait are answered by the next run, and each client is charged what it received, once,
    and so says its usage; also if nothing has been saved since the workers joined.
    """
    with two_fronts(
        tmp_path, "--max-inflight", "2", "--window", "fixed", "--state-interval", interval, steps=SLOW
    ) as router:
        async with client_of(router) as http:
            calls = [asyncio.create_task(stream(http, 60, authorization=f"Bearer {n % 3}")) for n in range(12)]

            async def waiting() -> bool:
                report = await get(http, "/fairness")
                return bool(sum(client["running"] for client in report["clients"].values()) == 4)

            await eventually(waiting)
            before = processes_of(router)
            os.kill(before["scheduler"], signal.SIGKILL)
            answers = await asyncio.gather(*calls)
            assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)

            async def charged() -> int:
                clients = (await get(http, "/fairness")).get("clients", {})
                return sum(client["service"]["output"] for client in clients.values())

            async def all_is_charged() -> bool:
                return await charged() == 12 * 60

            await eventually(all_is_charged)  # a front that had no core for a second reports to the next run later
            await check_at_rest(http)
            assert await all_is_charged()
            for n in range(3):
                rows = (await get(http, "/v1/usage", authorization=f"Bearer {n}"))["usage"]
                assert [sum(row[kind] for row in rows) for kind in ("calls", "output_tokens")] == [4, 4 * 60]
            after = processes_of(router)
            assert after["scheduler"] != before["scheduler"]
            assert {name: after[name] for name in ("front-1", "front-2")} == {
                name: before[name] for name in ("front-1", "front-2")
            }
        router.signal(signal.SIGTERM)
        code, log = router.end()
    assert code == 0
    assert "Traceback" not in log


async def test_what_the_operator_changed_outlives_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is drained stays drained, and one that was added stays in the fleet, once the state was saved."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    key = {"authorization": "Bearer operator-key-0123456789"}
    with two_fronts(tmp_path, "--admin-key", "operator-key-0123456789", "--state-interval", "0.2") as router:
        async with client_of(router) as http:
            first = next(iter((await get(http, "/workers"))["workers"]))["id"]
            async with http.post(f"/workers/{first}/drain", headers=key) as response:
                assert response.status == 200, await response.text()
            async with http.post("/workers", headers=key, json={"url": "http://127.0.0.1:1", "id": "new"}) as response:
                assert response.status in (200, 201), await response.text()
            (folder,) = folders_in(tmp_path)

            async def saved() -> bool:
                return rb"\"new\"" in (folder / "run" / "state").read_bytes()

            await eventually(saved)
            os.kill(processes_of(router)["scheduler"], signal.SIGKILL)

            async def known() -> bool:
                shown = (await get(http, "/workers")).get("workers", [])  # an error while no scheduler runs
                workers = {each["id"]: each for each in shown}
                return {first, "new"} <= workers.keys() and workers[first]["drained"] is True

            await eventually(known)


async def test_a_standby_uses_no_cpu_while_it_waits(tmp_path: Path) -> None:
    """Once its imports are done, it waits for its plan, and it ends with the router."""
    with two_fronts(tmp_path) as router:
        standby = (await all_processes(router))["standby"]

        looks: list[int] = []

        async def waits() -> bool:
            looks.append(cpu_ticks(standby))
            return len(looks) > CALM_LOOKS and 0 < looks[-1] == looks[-CALM_LOOKS]

        await eventually(waits)
        router.signal(signal.SIGTERM)
        code, log = router.end()
        assert code == 0
        assert "ERROR" not in log
        assert not runs(standby)


async def test_a_signal_drains_all_processes(tmp_path: Path) -> None:
    """A stream in flight is completed, the router is not ready meanwhile, and new calls are refused."""
    async with two_fronts_of_one_engine(tmp_path) as (router, engine):
        async with client_of(router, workers=1) as http:
            running = asyncio.create_task(stream(http, 150))
            calls = await begun(engine, 1)
            answering = asyncio.create_task(answer_all(engine))  # one front may drain while the other still accepts
            router.process.send_signal(signal.SIGTERM)

            async def all_drain() -> bool:
                return {await status(http, "/ready") for _ in range(20)} == {503}

            await eventually(all_drain)
            # The front that has nothing to do stays as long: when it ended, it would close what the kernel gave it.
            assert {await status(http, CHAT, streamed_call(model="m")) for _ in range(200)} == {503}
            assert not running.done()
            await asyncio.gather(*map(end, calls))
            assert (await running).endswith(b"data: [DONE]\n\n")
            answering.cancel()
        code, log = router.end()
    assert code == 0
    assert "Traceback" not in log


async def test_once_the_fronts_have_ended_nobody_can_connect(tmp_path: Path) -> None:
    """A client whose connection nobody accepts would wait for an answer until the scheduler has ended, too."""
    with two_fronts(tmp_path) as router:
        async with client_of(router):
            processes = await all_processes(router)
        os.kill(processes["scheduler"], signal.SIGSTOP)
        try:
            router.process.send_signal(signal.SIGTERM)
            await all_ended({name: process for name, process in processes.items() if name.startswith("front")})
            async with asyncio.timeout(TIMEOUT_S):
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        finally:
            os.kill(processes["scheduler"], signal.SIGCONT)
        code, _ = router.end()
    assert code == 0


async def test_requests_with_one_id_are_told_apart(tmp_path: Path) -> None:
    """Twenty streams with one id, over both fronts: each answer has an id of its own, by which /explain finds it."""
    async with two_fronts_of_one_engine(tmp_path) as (router, engine), client_of(router, workers=1) as http:
        body, headers = streamed_call(model="m"), {"x-request-id": "one"}
        asked = [asyncio.create_task(http.post(CHAT, json=body, headers=headers).__aenter__()) for _ in range(20)]
        calls = await begun(engine, 20)
        answers = await asyncio.gather(*asked)
        names = {answer.headers["x-request-id"] for answer in answers}
        assert "one" in names
        assert len(names) == 20
        await asyncio.gather(*map(end, calls))
        for answer in answers:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await check_at_rest(http)
        explained = [await get(http, f"/explain/{name}") for name in names]
        assert [entry["state"] for entry in explained] == ["finished"] * 20


async def test_fronts_refuse_new_calls_while_the_scheduler_stands_still(tmp_path: Path) -> None:
    """With 429 and a time to wait; the streams in flight go on, and end well once the scheduler runs again."""
    async with two_fronts_of_one_engine(tmp_path) as (router, engine), client_of(router, workers=1) as http:
        running = [asyncio.create_task(stream(http, 200)) for _ in range(4)]
        calls = await begun(engine, 4)
        asked: list[asyncio.Task[tuple[int, str | None]]] = []

        async def ask() -> tuple[int, str | None]:
            async with http.post(CHAT, json=streamed_call(model="m")) as response:
                await response.read()
                return response.status, response.headers.get("retry-after")

        async def one_is_refused() -> bool:
            asked.append(asyncio.create_task(ask()))
            return bool((await asyncio.wait(asked, timeout=0.1, return_when=asyncio.FIRST_COMPLETED))[0])

        stopped = processes_of(router)["scheduler"]
        router.process.send_signal(signal.SIGSTOP)  # or it would end the scheduler, which is silent
        os.kill(stopped, signal.SIGSTOP)
        try:
            await eventually(one_is_refused)
            assert await get(http, "/health") == {"status": "ok"}
        finally:
            os.kill(stopped, signal.SIGCONT)
            router.process.send_signal(signal.SIGCONT)
        answering = asyncio.create_task(answer_all(engine))
        answers = await asyncio.gather(*asked)
        assert (429, "2") in answers
        assert set(answers) <= {(429, "2"), (200, None)}  # those that came before the front knew it have waited

        async def counted() -> bool:
            counts = await metric(http, "d2lpm_scheduler_lag_refusals_total")
            return counts.get("") == answers.count((429, "2"))

        await eventually(counted)
        await asyncio.gather(*map(end, calls))
        assert all(answer.endswith(b"data: [DONE]\n\n") for answer in await asyncio.gather(*running))

        async def one_is_answered() -> bool:
            return (await stream(http, 5)).endswith(b"data: [DONE]\n\n")

        await eventually(one_is_answered)  # the other front may learn a moment later that the scheduler runs
        await check_at_rest(http)
        answering.cancel()


async def test_the_control_plane_is_the_same_at_every_front(tmp_path: Path) -> None:
    """A worker that is drained by one call is drained for all; a client cannot claim another address."""
    key = "operator-key-0123456789"
    with two_fronts(tmp_path, "--admin-key", key) as router:
        async with client_of(router) as http:
            await stream(http, 5)
            await check_at_rest(http)
            for _ in range(8):
                usage = await get(http, "/v1/usage", **{"x-d2lpm-client-address": "10.1.2.3"})
                assert usage["client"] == "address-127.0.0.1"
                assert usage["service"]["output"] == 5
            worker = (await get(http, "/workers"))["workers"][0]["id"]
            async with http.post(f"/workers/{worker}/drain") as response:
                assert response.status == 401
            async with http.post(f"/workers/{worker}/drain", headers={"authorization": f"Bearer {key}"}) as response:
                assert response.status == 200
            for _ in range(8):
                # A front answers as the last time, and says so, for a scheduler that is late.
                while "degraded" in (ready := await get(http, "/ready")):
                    pass
                assert ready["workers"] == 1
            async with http.post("/workers", data=b"x" * 100_000) as response:
                assert response.status == 413


@pytest.mark.parametrize("what", ["clients", "state"])
def test_a_mistake_in_a_file_is_one_line(what: str, tmp_path: Path) -> None:
    """The first process that finds it names it, and the router ends with code 2."""
    wrong = tmp_path / "wrong"
    wrong.write_text("[]")
    with (
        pytest.raises(IndexError),
        serving(tmp_path, "--processes", "3", "--emulate", "1", f"--{what}", str(wrong)) as _,
    ):
        pass
    log = (tmp_path / "log").read_text("utf-8")
    assert re.fullmatch(rf"d2lpm: .*{re.escape(str(wrong))}.*\n", log), log


@pytest.mark.parametrize("name", ["scheduler", "front-1", "front-2"])
async def test_a_process_that_is_killed_before_it_serves_is_named(name: str, tmp_path: Path) -> None:
    """The router ends, and its log says which process was killed, as that could not."""
    command = python_command("router", "serve", "--port", "0", "--processes", "3", "--emulate", "1")
    with (tmp_path / "log").open("wb") as log:
        router = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)

    async def started() -> bool:
        return name in router_processes(router.pid)

    await eventually(started)
    os.kill(router_processes(router.pid)[name], signal.SIGKILL)
    assert await router.wait() != 0
    assert f"{name} ended with code -9 (SIGKILL) before it served" in (tmp_path / "log").read_text("utf-8")
