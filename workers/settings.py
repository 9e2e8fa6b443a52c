"""The command line of a worker process: one frozen dataclass, from which the argument parser is derived."""

import argparse
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from workers.engine.engine import DEFAULT_HARDWARE, default_config
from workers.engine.hardware import HARDWARE, Hardware, RankSteps, linear, rank
from workers.engine.model import Dialect, EngineConfig, Order

Role = Literal["both", "prefill", "decode"]
ConnectorName = Literal["nixl", "mooncake"]
FailurePolicy = Literal["fail", "recompute"]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of one emulated worker. None means the default of the dialect or of the hardware.

    Sizes are those of each of its ranks.
    """

    dialect: Annotated[Dialect, "engine to emulate, on the wire and in scheduling"] = "vllm"
    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 picks a free one"] = 8000
    model: Annotated[str, "served model name"] = "emulated"
    hardware: Annotated[str, f"step-time model: {', '.join(HARDWARE)}"] = DEFAULT_HARDWARE
    step_times: Annotated[
        str | None,
        "replaces the hardware's step times: A,B,C, the milliseconds of a step, of each prefilled token in it, and "
        "of each decoded sequence",
    ] = None
    rank_steps: Annotated[
        str | None,
        "replaces the hardware's step times by those of a decode rank: A,B, the milliseconds of a step, and the "
        "microseconds of each token of context in it; prompts are free",
    ] = None
    ranks: Annotated[
        int,
        "data-parallel ranks behind this URL; each of their steps lasts as long as that of the slowest, and a rank "
        "without requests takes part with a dummy step",
    ] = 1
    kv_tokens: Annotated[int | None, "size of the KV pool in tokens (default: the hardware's)"] = None
    block_size: Annotated[int | None, "tokens per block or page (default: vllm 16, sglang 1)"] = None
    max_running: Annotated[int | None, "most requests in one batch (default: 256)"] = None
    max_batched_tokens: Annotated[
        int | None, "most new tokens per step; for sglang, its chunk size (default: vllm 2048, sglang 8192)"
    ] = None
    max_model_len: Annotated[
        int, "most tokens of a prompt and its answer together; capped at the size of the KV pool"
    ] = 32_768
    order: Annotated[Order, "order of the waiting queue; lpm for sglang only"] = "fcfs"
    max_queued: Annotated[int | None, "most waiting requests; further ones are rejected (default: no limit)"] = None
    speed: Annotated[float, "run this many times faster than the hardware; 0 or inf: as fast as possible"] = 1.0
    seed: Annotated[int, "seed of the answers"] = 0
    api_key: Annotated[str | None, "bearer key that callers must send"] = None
    hide_capacity: Annotated[bool, "do not report the size of the KV pool and the batch limit"] = False
    hide_cached: Annotated[
        bool, "vllm only: usage does not say what was cached, as without --enable-prompt-tokens-details"
    ] = False
    measure: Annotated[
        bool,
        "measure the engine's own queue; GET /emulated/queue reads it, POST resets it; of ranks, sum up their loads "
        "over all steps, for GET /emulated/group",
    ] = False
    kv_events: Annotated[
        int | None,
        "port that publishes KV events, and each rank's at the next one; the ports after these replay past events; 0 "
        "picks free ports",
    ] = None
    role: Annotated[
        Role, "prefill or decode: the engine does only its part of a request and hands the KV cache on; both: all of it"
    ] = "both"
    connector: Annotated[
        ConnectorName | None, "vllm only: what carries the KV cache from prefill to decode (default: nixl with a role)"
    ] = None
    side_port: Annotated[
        int,
        "port for other engines: NIXL's side channel, or the bootstrap server of Mooncake and SGLang; 0: a free one",
    ] = 0
    kv_lease: Annotated[float, "seconds for which a NIXL prefill holds the KV cache for a decode engine"] = 30.0
    kv_load_failure_policy: Annotated[
        FailurePolicy, "vllm only: what a decode engine does whose KV cache does not come"
    ] = "fail"
    transfer_times: Annotated[
        str, "A,B: milliseconds of a transfer from prefill to decode, and microseconds of each token in it"
    ] = "2,5"
    transfer_timeout: Annotated[
        float | None,
        "seconds that one leg of a request waits for the other (default: 300 for sglang, 480 for Mooncake)",
    ] = None
    exit_with_parent: Annotated[bool, "exit when standard input is closed"] = False

    @property
    def kv_connector(self) -> ConnectorName | None:
        """The connector of a vLLM engine, None if it has none."""
        if self.dialect != "vllm" or (self.connector is None and self.role == "both"):
            return None
        return self.connector or "nixl"

    @property
    def disaggregated(self) -> bool:
        """True if the engine can exchange KV with others."""
        return self.kv_connector is not None or self.role != "both"

    def transfer_seconds(self) -> tuple[float, float]:
        """Return the seconds of a transfer and of each token in it. Raises ValueError if they are invalid."""
        each, token = _numbers("transfer_times", self.transfer_times, 2)
        return each / 1e3, token / 1e6

    def machine(self) -> Hardware:
        """Return the emulated hardware. Raises ValueError if the step times are invalid."""
        hardware = HARDWARE[self.hardware]
        if self.rank_steps is not None:
            return rank(hardware.kv_tokens, RankSteps(*_numbers("rank_steps", self.rank_steps, 2)))
        if self.step_times is None:
            return hardware
        return linear(hardware.kv_tokens, *_numbers("step_times", self.step_times, 3))

    def engine_config(self) -> EngineConfig:
        """Return the sizes of the engine. Raises ValueError if a size is invalid."""
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


def _numbers(name: str, text: str, count: int) -> list[float]:
    """Read numbers separated by commas. Raises ValueError unless there are `count`, none of them negative."""
    words = {2: "two", 3: "three"}
    with suppress(ValueError):
        numbers = [float(part) for part in text.split(",")]
        if len(numbers) == count and all(0 <= number < float("inf") for number in numbers):
            return numbers
    raise ValueError(f"{name} must be {words[count]} numbers, none of them negative")


def parse_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Parse a command line. An invalid one ends the process with a message and status 2, as argparse does."""
    parser = _Parser(prog="python -m workers", description="An emulated SGLang or vLLM worker.")
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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest flag or choice that there is, as the router's do."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = _did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            message = (
                f"there is no {value!r}{_did_you_mean(value, action.choices)} (choose from {', '.join(action.choices)})"
            )
            raise argparse.ArgumentError(action, message)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _parsing(kind: Any) -> dict[str, Any]:
    wanted = get_args(kind)[0] if get_origin(kind) in (UnionType, Union) else kind
    if get_origin(wanted) is Literal:
        return {"choices": get_args(wanted)}
    return {"type": wanted}


def _check(settings: WorkerSettings) -> None:
    if settings.hardware not in HARDWARE:
        meant = _did_you_mean(settings.hardware, HARDWARE)
        raise ValueError(f"unknown hardware {settings.hardware!r}{meant} (known: {', '.join(HARDWARE)})")
    if settings.speed < 0 or settings.max_model_len < 2:
        raise ValueError("speed must not be negative and max_model_len must be at least 2")
    if not 0 <= settings.port <= 65535:
        raise ValueError("port must be from 0 to 65535")
    if settings.step_times is not None and settings.rank_steps is not None:
        raise ValueError("step_times and rank_steps exclude each other")
    if settings.ranks < 1:
        raise ValueError("ranks must be at least 1")
    if settings.dialect == "sglang" and settings.connector is not None:
        raise ValueError("connector is for vllm: sglang has a role alone")
    if settings.dialect == "sglang" and settings.hide_cached:
        raise ValueError("hide_cached is for vllm")
    if settings.kv_lease <= 0 or (settings.transfer_timeout is not None and settings.transfer_timeout <= 0):
        raise ValueError("kv_lease and transfer_timeout must be positive")
    settings.transfer_seconds()
    settings.engine_config()
