"""The data types of the emulated engine: requests in, tokens out, and the counters."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Dialect = Literal["vllm", "sglang"]
Order = Literal["fcfs", "lpm"]
FinishReason = Literal["stop", "length", "abort"]


class RequestTooLarge(ValueError):
    """The request needs more KV tokens than the whole pool holds. A client error: a retry would not help."""


class QueueFull(Exception):
    """The engine's waiting queue is at its limit. A later retry may succeed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    `prompt` holds token ids and is never changed. `max_tokens` bounds the answer; unless `ignore_eos`, the answer may
    end earlier. `sample` distinguishes the n answers to one prompt: equal prompt, sample and seed give equal tokens.
    `hands_off`: its KV stays in memory after its end, for a decode engine, until `release_held`. `pulls`: the KV of its
    prompt comes from a prefill engine: see `take_allocated`.
    """

    id: str
    prompt: Tokens[int]
    max_tokens: int
    ignore_eos: bool = False
    sample: int = 0
    hands_off: bool = False
    pulls: bool = False


NO_TOKEN: Final = -1
"""Stands in the output of a request that ends without a further token."""


class Output(NamedTuple):
    """One generated token of one request; `cached_tokens` is the prefix hit when the request was first scheduled."""

    id: str
    token: int
    finish: FinishReason | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The sizes of one engine; `engine.default_config` returns each dialect's own defaults.

    `kv_tokens`: KV pool in tokens, rounded down to whole blocks. `max_batched_tokens`: new tokens per step (vLLM's
    max_num_batched_tokens, SGLang's chunked_prefill_size). `max_queued`: waiting requests, None for no limit. Raises
    ValueError if a size is out of range, or if the dialect does not have the order.
    """

    dialect: Dialect
    kv_tokens: int
    block_size: int
    max_running: int
    max_batched_tokens: int
    order: Order = "fcfs"
    max_queued: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.block_size, self.max_running, self.max_batched_tokens) < 1:
            raise ValueError("block_size, max_running and max_batched_tokens must be at least 1")
        if self.kv_tokens < 4 * self.block_size:
            raise ValueError("kv_tokens must hold at least four blocks")
        if self.dialect == "sglang" and self.max_batched_tokens < self.block_size:
            raise ValueError("max_batched_tokens must hold at least one page")
        if self.dialect == "vllm" and self.order == "lpm":
            raise ValueError("vLLM has no lpm order")
        if self.max_queued is not None and self.max_queued < 1:
            raise ValueError("max_queued must be at least 1")


@dataclass(slots=True)
class Counters:
    """Totals since the start; fields never decrease. They count tokens unless the name says otherwise.

    `prefix_queries` and `prefix_hits` count each request once, when it is first scheduled. `prefilled_tokens` counts
    the computed prompt tokens, recomputation included; `prefill_seconds` is the time of all steps with a prefill.
    `external_hits` counts those that came from prefill engines.
    """

    steps: int = 0
    prefill_steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefilled_tokens: int = 0
    prefill_seconds: float = 0.0
    evicted_tokens: int = 0
    preempted_requests: int = 0
    preempted_input_tokens: int = 0
    preempted_output_tokens: int = 0
    submitted_requests: int = 0
    aborted_requests: int = 0
    finished_requests: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    finished_prompt_tokens: int = 0
    finished_generation_tokens: int = 0
