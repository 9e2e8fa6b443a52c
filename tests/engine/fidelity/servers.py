"""Starts a real engine, or its emulation with the same capacity, block size and batch limits."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..fleet import ENGINE_START_SECONDS, ENGINES, launched_engine
from ..processes import Server, free_ports
from ..wire import WORKER_KEY
from .evictions import evicted_by_metric, removed_blocks
from .pace import StepTimes

Dialect = Literal["vllm", "sglang"]
DIALECTS: Sequence[Dialect] = ("vllm", "sglang")
BLOCK_TOKENS = {dialect: ENGINES[dialect].block_tokens for dialect in DIALECTS}
CAPACITIES: Mapping[str, int] = {"ample": 599 * 32, "short": 160 * 32}
"""Tokens of KV that either engine can use: more than running requests need, or so few that requests wait for memory."""
CONTEXT = 2048
"""Limit on the tokens of a call, less than either capacity, as vLLM requires."""
RUNNING = 12
"""Limit on the requests that run at once; the others in flight wait in the engine."""
STEP_TOKENS = 512
"""Limit on the new tokens of a step, fewer than most prompts have, so that most prefills are split."""
EMULATION_START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load."""

    dialect: Dialect
    url: str
    evicted_tokens: Callable[[], int]
    """Tokens evicted since the server's start. Call it once, after the last call has ended."""


@contextmanager
def _target(dialect: Dialect, url: str, events_port: int) -> Iterator[Target]:
    if dialect == "sglang":
        yield Target(dialect, url, lambda: evicted_by_metric(url))
        return
    with removed_blocks(events_port) as removed:
        yield Target(dialect, url, lambda: removed() * BLOCK_TOKENS["vllm"])


@contextmanager
def real(dialect: Dialect, capacity: int, model: Path, folder: Path) -> Iterator[Target]:
    """Start a new server of the real engine."""
    flags = {
        "vllm": (
            f"--num-gpu-blocks-override={capacity // BLOCK_TOKENS['vllm'] + 1}",  # one of them is never used
            f"--max-model-len={CONTEXT}",
            f"--max-num-seqs={RUNNING}",
            f"--max-num-batched-tokens={STEP_TOKENS}",
        ),
        "sglang": (
            f"--max-total-tokens={capacity}",
            f"--context-length={CONTEXT}",
            f"--max-running-requests={RUNNING}",
            f"--chunked-prefill-size={STEP_TOKENS}",
        ),
    }[dialect]
    port = free_ports(2)
    events = {"KV_EVENTS_PORT": str(port)}
    engine = launched_engine(dialect, f"real {dialect}", model, folder / f"real-{dialect}.log", flags, events)
    with _running(engine, engine.ready_path, ENGINE_START_SECONDS), _target(dialect, engine.url, port) as target:
        yield target


@contextmanager
def emulated(dialect: Dialect, capacity: int, times: StepTimes, folder: Path) -> Iterator[Target]:
    """Start a new server of the emulation, whose steps take these times."""
    port = free_ports(2)
    # An emulated vLLM keeps a block of its pool unused, as the real one does.
    pool = capacity + (BLOCK_TOKENS["vllm"] if dialect == "vllm" else 0)
    command = [
        *(sys.executable, "-m", "workers", f"--dialect={dialect}", "--model=tiny", "--port={port}"),
        *(f"--kv-tokens={pool}", f"--block-size={BLOCK_TOKENS[dialect]}", f"--max-running={RUNNING}"),
        *(f"--max-batched-tokens={STEP_TOKENS}", f"--max-model-len={CONTEXT}", f"--api-key={WORKER_KEY}"),
        *(f"--step-times={times}", f"--kv-events={port}"),
    ]
    server = Server(f"emulated {dialect}", command, {}, folder / f"emulated-{dialect}.log")
    with (
        _running(server, ENGINES[dialect].ready_path, EMULATION_START_SECONDS),
        _target(dialect, server.url, port) as target,
    ):
        yield target


@contextmanager
def _running(server: Server, ready_path: str, seconds: float) -> Iterator[None]:
    server.start()
    try:
        server.wait_ready(ready_path, seconds)
        yield
    finally:
        server.stop()
