"""Two real vLLM servers with NixlConnector, one for prompts and one for answers, and what they count."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .environment import ROOT
from .fleet import ENGINE_START_SECONDS, Router, VllmEngine
from .processes import Server, free_ports, wait_until
from .wire import get, listed

PINS = Path(__file__).with_name("constraints-nixl.txt")


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


def running_pair(servers: list[Server], model: Path, logs: Path, lease: int) -> Iterator[Pair]:
    """Run a pair of engines whose prompts keep for `lease` seconds."""
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
        name = f"{role} engine, lease {lease}"
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


def kept(engine: VllmEngine) -> float:
    """Return the share of its cache that an engine keeps for its requests, or for another engine."""
    found = re.search(
        r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", get(f"{engine.url}/metrics").body.decode(), re.MULTILINE
    )
    assert found is not None
    return float(found[1])


def read_late(engine: VllmEngine) -> int:
    """Return how many prompts of an engine were read, or released, after their lease."""
    return counted(engine, "nixl_num_notifications_after_expiry_total")
