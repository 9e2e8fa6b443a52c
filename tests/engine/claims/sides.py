"""The two servers that each claim is about: a real engine and an emulated one of the same dialect."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..environment import ROOT
from ..fleet import BLOCKS, CONTEXT, SEQUENCES, Engine, SglangEngine, VllmEngine, launched_engine
from ..processes import Server, free_ports
from ..wire import WORKER_KEY, get, mapped

BLOCK_TOKENS: Mapping[str, int] = {"vllm": VllmEngine.block_tokens, "sglang": SglangEngine.block_tokens}
KV_TOKENS = (BLOCKS - 1) * VllmEngine.block_tokens
"""Tokens that the cache of each server holds."""


class Emulated(Server):
    """An emulated engine of the same size as the real one, so fast that tests need not wait for it."""

    ready_path = "/health"

    def __init__(self, dialect: str, log: Path) -> None:
        flags = {
            **{"dialect": dialect, "port": "{port}", "model": "tiny", "api-key": WORKER_KEY, "speed": "50"},
            **{"max-model-len": str(CONTEXT), "max-running": str(SEQUENCES), "kv-events": str(free_ports(2))},
            # Of vLLM's blocks one is never given out, and counts all the same.
            "kv-tokens": str(KV_TOKENS + (BLOCK_TOKENS["vllm"] if dialect == "vllm" else 0)),
            "block-size": str(BLOCK_TOKENS[dialect]),
        }
        command = [sys.executable, "-m", "workers", *(f"--{name}={value}" for name, value in flags.items())]
        super().__init__(f"emulated {dialect}", command, {}, log, ROOT)


@dataclass(frozen=True, slots=True)
class Sides:
    """A real engine and its emulation."""

    dialect: str
    real: Engine
    emulated: Emulated

    def each(self) -> tuple[Server, Server]:
        return self.real, self.emulated


def real_engine(dialect: str, model: Path, log: Path) -> Engine:
    """Return an engine that publishes its KV events, and whose cache can be emptied."""
    return launched_engine(dialect, f"publishing {dialect}", model, log, (), {"VLLM_SERVER_DEV_MODE": "1"})


@dataclass(frozen=True, slots=True)
class Published:
    """Where an engine publishes its KV events, as it reports itself."""

    port: int
    replay_port: int
    topic: str
    block_tokens: int | None


def published(dialect: str, server: Server) -> Published:
    """Read /kv_event_sources of vLLM, or /server_info of SGLang."""
    if dialect == "vllm":
        source = mapped(get(f"{server.url}/kv_event_sources").json["0"])
        ports = [urlsplit(str(source[name])).port for name in ("endpoint", "replay_endpoint")]
        return Published(ports[0] or 0, ports[1] or 0, str(source["topic"]), None)
    reported = mapped(get(f"{server.url}/server_info", WORKER_KEY).json["kv_events"])
    port, replay, size = (
        int(str(reported[name])) for name in ("endpoint_port_base", "replay_endpoint_port_base", "block_size")
    )
    return Published(port, replay, str(reported["topic"]), size)
