"""The public interface of the emulated engines: one constructor for both, driven by `submit`, `abort` and `step`.

The same object runs behind the HTTP server, which sleeps for the seconds that `step` returns, and in virtual time,
where these seconds are the delay of the next event. Equal configuration and equal calls give equal outputs.
"""

from typing import Final

from workers.engine.hardware import HARDWARE, Hardware
from workers.engine.model import Dialect, EngineConfig, Order
from workers.engine.sglang_engine import SglangEngine
from workers.engine.vllm_engine import VllmEngine

Engine = VllmEngine | SglangEngine

DEFAULT_HARDWARE: Final = "a100-mistral-7b"


def default_config(
    dialect: Dialect,
    hardware: Hardware = HARDWARE[DEFAULT_HARDWARE],
    *,
    kv_tokens: int | None = None,
    block_size: int | None = None,
    max_running: int | None = None,
    max_batched_tokens: int | None = None,
    order: Order = "fcfs",
    max_queued: int | None = None,
    seed: int = 0,
) -> EngineConfig:
    """Return the engine's own defaults on `hardware`, replaced by the arguments that are given.

    vLLM: blocks of 16, 256 sequences and 2048 tokens per step, its API server's defaults on an A100. SGLang: pages of 1
    and chunks of 8192 tokens, its defaults at 80 GB; its limit of 256 running requests is a choice made here.
    """
    vllm = dialect == "vllm"
    return EngineConfig(
        dialect=dialect,
        kv_tokens=hardware.kv_tokens if kv_tokens is None else kv_tokens,
        block_size=(16 if vllm else 1) if block_size is None else block_size,
        max_running=256 if max_running is None else max_running,
        max_batched_tokens=(2048 if vllm else 8192) if max_batched_tokens is None else max_batched_tokens,
        order=order,
        max_queued=max_queued,
        seed=seed,
    )


def create_engine(config: EngineConfig, hardware: Hardware = HARDWARE[DEFAULT_HARDWARE]) -> Engine:
    """Return an idle engine with an empty cache."""
    return VllmEngine(config, hardware) if config.dialect == "vllm" else SglangEngine(config, hardware)
