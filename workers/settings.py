"""What a worker process is told on its command line: one frozen dataclass, from which the parser is derived."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from workers.engine.engine import DEFAULT_HARDWARE, default_config
from workers.engine.hardware import HARDWARE, Hardware, linear
from workers.engine.model import Dialect, EngineConfig, Order


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One emulated worker. None means the dialect's or the hardware's own default."""

    dialect: Annotated[Dialect, "the engine to speak and schedule like"] = "vllm"
    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 takes a free one"] = 8000
    model: Annotated[str, "served model name"] = "emulated"
    hardware: Annotated[str, f"step-time model: {', '.join(HARDWARE)}"] = DEFAULT_HARDWARE
    step_times: Annotated[
        str | None, "ms of a step, and more per prefilled token and per decoded sequence, A,B,C: not the hardware's"
    ] = None
    kv_tokens: Annotated[int | None, "KV pool, tokens (default: the hardware's)"] = None
    block_size: Annotated[int | None, "tokens per block or page (default: vllm 16, sglang 1)"] = None
    max_running: Annotated[int | None, "requests in one batch (default: 256)"] = None
    max_batched_tokens: Annotated[
        int | None, "new tokens per step, sglang's chunk size (default: vllm 2048, sglang 8192)"
    ] = None
    max_model_len: Annotated[int, "longest prompt and answer, tokens; never more than the pool holds"] = 32_768
    order: Annotated[Order, "order of the waiting queue; lpm is sglang's alone"] = "fcfs"
    max_queued: Annotated[int | None, "waiting requests before new ones are refused (default: no limit)"] = None
    speed: Annotated[float, "how many times faster than the hardware; 0 or inf: as fast as this machine can"] = 1.0
    seed: Annotated[int, "seed of the answers"] = 0
    api_key: Annotated[str | None, "bearer key that callers must show"] = None
    hide_capacity: Annotated[bool, "tell nobody the size of the KV pool and the batch limit"] = False
    measure: Annotated[bool, "measure the engine's own queue: GET /emulated/queue, and POST there to begin anew"] = (
        False
    )
    kv_events: Annotated[int | None, "port to publish KV events at, and past ones at the next; 0 takes free ones"] = (
        None
    )
    exit_with_parent: Annotated[bool, "end when standard input reaches its end"] = False

    def machine(self) -> Hardware:
        """What the engine runs on. Raises ValueError where the step times make no sense."""
        hardware = HARDWARE[self.hardware]
        if self.step_times is None:
            return hardware
        times = [float(part) for part in self.step_times.split(",")]
        if len(times) != 3 or not all(0 <= time < float("inf") for time in times):
            raise ValueError("step_times must be three numbers of milliseconds, none of them negative")
        return linear(hardware.kv_tokens, *times)

    def engine_config(self) -> EngineConfig:
        """Raises ValueError where a size makes no sense."""
        return default_config(
            self.dialect,
            self.machine(),
            kv_tokens=self.kv_tokens,
            block_size=self.block_size,
            max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens,
            order=self.order,
            max_queued=self.max_queued,
            seed=self.seed,
        )


def parse_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Settings from a command line; a mistake ends the process with a message and status 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m workers", description="An emulated SGLang or vLLM worker.")
    hints = get_type_hints(WorkerSettings, include_extras=True)
    for option in fields(WorkerSettings):
        flag = "--" + option.name.replace("_", "-")
        kind, text = get_args(hints[option.name])
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, default=option.default, help=text, **_parsing(kind))
    settings = WorkerSettings(**vars(parser.parse_args(arguments)))
    try:
        _check(settings)
    except ValueError as error:
        parser.error(str(error))
    return settings


def _parsing(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": get_args(kind)[0] if isinstance(kind, UnionType) else kind}


def _check(settings: WorkerSettings) -> None:
    if settings.hardware not in HARDWARE:
        raise ValueError(f"unknown hardware {settings.hardware!r}, known: {', '.join(HARDWARE)}")
    if settings.speed < 0 or settings.max_model_len < 2:
        raise ValueError("speed must not be negative and max_model_len must be at least 2")
    settings.engine_config()
