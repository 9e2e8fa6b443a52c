"""A collector that takes nothing harms nobody, and OpenTelemetry costs nothing while it is off."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.telemetry.otel.export import OpenTelemetry
from router.upstream.connections import WorkerConnections
from tests.cli.test_main import serving
from tests.process.test_processes import client_of
from tests.support.otlp_receiver import Collector
from tests.support.running import CHAT, Post, chat, listening, running_router
from tests.support.scripted_engine import ScriptedEngine, scripted_engine
from tests.support.workers_http import eventually

ROOT = Path(__file__).parents[3]
OFF = """
import sys
from router.config.settings import Settings
from router.process import front_process, scheduler_process
from router.process.single import build

build(Settings(worker=({"url": "http://127.0.0.1:9"},)))
parts = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "google.protobuf", "requests")
print([name for name in sys.modules if name.startswith((*parts, "router.telemetry.otel.export"))])
"""
MISSING = """
import sys
from router.cli.main import main

sys.modules["opentelemetry.sdk"] = None
sys.exit(main(["serve", "--worker", "http://127.0.0.1:9", "--port", "0", "--policy", "rr+fcfs", "--otel"]))
"""
"""As if the extra were not installed; the policy, so that no worker is asked before that."""


def python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script, with the router and without what this process has imported."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


async def one_call(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Make a call. Returns what the router has logged as warnings at its end, after spans were lost."""
    async with running_router(engine.url, otel=True) as router:
        async with router.post(chat()) as post:
            await (await engine.call()).answer()
            assert (await post.response()).status == 200

        async def all_lost() -> bool:
            async with router.http.get("/metrics") as response:
                text = await response.text()
            return all(f'd2lpm_otel_spans_total{{outcome="{outcome}"}} 4.0' in text for outcome in ("ended", "lost"))

        await eventually(all_lost)
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.one_process("the collector's address is in the environment of this process")
@pytest.mark.parametrize("how", ["closed", "silent"])
async def test_a_dead_collector_loses_spans_and_nothing_else(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls are answered, and the log has the same words for each failure, so that it counts them."""
    with listening() as listener:
        url = "http://{}:{}".format(*listener.getsockname())
        if how == "closed":
            listener.close()
        for name, value in {"ENDPOINT": url, "TIMEOUT": "0.2"}.items():
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        async with scripted_engine() as engine:
            logged = await one_call(engine, caplog)
    assert all(line.startswith("the OpenTelemetry collector did not take ") for line in logged), logged
    assert len(set(logged)) <= 2


async def test_a_front_of_its_own_sends_what_the_scheduler_knew(tmp_path: Path, collector: Collector) -> None:
    """With several processes, the placement has its reasons and lies between the wait and the attempt, too."""
    async with scripted_engine() as engine:
        with serving(
            tmp_path, "--processes", "2", "--poll-interval", "0.05", "--worker", engine.url, "--otel"
        ) as router:
            async with client_of(router, 1) as http, Post(http.post(CHAT, json=chat())) as post:
                await (await engine.call()).answer()
                await post.read()
                trace = await collector.trace()
    wait, placement, attempt = trace[1:]
    assert [each.name for each in trace[1:]] == ["queue", "placement", "chat m"]
    assert placement.attributes["d2lpm.why"]
    assert wait.times[1] == placement.times[0] <= placement.times[1] == attempt.times[0]
    assert len({each.resource["service.instance.id"] for each in trace}) == 1


def test_off_imports_nothing() -> None:
    """A router without the setting imports neither the SDK nor the exporters, in any of its processes."""
    done = python(OFF)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_missing_extra_is_named() -> None:
    """Who wants traces without the packages learns what to install."""
    done = python(MISSING)
    assert done.returncode != 0
    assert "otel: needs the extra d2lpm-router[otel]" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_protocol_is_refused() -> None:
    """Only what is installed can be spoken; silence would look like a dead collector."""
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is grpc; only http/protobuf"):
        OpenTelemetry(WorkerConnections(1.0), "dlpm", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
