"""Polling of workers: which are up, what they serve, and their load."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf

import pytest

from router.core.model.events import (
    CacheReport,
    Event,
    Evicted,
    WorkerAnswered,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
    WorkReport,
)
from router.core.model.request import Connector, Role, WorkerId
from router.errors import WorkerBroke
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.polling.poll_client import MAX_ANSWER_BYTES, PollClient
from router.upstream.polling.poller import Poller
from router.upstream.polling.probe import MISSED_POLLS, POLLS_PER_MODEL_LIST, WorkerProbe
from router.upstream.ranks.rank_rules import RankRules
from tests.support.scripted_engine import VLLM_METRICS, ScriptedEngine, scripted_engine


@dataclass
class Watch:
    """A probe of one engine, polled step by step; `events` holds the events fed since the last call of `fed`."""

    engine: ScriptedEngine
    backend: WorkerEndpoint
    events: list[Event]
    probe: WorkerProbe
    client: PollClient

    async def fed(self, polls: int = 1) -> list[Event]:
        """Poll this many times and return the events fed."""
        for _ in range(polls):
            await self.probe.poll(self.client)
        events = self.events.copy()
        self.events.clear()
        return events

    async def kinds(self, polls: int = 1) -> list[str]:
        """Poll this many times and return the names of the events fed."""
        return [type(event).__name__ for event in await self.fed(polls)]


@asynccontextmanager
async def watched(*models: str) -> AsyncIterator[Watch]:
    async with scripted_engine(*models) as engine, PollClient() as client:
        backend = WorkerEndpoint(WorkerId("w"), engine.url)
        events: list[Event] = []
        yield Watch(
            engine,
            backend,
            events,
            WorkerProbe(backend, events.append, WorkerDirectory([backend]), RankRules()),
            client,
        )


async def test_a_worker_joins_with_its_models_and_reports_its_load() -> None:
    """The first poll reports models and load, the next one only the load."""
    async with watched("m", "adapter") as watch:
        joined, reported = await watch.fed()
        assert isinstance(joined, WorkerJoined)
        assert joined.worker.models == {"m", "adapter"}
        fed = CacheReport(block_tokens=16), WorkReport()
        assert reported == WorkerReported(WorkerId("w"), 0, 0, kv_tokens=100_000, cache=fed[0], work=fed[1])
        assert watch.backend.healthy
        assert await watch.kinds() == ["WorkerReported"]


async def test_a_worker_that_is_removed_while_it_is_polled_reports_nothing() -> None:
    """An answer that arrives after the removal must not bring the worker back."""
    async with watched() as watch:
        watch.probe.stop()
        assert await watch.fed() == []


async def test_a_refused_connection_ends_it_at_once_and_an_answer_brings_it_back() -> None:
    """One refused connection reports the worker as gone, once, and the next answer lets it join again."""
    async with watched() as watch:
        await watch.fed()
        await watch.engine.stop()
        assert await watch.fed() == [WorkerLeft(WorkerId("w"))]
        assert not watch.backend.healthy
        assert watch.backend.models == {"m"}
        assert await watch.fed(2 * MISSED_POLLS) == []
        await watch.engine.start()
        assert await watch.kinds() == ["WorkerJoined", "WorkerReported"]


async def test_an_engine_that_answers_with_errors_is_down_after_several_polls() -> None:
    """A worker leaves after several failed polls in a row, not after one."""
    async with watched() as watch:
        await watch.fed()
        watch.engine.poll_answers["/health"] = (503, b"")
        assert await watch.fed(MISSED_POLLS - 1) == []
        watch.engine.poll_answers["/health"] = (200, b"")
        assert await watch.kinds() == ["WorkerReported"]
        watch.engine.poll_answers["/health"] = (503, b"")
        assert await watch.fed(MISSED_POLLS) == [WorkerLeft(WorkerId("w"))]


async def test_an_engine_that_is_too_busy_to_answer_polls_in_time_stays_while_its_calls_go_on() -> None:
    """Late polls take a worker out of service only once its calls show no life either; an error of its health does."""
    async with watched() as watch, PollClient(0.05) as hurried:
        signs = {WorkerId("w"): inf}
        watch.probe = WorkerProbe(
            watch.backend, watch.events.append, WorkerDirectory([watch.backend]), RankRules(), signs.__getitem__
        )
        await watch.fed()
        patient, watch.client = watch.client, hurried
        watch.engine.ignores_polls = True
        assert await watch.fed(2 * MISSED_POLLS) == []
        signs[WorkerId("w")] = -inf
        assert await watch.fed(MISSED_POLLS) == [WorkerLeft(WorkerId("w"))]
        watch.engine.ignores_polls, watch.client = False, patient
        assert (await watch.kinds())[0] == "WorkerJoined"
        signs[WorkerId("w")] = inf
        watch.engine.poll_answers["/health"] = (503, b"")
        assert await watch.fed(MISSED_POLLS) == [WorkerLeft(WorkerId("w"))]


async def test_an_engine_whose_health_is_bad_does_not_join() -> None:
    """An engine whose server answers but whose health check fails never joins."""
    async with watched() as watch:
        watch.engine.poll_answers["/health"] = (503, b"")
        assert await watch.fed(2 * MISSED_POLLS) == []
        watch.engine.poll_answers["/health"] = (200, b"")
        assert await watch.kinds() == ["WorkerJoined", "WorkerReported"]


@pytest.mark.parametrize("answer", [(404, b""), (500, b""), (200, b""), (200, b"vllm:num_requests_running x\n")])
async def test_an_engine_without_metrics_is_alive(answer: tuple[int, bytes]) -> None:
    """Missing metrics do not make a worker leave."""
    async with watched() as watch:
        watch.engine.poll_answers["/metrics"] = answer
        answered = ["WorkerAnswered"] * (2 * MISSED_POLLS - 1)
        assert await watch.kinds(2 * MISSED_POLLS) == ["WorkerJoined", *answered], (
            "or it would be taken for one that hangs"
        )
        assert watch.backend.healthy


async def test_an_engine_of_unknown_kind_is_detected_anew_each_time() -> None:
    """A server of unknown kind is polled by its list of models, without which it leaves."""
    async with watched() as watch:
        watch.engine.poll_answers["/v1/models"] = (200, b'{"data": [{"id": "m", "owned_by": "me"}]}')
        assert await watch.kinds(3) == ["WorkerJoined", "WorkerAnswered", "WorkerAnswered"]
        assert len(watch.engine.polls) == 3
        watch.engine.poll_answers["/v1/models"] = (500, b"")
        assert await watch.kinds(MISSED_POLLS) == ["WorkerLeft"]


async def test_metrics_that_were_gone_are_read_again() -> None:
    """Metrics that were missing are tried again with the next poll of the list of models."""
    async with watched() as watch:
        await watch.fed()
        watch.engine.poll_answers["/metrics"] = (404, b"")
        assert await watch.kinds(2) == ["WorkerAnswered"], "the first of them came to nothing"
        watch.engine.poll_answers["/metrics"] = (200, VLLM_METRICS)
        assert "WorkerReported" in await watch.kinds(POLLS_PER_MODEL_LIST)


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[]", b'{"data":1}'])
async def test_an_invalid_answer_is_not_a_worker(body: bytes) -> None:
    """A server whose list of models is invalid never joins."""
    async with watched() as watch:
        watch.engine.poll_answers["/v1/models"] = (200, body)
        assert await watch.fed(2 * MISSED_POLLS) == []


async def test_a_new_list_of_models_is_noticed() -> None:
    """A model added while the engine runs is reported with the next poll of the list."""
    async with watched() as watch:
        await watch.fed()
        watch.engine.serve("m", "adapter")
        events = await watch.fed(POLLS_PER_MODEL_LIST)
        (joined,) = [event for event in events if isinstance(event, WorkerJoined)]
        assert joined.worker.models == watch.backend.models == {"m", "adapter"}


async def test_sglang_is_asked_in_its_own_way() -> None:
    """SGLang is never polled at /health, which computes a token, and at /metrics only if it lacks /v1/loads."""
    metrics = VLLM_METRICS.replace(b"vllm:num_requests_running", b"sglang:num_running_reqs")
    metrics = metrics.replace(b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
    async with watched() as watch:
        models = {"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]}
        watch.engine.poll_answers["/v1/models"] = (200, json.dumps(models).encode())
        watch.engine.poll_answers["/ready"] = (200, b"")
        watch.engine.poll_answers["/server_info"] = (404, b"")
        watch.engine.poll_answers["/v1/loads"] = (404, b"")
        watch.engine.poll_answers["/metrics"] = (200, metrics)
        assert await watch.kinds(3) == ["WorkerJoined", "WorkerAnswered", "WorkerReported", "WorkerReported"]
        asked = {"/v1/models", "/ready", "/server_info", "/v1/loads", "/metrics"}
        assert {call.path for call in watch.engine.polls} == asked


@pytest.mark.parametrize(
    ("answer", "reorders"),
    [
        ((200, b'{"schedule_policy":"lpm"}'), True),
        ((200, b'{"schedule_policy":"fcfs"}'), False),
        ((200, b"{}"), False),
        ((200, b"no JSON"), False),
        ((404, b""), False),
    ],
)
async def test_an_engine_that_reorders_is_reported(answer: tuple[int, bytes], reorders: bool) -> None:
    """An engine that orders by match is reported as reordering, which works against the router's order."""
    async with watched() as watch:
        models = {"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]}
        watch.engine.poll_answers["/v1/models"] = (200, json.dumps(models).encode())
        watch.engine.poll_answers["/ready"] = (200, b"")
        watch.engine.poll_answers["/v1/loads"] = (404, b"")
        watch.engine.poll_answers["/server_info"] = answer
        (joined, *_) = await watch.fed(2 * POLLS_PER_MODEL_LIST)
        assert isinstance(joined, WorkerJoined)
        assert joined.worker.reorders is reorders


async def test_an_engine_without_a_prefix_cache_is_reported() -> None:
    """An SGLang with its radix cache disabled joins as a worker without a cache, so that no hits are predicted."""
    async with watched() as watch:
        models = {"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]}
        watch.engine.poll_answers["/v1/models"] = (200, json.dumps(models).encode())
        watch.engine.poll_answers["/ready"] = (200, b"")
        watch.engine.poll_answers["/v1/loads"] = (404, b"")
        watch.engine.poll_answers["/server_info"] = (200, b'{"disable_radix_cache":true}')
        (joined, *_) = await watch.fed(2 * POLLS_PER_MODEL_LIST)
        assert isinstance(joined, WorkerJoined)
        assert not joined.worker.caches


def start_as_sglang(engine: ScriptedEngine, mode: str) -> None:
    engine.poll_answers["/v1/models"] = (200, b'{"data":[{"id":"m","owned_by":"sglang"}]}')
    info = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": 9001}
    engine.poll_answers["/server_info"] = (200, json.dumps(info).encode())
    engine.poll_answers["/ready"] = (200, b"")
    engine.forwards_vocabulary_probes = True


async def test_an_sglang_says_itself_that_it_computes_prompts_only() -> None:
    """It joins with its role and its bootstrap port, and is sent no call alone, which could take it down."""
    async with watched() as watch:
        start_as_sglang(watch.engine, "prefill")
        await watch.probe.poll_health(watch.client)
        (joined, *_) = watch.events
        assert isinstance(joined, WorkerJoined)
        assert (joined.worker.role, joined.worker.connector) == (Role.PREFILL, Connector.SGLANG)
        assert watch.backend.card().bootstrap_port == 9001
        assert watch.engine.calls.empty()
        start_as_sglang(watch.engine, "null")
        watch.backend.healthy = False
        watch.engine.forwards_vocabulary_probes = False
        await watch.probe.poll_health(watch.client)
        assert (watch.backend.role, watch.backend.connector) == (Role.BOTH, None)


@pytest.mark.parametrize("mode", ["prefill", "null"])
async def test_a_role_that_does_not_fit_is_named_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """The worker is sent nothing, as its calls would hang."""
    async with watched() as watch:
        start_as_sglang(watch.engine, mode)
        watch.engine.forwards_vocabulary_probes = False
        watch.backend.named_role = Role.DECODE
        for _ in range(2 * POLLS_PER_MODEL_LIST):
            await watch.probe.poll_health(watch.client)
        assert not [event for event in watch.events if isinstance(event, WorkerJoined)]
        assert watch.engine.calls.empty()
        assert len([record for record in caplog.records if "is not used" in record.message]) == 1


async def test_a_prefill_worker_with_mooncake_is_known_by_its_engines_id(caplog: pytest.LogCaptureFixture) -> None:
    """Decode workers are told the id, so without an answer of its bootstrap server the worker is of no use. A restart
    that no poll has seen changes the id.
    """
    async with watched() as watch, scripted_engine() as bootstrap:
        bootstrap.poll_answers["/query"] = (404, b"")
        watch.backend.named_role, watch.backend.named_connector = Role.PREFILL, Connector.MOONCAKE
        watch.backend.bootstrap_port = bootstrap.port
        probe = WorkerProbe(watch.backend, watch.events.append, WorkerDirectory([watch.backend]), RankRules())
        await probe.poll_health(watch.client)
        assert not watch.events
        assert f"does not answer at its bootstrap port {bootstrap.port}" in caplog.text
        bootstrap.poll_answers["/query"] = (200, b'{"0":{"engine_id":"abc","worker_addr":{}}}')
        await probe.poll_health(watch.client)
        (joined, *_) = watch.events
        assert isinstance(joined, WorkerJoined)
        assert (joined.worker.role, joined.worker.connector) == (Role.PREFILL, Connector.MOONCAKE)
        assert watch.backend.card().transfer_engine == "abc"
        for answer in ((200, b'{"0":{"engine_id":"restarted"}}'), (404, b"")):
            bootstrap.poll_answers["/query"] = answer
            for _ in range(POLLS_PER_MODEL_LIST):
                await probe.poll_health(watch.client)
            assert watch.backend.card().transfer_engine == "restarted"


async def why_not_up(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """Poll a worker that cannot be used, and return what the log says of it, in one line."""
    endpoint = WorkerEndpoint(WorkerId("w"), url)
    async with PollClient() as client:
        await WorkerProbe(endpoint, list[Event]().append, WorkerDirectory([endpoint]), RankRules()).poll_health(client)
    (line,) = [record.getMessage() for record in caplog.records]
    assert len(line.splitlines()) == 1
    return line.removeprefix("worker w is not up yet: ")


async def test_the_log_says_why_a_worker_is_not_up(caplog: pytest.LogCaptureFixture) -> None:
    """It says what the operator has to mend: a worker that is not started, or a name that is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert await why_not_up(f"http://127.0.0.1:{port}", caplog) == "it refuses connections"
    caplog.clear()
    assert (await why_not_up("http://no-such-name.invalid", caplog)).startswith("no connection ([Errno ")


async def test_the_log_says_that_a_url_has_the_wrong_scheme(caplog: pytest.LogCaptureFixture) -> None:
    """A server without TLS accepts the connection: it is not refused."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert (await why_not_up(f"https://127.0.0.1:{port}", caplog)).startswith("no connection ([SSL")


async def test_the_log_says_that_another_server_answers(caplog: pytest.LogCaptureFixture) -> None:
    """The path and its status are named."""
    async with scripted_engine() as engine:
        engine.poll_answers["/v1/models"] = (404, b"not here")
        assert await why_not_up(engine.url, caplog) == "/v1/models was answered with status 404"


async def test_a_poll_that_fails_inside_the_router_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """An error while an event is handled is logged, and polling continues."""
    reports: list[Event] = []
    again = asyncio.Event()

    def feed(event: Event) -> None:
        if isinstance(event, WorkerReported):
            reports.append(event)
            if len(reports) == 2:
                raise ValueError("a mistake of ours")
            if len(reports) == 3:
                again.set()

    async with (
        scripted_engine() as engine,
        Poller(WorkerDirectory([WorkerEndpoint(WorkerId("w"), engine.url)]), feed, 0.01),
        asyncio.timeout(60),
    ):
        await again.wait()
    assert "a poll failed" in caplog.text


CACHE_METRICS = b"""\
vllm:prompt_tokens_total{engine="0"} 500.0
vllm:prompt_tokens_created{engine="0"} 1.5e+09
vllm:prefix_cache_hits_total{engine="0"} 100.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0
"""


async def test_cache_metrics_are_reported() -> None:
    """Load and cache are read from one request of the metrics page, after the one that told the ranks."""
    async with watched() as watch:
        watch.engine.poll_answers["/metrics"] = (200, VLLM_METRICS + CACHE_METRICS)
        _, reported = await watch.fed()
        assert isinstance(reported, WorkerReported)
        assert reported.cache == CacheReport(16, 1.5e9, 500.0, 100.0)
        assert [call.path for call in watch.engine.polls].count("/metrics") == 2


@pytest.mark.parametrize(
    "page",
    [
        (500, b"out of memory"),
        (200, b"<html>Bad Gateway</html>"),
        (200, VLLM_METRICS + b"vllm:prompt_tokens_total NaN\n"),
        (200, b"#" * (MAX_ANSWER_BYTES + 1)),
    ],
    ids=["error", "garbage", "no number", "endless"],
)
async def test_unusable_metrics_are_counted_and_the_worker_stays_in_service(
    page: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Each unusable page is counted, and logged at most once a minute."""
    async with watched() as watch:
        await watch.fed()
        watch.engine.poll_answers["/metrics"] = page
        fed = [event for event in await watch.fed(5) if not isinstance(event, WorkerAnswered)]
        assert all(isinstance(event, WorkerReported) and event.cache is None for event in fed)
        assert watch.backend.healthy
        assert watch.probe.unusable_answers == 5
        assert len([record for record in caplog.records if "metrics ignored" in record.message]) == 1


async def test_a_flushed_cache_is_reported_as_empty() -> None:
    """A flush that the engine refuses or does not have raises WorkerBroke and reports nothing; a vLLM without the path
    lacks a variable, which the error names.
    """
    async with watched() as watch:
        await watch.fed()
        watch.engine.poll_answers["/reset_prefix_cache"] = (200, b'{"success": false}')
        with pytest.raises(WorkerBroke, match="did not empty"):
            await watch.probe.flush(watch.client)
        watch.engine.poll_answers["/reset_prefix_cache"] = (404, b"")
        with pytest.raises(WorkerBroke, match=r"did not empty .* only if it was started with VLLM_SERVER_DEV_MODE=1"):
            await watch.probe.flush(watch.client)
        assert not watch.events
        watch.engine.poll_answers["/reset_prefix_cache"] = (200, b'{"success": true}')
        await watch.probe.flush(watch.client)
        assert watch.events == [Evicted(WorkerId("w"))]


async def test_slow_metrics_do_not_make_a_worker_silent() -> None:
    """A worker that answers /health but never /metrics is alive, and reported as alive."""
    async with scripted_engine() as engine:
        backend = WorkerEndpoint(WorkerId("w"), engine.url)
        fed: asyncio.Queue[Event] = asyncio.Queue()
        async with Poller(WorkerDirectory([backend]), fed.put_nowait, 0.02):
            del engine.poll_answers["/metrics"]  # what comes there waits in `calls` from now on, and is never answered
            await engine.call()
            while not fed.empty():
                fed.get_nowait()
            polls = len(engine.polls)
            for _ in range(3):
                assert isinstance(await fed.get(), WorkerAnswered)
            assert {poll.path for poll in engine.polls[polls:]} <= {"/health", "/v1/models"}
        assert engine.calls.empty(), "only one question is open at a time"


async def test_metrics_in_time_are_the_only_sign_of_life() -> None:
    """A worker whose metrics arrive in time is never reported by a bare sign of life as well."""
    async with scripted_engine() as engine:
        fed: list[Event] = []
        reported = asyncio.Event()

        def feed(event: Event) -> None:
            fed.append(event)
            if len(fed) > 20:
                reported.set()

        async with (
            Poller(WorkerDirectory([WorkerEndpoint(WorkerId("w"), engine.url)]), feed, 0.01),
            asyncio.timeout(60),
        ):
            await reported.wait()
        assert {type(event) for event in fed} == {WorkerJoined, WorkerReported}
