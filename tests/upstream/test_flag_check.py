"""The check of workers' flags, on emulated workers of both dialects and on scripted engines over real sockets."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.cli.check import fleet_lines
from router.cli.main import main
from router.core.model.request import Connector, Role, WorkerId
from router.upstream.dialects import VLLM
from router.upstream.directory import WorkerEndpoint
from router.upstream.flag_check import WorkerCheck, check_worker
from router.upstream.flag_rules import (
    Finding,
    RouterNeeds,
    WorkerAnswers,
    WorkerPart,
    connector_finding,
    handoff_findings,
    tier_findings,
)
from router.upstream.polling.poll_client import PollClient
from tests.support.kubernetes_api import endpoint_slice, fake_api
from tests.support.running import running_router, until
from tests.support.scripted_engine import ScriptedEngine, scripted_engine, usage
from tests.support.workers_http import worker

SGLANG = {"data": [{"id": "m", "owned_by": "sglang"}]}
FITTING = {"schedule_policy": "fcfs", "enable_cache_report": True, "page_size": 16}
SGLANG_METRICS = b"sglang:num_running_reqs 0.0\nsglang:num_queue_reqs 0.0\n"


@asynccontextmanager
async def answering(details: object = None) -> AsyncIterator[ScriptedEngine]:
    """Run an engine that answers every prompt, with these details in its usage."""
    async with scripted_engine() as engine:

        async def answer() -> None:
            while True:
                call = await engine.call()
                body = {"choices": [], "usage": {**usage(9, 1), "prompt_tokens_details": details}}
                await call.respond(200, json.dumps(body).encode())

        task = asyncio.create_task(answer())
        yield engine
        task.cancel()


async def examined(url: str, *, generate: bool = True, isolated: bool = False) -> WorkerCheck:
    async with PollClient() as client:
        return await check_worker(
            WorkerEndpoint(WorkerId("w"), url), client, RouterNeeds(64, isolated), generate=generate
        )


async def changes(url: str, *, generate: bool = True) -> list[str]:
    """Return the proposed changes."""
    return [finding.change for finding in (await examined(url, generate=generate)).findings]


async def test_a_server_that_is_no_engine_is_named_as_one() -> None:
    """It does answer, so the finding has the path and the status, in one line."""
    async with scripted_engine() as engine:
        engine.poll_answers["/v1/models"] = (404, b"not here")
        (finding,) = (await examined(engine.url)).findings
    said = f"does not answer as an engine at {engine.url} (/v1/models was answered with status 404)"
    assert finding == Finding(said, "let it start, or correct its URL")


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_correctly_started_worker_has_no_findings(dialect: str) -> None:
    """The check finds nothing, and the card names engine, model and cache size."""
    with worker(dialect=dialect, block_size=16, kv_tokens=4096) as url:
        result = await examined(url)
    assert result.findings == []
    assert re.match(rf"{dialect} [\d.]+ serves tiny, its cache holds 4", result.card)
    assert result.card.endswith("in blocks of 16")


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"dialect": "vllm", "block_size": 128}, "--block-size 16"),
        ({"dialect": "sglang", "block_size": 128}, "--page-size 16"),
        ({"dialect": "sglang", "order": "lpm"}, "--schedule-policy fcfs"),
        ({"dialect": "sglang", "block_size": 1, "kv_events": 0}, "--page-size 16"),
    ],
)
async def test_wrong_flags_of_an_emulated_worker_are_found(flags: dict[str, object], flag: str) -> None:
    """Each wrong flag gives one finding that names the right flag, also without a test prompt."""
    with worker(**flags) as url:
        (change,) = await changes(url, generate=False)
    assert flag in change


async def test_a_refused_field_is_reported_with_its_consequence() -> None:
    """A field that the engine's version lacks, or that a test call shows to be refused, is a note and no finding."""
    with worker(dialect="sglang", block_size=16, kv_tokens=4096) as url:
        result = await examined(url)
    assert result.findings == []
    (note,) = result.notes
    assert note.startswith("does not accept return_token_ids on /v1/chat/completions")
    async with scripted_engine() as engine:

        async def refuse() -> None:
            while True:
                call = await engine.call()
                assert call.json["max_tokens"] == 1
                refused = "continuous_usage_stats" in call.body.decode()
                await call.respond(*((422, b"continuous_usage_stats?") if refused else (200, b"data: [DONE]\n\n")))

        task = asyncio.create_task(refuse())
        notes = (await examined(engine.url)).notes
        task.cancel()
    paths = ("/v1/chat/completions", "/v1/completions")
    assert [note.partition(",")[0] for note in notes] == [
        f"refuses stream_options.continuous_usage_stats on {path}" for path in paths
    ]


@pytest.mark.parametrize(("dialect", "paths"), [("vllm", []), ("sglang", ["/v1/messages"])])
async def test_paths_without_prefix_isolation_are_found(dialect: str, paths: list[str]) -> None:
    """Paths that ignore the salt are findings only if the operator wants prefixes isolated."""
    with worker(dialect=dialect, block_size=16, kv_tokens=4096) as url:
        found = (await examined(url, isolated=True)).findings
        assert (await examined(url)).findings == []
    assert [finding.seen.split(",")[0] for finding in found] == [f"ignores cache_salt on {path}" for path in paths]


@pytest.mark.parametrize("role", [{"disaggregation_mode": "prefill"}, {"is_embedding": True}])
async def test_a_worker_that_generates_nothing_is_sent_nothing(role: dict[str, object]) -> None:
    """No test call is sent to a prefill worker, which may never answer it, or to an embedding SGLang, which would
    crash.
    """
    async with scripted_engine() as engine:
        engine.poll_answers["/v1/models"] = (200, json.dumps(SGLANG).encode())
        engine.poll_answers["/metrics"] = (200, SGLANG_METRICS)
        engine.poll_answers["/server_info"] = (200, json.dumps(FITTING | role).encode())
        found = (await examined(engine.url)).findings
        assert found == []
        assert engine.calls.empty()


@pytest.mark.parametrize(
    ("page", "seconds", "expected"),
    [
        (b"", 20.0, ["NixlConnector"]),
        (b"vllm:nixl_num_kv_expired_reqs_total 0\n", 20.0, []),
        (b"vllm:nixl_num_kv_expired_reqs_total 0\n", 28.0, ["keeps prompts for 30 s"]),
    ],
)
def test_a_worker_with_a_role_needs_a_connector_and_a_lease(page: bytes, seconds: float, expected: list[str]) -> None:
    """Its metrics show the connector; the lease must be longer than the time that a prompt may wait."""
    needs = RouterNeeds(64, handoff_seconds=seconds)
    found = handoff_findings(Role.PREFILL, Connector.NIXL, WorkerAnswers(VLLM, page), needs)
    assert [words in finding.seen for words, finding in zip(expected, found, strict=True)] == [True] * len(expected)
    assert handoff_findings(Role.BOTH, Connector.NIXL, WorkerAnswers(VLLM, b""), needs) == []


def test_workers_that_cannot_hand_prompts_over_are_found() -> None:
    """Two connectors, or two engines, in one model; and a model of which nobody computes one part."""

    def part(role: Role, connector: Connector, *models: str) -> WorkerPart:
        return WorkerPart(role, connector, frozenset(models))

    first = part(Role.PREFILL, Connector.SGLANG, "a")
    fitting = part(Role.DECODE, Connector.SGLANG, "a", "b")
    assert connector_finding(first, [fitting, WorkerPart(models=frozenset("a"))]) is None
    assert connector_finding(first, [part(Role.DECODE, Connector.NIXL, "b")]) is None
    for other in (Connector.NIXL, Connector.MOONCAKE):
        found = connector_finding(first, [fitting, part(Role.DECODE, other, "a")])
        assert found is not None
        assert f"by sglang, and other workers of its model by {other}" in found.seen
    assert [finding.seen for finding in tier_findings([first, fitting])] == [
        "b has decode workers, which are of no use alone, and no prefill worker"
    ]
    assert [finding.seen for finding in tier_findings([first])] == ["a has prefill workers and no decode worker"]


async def test_a_usage_without_cached_tokens_is_found() -> None:
    """The second answer to one prompt must report cached tokens; without test prompts nothing is checked."""
    async with answering() as engine:
        (change,) = await changes(engine.url)
        assert "--enable-prompt-tokens-details" in change
        assert await changes(engine.url, generate=False) == []
    async with answering({"cached_tokens": 0}) as engine:
        assert await changes(engine.url) == []


async def test_a_vllm_without_metrics_or_cache_is_found() -> None:
    """A missing metrics page, another server's page, and a disabled prefix cache are one finding each."""
    async with answering({"cached_tokens": 1}) as engine:
        for page in ((404, b""), (200, b"other 1\n")):
            engine.poll_answers["/metrics"] = page
            assert ["--disable-log-stats" in change for change in await changes(engine.url)] == [True]
        off = b'vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:cache_config_info{a="b",%b} 1\n'
        engine.poll_answers["/metrics"] = (200, off % b'enable_prefix_caching="False"')
        assert ["--enable-prefix-caching" in change for change in await changes(engine.url)] == [True]


@pytest.mark.parametrize(
    ("result", "flag"),
    [
        ({}, None),
        ({"enable_cache_report": False}, "--enable-cache-report"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"schedule_policy": "lpm"}, "--schedule-policy fcfs"),
        ({"page_size": 1}, None),
        ({"page_size": 1, "kv_events": {"publisher": "zmq"}}, "--page-size 16"),
        ({"page_size": 16, "kv_events": {"publisher": "zmq"}}, None),
    ],
)
async def test_sglang_reports_its_start_flags(result: dict[str, object], flag: str | None) -> None:
    """Each wrong start flag is one finding."""
    async with scripted_engine() as engine:
        engine.poll_answers |= {
            "/v1/models": (200, json.dumps(SGLANG).encode()),
            "/server_info": (200, json.dumps(FITTING | result).encode()),
            "/metrics": (200, SGLANG_METRICS),
        }
        found = await changes(engine.url, generate=False)
        assert [str(flag) in change for change in found] == ([] if flag is None else [True])
        engine.poll_answers |= {"/metrics": (404, b""), "/server_info": (404, b"")}
        assert ["--enable-metrics" in change for change in await changes(engine.url, generate=False)] == [True, False]


async def test_an_sglang_that_has_served_nothing_yet_fits() -> None:
    """The metrics of an SGLang before its first prompt lack load and cache, which is no finding."""
    async with scripted_engine() as engine:
        engine.poll_answers |= {
            "/v1/models": (200, json.dumps(SGLANG).encode()),
            "/server_info": (200, json.dumps(FITTING).encode()),
            "/metrics": (200, b"sglang:context_len 8192.0\n"),
        }
        assert await changes(engine.url, generate=False) == []
        engine.poll_answers["/metrics"] = (200, b"other:context_len 8192.0\n")
        assert ["--enable-metrics" in change for change in await changes(engine.url, generate=False)] == [True]


async def test_a_worker_that_is_down_or_rejects_the_key_is_found() -> None:
    """The finding says how to correct the URL or the key."""
    assert "correct its URL" in (await changes("http://127.0.0.1:9"))[0]
    async with scripted_engine() as engine:
        engine.poll_answers["/v1/models"] = (401, b"")
        assert "worker_api_key" in (await changes(engine.url))[0]
        engine.poll_answers["/v1/models"] = (200, b'{"data":[{"id":"m","owned_by":"other"}]}')
        assert "kv_tokens_default" in (await changes(engine.url, generate=False))[0]


@pytest.mark.one_process("the test reads the router's log")
async def test_findings_are_logged_once_when_a_worker_joins(caplog: pytest.LogCaptureFixture) -> None:
    """The check at join sends no prompt, and a worker that returns unchanged causes no second warning."""
    async with scripted_engine() as engine:
        engine.poll_answers |= {
            "/v1/models": (200, json.dumps(SGLANG).encode()),
            "/server_info": (200, json.dumps(FITTING | {"schedule_policy": "lpm"}).encode()),
            "/metrics": (200, SGLANG_METRICS),
            "/ready": (200, b""),
            "/v1/loads": (404, b""),
        }
        async with running_router(engine.url) as router:
            await until(lambda: "order of arrival" in caplog.text)
            await engine.stop()
            await until(lambda: not router.directory.endpoints[0].healthy)
            asked = len(engine.polls)
            await engine.start()
            await until(lambda: sum(call.path == "/server_info" for call in engine.polls[asked:]) >= 2)
        assert engine.calls.empty()
    assert caplog.text.count("order of arrival") == 1


def test_the_command_reports_settings_and_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 0 without findings, 1 with findings, each in its own line, and 2 for an invalid file."""
    file, more = tmp_path / "router.yaml", tmp_path / "workers.yaml"
    with worker(block_size=16) as one, worker(dialect="sglang", order="lpm") as two:
        file.write_text(f"worker: [{one}]\nmax_queued: 7\nadmin_key: kkkkkkkkkkkkkkkk\n")
        assert main(["check", str(file)]) == 0
        result = capsys.readouterr().out
        assert "max_queued: 7" in result
        assert "kkkk" not in result
        assert result.splitlines()[-1].endswith("; its flags fit")
        more.write_text(f"[{two}, {one}]")
        file.write_text(f"worker: [{one}]\nworkers_file: {more}\n")
        assert main(["check", str(file)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "--schedule-policy fcfs" in line] == lines[-1:]
    file.write_text("max_queued: many\n")
    assert main(["check", str(file)]) == 2
    file.write_text("port: 1\n")
    assert main(["check", str(file)]) == 2


def test_the_command_reads_the_files_that_the_settings_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in the clients file or a certificate that is missing is one of the settings, as when serving."""
    file, clients = tmp_path / "router.yaml", tmp_path / "clients.yaml"
    clients.write_text("clients: {ann: {weight: -1}}\n")
    for line, said in (
        (f"clients: {clients}", "weight: must be greater than 0"),
        ("{tls_cert: /no/cert, tls_key: /no/key}", "/no/cert: No such file"),
    ):
        file.write_text(line)
        assert main(["check", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_the_command_names_parameters_that_the_policy_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a policy in the file, those of the policy for ranks that step together count as read."""
    file = tmp_path / "router.yaml"
    parameters = "dlpm: {quantum: 7}\ndlpm_home: {quantum: 7}\ndlpm_balance: {quantum: 7}\n"
    with worker(block_size=16) as url:
        for policy, unread in (
            ("", ["dlpm"]),
            ("policy: dlpm_home", ["dlpm", "dlpm_balance"]),
            ("policy: d2lpm", ["dlpm_home", "dlpm_balance"]),
        ):
            file.write_text(f"worker: [{url}]\n{parameters}{policy}\n")
            main(["check", str(file)])
            lines = [line for line in capsys.readouterr().out.splitlines() if "has no effect" in line]
            assert [line.partition(".")[0] for line in lines] == unread


async def test_the_command_finds_the_workers_that_kubernetes_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that names only a selector is valid; a selector without pods, and no API, are findings."""
    file = tmp_path / "router.yaml"
    async with fake_api() as api:
        with worker(block_size=16) as url:
            api.put(endpoint_slice("a", "127.0.0.1", port=int(url.rpartition(":")[2])))
            file.write_text(f"worker_kubernetes: [app=vllm]\nkubernetes_api: {api.url}\n")
            assert await asyncio.to_thread(main, ["check", str(file)]) == 0
        api.delete("a")
        assert await asyncio.to_thread(main, ["check", str(file)]) == 1
    assert "app=vllm: no headless Service with this label has a ready pod" in capsys.readouterr().out
    file.write_text("worker_kubernetes: [app=vllm]\n")
    assert await asyncio.to_thread(main, ["check", str(file)]) == 1
    assert "not in a Kubernetes pod" in capsys.readouterr().out


def test_a_large_fleet_is_told_how_its_engines_can_spare_the_router() -> None:
    """The line names the flag from eight workers that answer on."""
    alive = [WorkerCheck(WorkerId(f"w{number}"), "vllm 0.32.0 serves m", []) for number in range(8)]
    silent = WorkerCheck(WorkerId("silent"), "", [Finding("does not answer", "start it")])
    assert [*fleet_lines([*alive[1:], silent])] == []
    (line,) = fleet_lines([*alive, silent])
    assert line.startswith("8 workers: ")
    assert "--stream-interval 10" in line


@pytest.mark.parametrize("page", [b"<html>login</html>", b'["0.32.0"]', b'"0.32.0"', b""])
async def test_an_unexpected_answer_is_reported(page: bytes) -> None:
    """An answer to /version that is no JSON object, such as a proxy's page, is a finding."""
    async with scripted_engine() as engine:
        engine.poll_answers["/version"] = (200, page)
        (found,) = (await examined(engine.url, generate=False)).findings
        assert found.seen.startswith("answers /version at http://")
        assert "JSON" in found.seen
