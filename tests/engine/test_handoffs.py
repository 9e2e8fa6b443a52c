"""Prefill and decode at two real vLLM servers with NixlConnector, over TCP on this machine."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from . import prompts
from .environment import ROOT
from .fleet import ENGINE_START_SECONDS, Router, VllmEngine
from .processes import Server, free_ports, wait_until
from .wire import CHAT, COMPLETIONS, Answer, Json, call, get, listed, mapped

pytestmark = pytest.mark.engine

PINS = Path(__file__).with_name("constraints-nixl.txt")
CALLS = 200
AT_ONCE = 4


class Pair(NamedTuple):
    """A prefill worker and a decode worker."""

    prefill: VllmEngine
    decode: VllmEngine


def nixl() -> Path:
    """Return a folder with the package `nixl`, which is downloaded once."""
    folder = ROOT / ".engine" / "nixl"
    if not (folder / "nixl").exists():
        install = ["pip", "install", "--quiet", "--no-deps", "--require-hashes", f"--target={folder}", f"-r{PINS}"]
        subprocess.run([sys.executable, "-m", *install], check=True)
        (folder / "nixl").symlink_to("nixl_cu12")
    return folder


def started(servers: list[Server], model: Path, logs: Path, lease: float) -> Iterator[Pair]:
    """Run a pair of engines whose hand-offs keep for `lease` seconds."""
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": lease},
    }
    flag = "--kv-transfer-config=" + json.dumps(connector).replace("{", "{{").replace("}", "}}")
    engines = []
    for role in ("prefill", "decode"):
        environment = {
            "PYTHONPATH": str(nixl()),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)),
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
        }
        name = f"{role} engine, lease {lease:g}"
        engines.append(VllmEngine(name, model, logs / name.replace(" ", "-"), [flag], environment))
    servers.extend(engines)
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready(engine.ready_path, ENGINE_START_SECONDS)
        yield Pair(*engines)
    finally:
        for engine in engines:
            engine.kill()
            servers.remove(engine)


@pytest.fixture(scope="module")
def pair(servers: list[Server], model: Path, logs: Path) -> Iterator[Pair]:
    yield from started(servers, model, logs, 30.0)


def router_before(pair: Pair, logs: Path, *flags: str) -> Router:
    """Start a router before a pair of engines."""
    roles = [f"--prefill={pair.prefill.url}", f"--decode={pair.decode.url}"]
    router = Router("router of the pair", (), [*roles, *flags], logs / "router-of-the-pair")
    router.start()
    router.wait_ready("/ready", 20.0)
    wait_until(lambda: len(listed(router.get("/v1/models")["data"])) == 1, 20, "the model is served")
    return router


def counted(engine: VllmEngine, name: str, label: str = "") -> int:
    """Return the sum of a counter of an engine; of one without samples, 0."""
    text = get(f"{engine.url}/metrics").body.decode()
    found = re.findall(rf"^vllm:{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, found)))


def computed(engine: VllmEngine) -> int:
    """Return the prompt tokens that an engine has computed itself."""
    return counted(engine, "prompt_tokens_by_source_total", 'source="local_compute"')


def body_of(number: int) -> tuple[str, Json]:
    """Return the path and the body of one of the calls: every kind, with prompts of different lengths."""
    text = prompts.text(f"handed over {number}", 40 + 5 * (number % 40))
    usual: Json = {"model": "tiny", "max_tokens": 8 + number % 9, "temperature": 0, "stream": number % 2 == 1}
    if usual["stream"]:
        usual["stream_options"] = {"include_usage": True}
    if number % 4 < 2:
        return CHAT, {**usual, "messages": [{"role": "user", "content": text}]}
    return COMPLETIONS, {**usual, "prompt": text}


def read(path: str, body: Json, answer: Answer) -> tuple[str, Json]:
    """Return the text and the usage of an answer."""
    assert answer.status == 200, answer.body
    parts = answer.events() if body["stream"] else [answer.json]
    text = ""
    usage: Json = {}
    for part in parts:
        usage = mapped(part["usage"]) if part.get("usage") else usage
        for choice in listed(part["choices"]):
            holder = choice if path == COMPLETIONS else mapped(choice["delta" if body["stream"] else "message"])
            text += str(holder.get("text" if path == COMPLETIONS else "content") or "")
    return text, {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def answers(url: str, numbers: Sequence[int]) -> list[tuple[str, Json]]:
    """Return the answers of a server to these calls."""

    def ask(number: int) -> tuple[str, Json]:
        path, body = body_of(number)
        return read(path, body, call(url, path, body))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(ask, numbers))


def test_answers_are_those_of_one_engine(pair: Pair, logs: Path) -> None:
    """Text and usage of every call, streamed or not; the decode engine computes a token of each prompt, if any."""
    router = router_before(pair, logs)
    try:
        before = computed(pair.prefill), computed(pair.decode)
        handed = answers(router.url, range(CALLS))
        prefilled, decoded = computed(pair.prefill) - before[0], computed(pair.decode) - before[1]
        wait_until(lambda: not router.unfinished(), 10, "nothing is left")
    finally:
        router.stop()
    truth = answers(pair.prefill.url, range(CALLS))
    assert handed == truth
    asked = sum(int(str(usage["prompt_tokens"])) for _, usage in truth)
    assert prefilled >= 0.8 * asked
    assert decoded <= CALLS
    assert counted(pair.prefill, "nixl_num_notifications_after_expiry_total") == 0
