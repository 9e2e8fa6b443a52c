"""The duration of an engine step: closed forms fitted by others, each with its source, units and known gaps.

Times are milliseconds inside the formulas and seconds at `Hardware.step_seconds`. Each form models one GPU (or one TP
group) running one model; only the H100's has been compared with a real card here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Batch:
    """The work of one step.

    `extends`: the new tokens of each prefill chunk and the sequence length after it. `decodes`: sequences that compute
    one token; `decode_context`: the sum of their lengths.
    """

    extends: list[tuple[int, int]] = field(default_factory=list)
    decodes: int = 0
    decode_context: int = 0

    @property
    def new_tokens(self) -> int:
        return sum(new for new, _ in self.extends) + self.decodes

    @property
    def context(self) -> int:
        """The tokens that attention reads: the lengths of all sequences of the step, cached prefixes included."""
        return self.decode_context + sum(length for _, length in self.extends)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A step-time model and the KV pool (tokens) that such a worker would have."""

    name: str
    kv_tokens: int
    step_seconds: Callable[[Batch], float]


def _a6000_mistral_7b(batch: Batch) -> float:
    """Preble's fit for Mistral 7B on an A6000 (SGLang, flashinfer); ms, divided by an efficiency of 0.9.

    lin = max(22, 0.1084 n + 4.21) over n new tokens: the published piece for 192 <= n < 384 is a parabola that turns
    negative, so the constant is extended up to the line instead. The attention term is halved if the unshared KV per
    request is short; here no KV counts as shared among decodes.
    """
    new, requests = batch.new_tokens, len(batch.extends) + batch.decodes
    context = batch.decode_context + sum(length for _, length in batch.extends)
    unshared = batch.decode_context + sum(extend for extend, _ in batch.extends)
    attention = 1.86e-4 * context + 0.159 if context > 1024 else 0.32
    if context > 1024 and unshared <= 1024 * requests and requests * unshared <= 32 * 256 * 2048:
        attention /= 2
    quadratic = sum(
        1.13e-3 * extend + 1.75e-3 * length + 2.19e-6 * extend * length
        for extend, length in batch.extends
        if extend * length > 1 << 20
    )
    return (max(22.0, 0.10842571 * new + 4.20977705) + attention + quadratic) / 0.9 / 1000


def _a100_mistral_7b(batch: Batch) -> float:
    """Preble's fit for Mistral 7B on an A100; ms, divided by an efficiency of 0.85.

    The fit has no term for decode attention; 8.2e-5 ms per context token is added, which is 131,072 bytes of KV per
    token read at 80 % of 2.0 TB/s (a construction).
    """
    new = batch.new_tokens
    linear = 0.05031337 * new + 5.50599690 if new >= 256 else 10.5 if new >= 64 else 8.96
    attention = sum(
        0.12386358 - 7.45358651e-4 * extend + 1.72022673e-3 * length + 1.36265841e-6 * extend * length
        for extend, length in batch.extends
        if extend * length >= 1 << 20
    )
    return (linear + attention + 8.2e-5 * batch.decode_context) / 0.85 / 1000


def _a10g_llama_7b(batch: Batch) -> float:
    """Llama 7B on an A10G: built from the profile in VTC's artifact; ms.

    0.2137 ms per new token is the profile's prefill rate. Decode steps: 31.4 ms plus 8.7e-4 ms per context token, the
    latter for reading 524,288 bytes of KV at 600 GB/s (a construction). Together they match within 3 % the profile's
    mean decode step at (batch, input/output) 19, 256/256; 37, 8/256; 13, 512/256. The attention of long prefills is
    left out.
    """
    return (max(31.4, 0.2137 * batch.new_tokens) + 8.7e-4 * batch.decode_context) / 1000


def _h100_llama_7b(batch: Batch) -> float:
    """Llama 2 7B on an H100: linear operators from Vidur's profile, the rest constructed; ms.

    max(5.6, 2.9 + 0.0202 n) is a fit to the sums of the profiled operators. Added: 0.6 ms of overhead, 2.0e-4 ms per
    decoded context token (524,288 bytes of KV at 80 % of 3.35 TB/s), and 1.1e-6 ms per pair of prefilled and attended
    token (524,288 FLOP at half of 989 TFLOP/s). The overhead makes the step of one short call 6.2 ms, as measured with
    vLLM 0.24 and a model of this size, but a quarter of the KV bytes (docs/results.md, "Real vLLM on a GPU").
    """
    pairs = sum(extend * length for extend, length in batch.extends)
    linear = max(5.6, 2.9 + 0.0202 * batch.new_tokens)
    return (linear + 0.6 + 2.0e-4 * batch.decode_context + 1.1e-6 * pairs) / 1000


def _instant(_batch: Batch) -> float:
    """0.1 ms for any batch: for tests in which the emulated machine must not be the limit."""
    return 1e-4


def linear(kv_tokens: int, step: float, prefilled_token: float, decoded_sequence: float) -> Hardware:
    """Steps of `step` ms, plus `prefilled_token` ms per prefilled token and `decoded_sequence` ms per decode."""

    def step_seconds(batch: Batch) -> float:
        prefilled = batch.new_tokens - batch.decodes
        return (step + prefilled_token * prefilled + decoded_sequence * batch.decodes) / 1000

    return Hardware("linear", kv_tokens, step_seconds)


@dataclass(frozen=True, slots=True)
class RankSteps:
    """The step times of one rank of a decode tier: fixed + context · L ("Tackling the Data-Parallel Load Balancing
    Bottleneck in LLM Serving", 2.1).

    L is the sum of the contexts of all running sequences: prompts, cached or not, and the tokens generated so far. By
    default the prefill is done elsewhere, so that a prompt takes the time of the decode step that it joins.
    """

    fixed: float
    """Milliseconds that every step takes: weights, kernels, collectives."""
    context: float
    """Microseconds per token of L."""
    prefill: float = 0.0
    """Milliseconds per prefilled token, for ranks that compute their prompts themselves."""

    def __post_init__(self) -> None:
        """Raise ValueError if a time is negative, or if a step could take none."""
        if self.fixed <= 0 or self.context < 0 or self.prefill < 0:
            raise ValueError("the fixed time of a step must be positive, its other times not negative")

    def __call__(self, batch: Batch) -> float:
        """Return the seconds of a step."""
        prefilled = batch.new_tokens - batch.decodes
        return (self.fixed + self.context / 1000 * batch.context + self.prefill * prefilled) / 1000


def rank(kv_tokens: int, steps: RankSteps) -> Hardware:
    """Return the hardware of one rank: its step times, and the KV pool (tokens) that it has for itself."""
    return Hardware("rank", kv_tokens, steps)


HARDWARE: Mapping[str, Hardware] = {
    model.name: model
    for model in (
        Hardware("a100-mistral-7b", 430_000, _a100_mistral_7b),
        Hardware("a6000-mistral-7b", 198_516, _a6000_mistral_7b),
        Hardware("a10g-llama-7b", 10_000, _a10g_llama_7b),
        Hardware("h100-llama-7b", 110_000, _h100_llama_7b),
        Hardware("instant", 430_000, _instant),
    )
}
"""The hardware by name.

KV pools: A6000 as published by Preble, A10G as in VTC; A100 and H100 are 90 % of 80 GB less 14.5 GB of weights, divided
by the KV bytes of a token (rounded).
"""
