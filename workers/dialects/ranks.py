"""Data-parallel ranks on the wire: which one a call is pinned to, and the engines' own choice. PURE.

vLLM (`entrypoints/generate/base/serving.py`, `v1/engine/core_client.py`) reads a header of chats and completions, and
ignores one that is no integer; without it the rank with the fewest requests serves, counted here without delay. SGLang
(`entrypoints/request_headers.py`, `managers/data_parallel_controller.py`) reads a field of the body, which a header of
chats overrides, and takes turns.

Left out: vLLM's penalty for requests that wait above half of the KV cache, and SGLang's other load balancing methods.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

from workers.api.call import ApiError, Body, whole
from workers.engine.engine import Engine
from workers.engine.model import Dialect

VLLM_HEADER = "x-data-parallel-rank"
SGLANG_HEADER = "x-override-routed-dp-rank"
SGLANG_FIELDS = ("routed_dp_rank", "data_parallel_rank")
"""The second is the field's old name."""

PINNED_BY_HEADER: Mapping[Dialect, frozenset[str]] = {
    "vllm": frozenset({"/v1/chat/completions", "/v1/completions"}),
    "sglang": frozenset({"/v1/chat/completions"}),
}
"""The paths whose header is read."""


def pinned_rank(dialect: Dialect, path: str, headers: Mapping[str, str], body: Body, ranks: int) -> int | None:
    """Return the rank that a call asks for, None if it leaves the choice to the engine.

    Raises ApiError 400 if there is no such rank.
    """
    header = VLLM_HEADER if dialect == "vllm" else SGLANG_HEADER
    given = headers.get(header) if path in PINNED_BY_HEADER[dialect] else None
    rank = _of_vllm(given) if dialect == "vllm" else _of_sglang(given, body)
    if rank is not None and not 0 <= rank < ranks:
        refusal = f"data_parallel_rank {rank} is out of range [0, {ranks})."
        raise ApiError(400, refusal if dialect == "vllm" else f"DP rank {rank} is not active.")
    return rank


def _of_vllm(given: str | None) -> int | None:
    try:
        return None if given is None else int(given)
    except ValueError:
        return None


def _of_sglang(given: str | None, body: Body) -> int | None:
    if given is None:
        fields = [whole(body.get(field), field) for field in SGLANG_FIELDS]
        return next((rank for rank in fields if rank is not None), None)
    try:
        return int(given)
    except ValueError as error:
        raise ApiError(400, f"invalid {SGLANG_HEADER} header {given!r}: {error}") from error


def own_choice(dialect: Dialect, engines: Sequence[Engine]) -> Callable[[], int]:
    """Return what chooses the rank of a request that is not pinned."""
    if dialect == "sglang":
        turns = cycle(range(len(engines)))
        return lambda: next(turns)
    return lambda: min(range(len(engines)), key=lambda rank: engines[rank].waiting + engines[rank].running)
