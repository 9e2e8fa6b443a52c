"""Data-parallel ranks on the wire: which one a call is pinned to, and the engines' own choice. PURE.

vLLM 0.32 (`entrypoints/generate/base/serving.py`, `v1/engine/core_client.py`) reads a header of chats, completions and
messages, and ignores one that is no integer; without it the rank with the fewest requests serves, counted here without
delay. SGLang 0.5.23 (`entrypoints/openai/serving_base.py`, `managers/data_parallel_controller.py`) reads a field of the
body, which the same header overrides, also of messages, whose bodies have no such field; without it ranks take turns.

Left out: vLLM's penalty for requests that wait above half of the KV cache, SGLang's other load balancing methods, and
its `x-override-routed-dp-rank`, which it reads only with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Final

from workers.api.call import ApiError, Body, whole
from workers.engine.engine import Engine
from workers.engine.model import Dialect

HEADER: Final = "x-data-parallel-rank"
SGLANG_FIELDS: Final = ("routed_dp_rank", "data_parallel_rank")
"""The second is the field's old name."""
CHATS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"

PINNED_BY_HEADER: Mapping[Dialect, frozenset[str]] = {
    "vllm": CHATS | {MESSAGES},
    "sglang": CHATS | {MESSAGES, RESPONSES},
}
"""The paths whose header is read."""


def pinned_rank(dialect: Dialect, path: str, headers: Mapping[str, str], body: Body, ranks: int) -> int | None:
    """Return the rank that a call asks for, None if it leaves the choice to the engine.

    Raises ApiError 400 if there is no such rank.
    """
    given = headers.get(HEADER) if path in PINNED_BY_HEADER[dialect] else None
    rank = _of_vllm(given) if dialect == "vllm" else _of_sglang(given, {} if path == MESSAGES else body)
    if rank is not None and not 0 <= rank < ranks:
        named = "data_parallel_rank " if dialect == "vllm" else "routed_dp_rank="
        raise ApiError(400, f"{named}{rank} {'is ' if dialect == 'vllm' else ''}out of range [0, {ranks})")
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
    except ValueError:
        message = f"Invalid X-Data-Parallel-Rank header: must be an integer, got '{given}'"
        raise ApiError(400, message) from None


def own_choice(dialect: Dialect, engines: Sequence[Engine]) -> Callable[[], int]:
    """Return what chooses the rank of a request that is not pinned."""
    if dialect == "sglang":
        turns = cycle(range(len(engines)))
        return lambda: next(turns)
    return lambda: min(range(len(engines)), key=lambda rank: engines[rank].waiting + engines[rank].running)
