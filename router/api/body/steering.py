"""Fields by which a call would choose for itself what the router chooses: they are dropped, or the call is refused."""

import re
from typing import Final

from router.api.body.json_object import cut_members, load
from router.errors import BadRequest

RANK_FIELDS: Final = ("routed_dp_rank", "data_parallel_rank")
"""They name the data-parallel rank of an SGLang; the second is the field's old name."""
HANDOFF_FIELDS: Final = (
    *("kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
)
"""They name the prefill worker that has computed the prompt, and what it keeps."""
EXTRA_ARGUMENTS: Final = "vllm_xargs"
"""vLLM passes its members on to the connector, which fails on parameters that are no object."""
TRANSFERS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""What steers there."""
_PERHAPS: Final = re.compile(rb"_rank|_transfer_params|bootstrap_|\\u00[2-7]")
"""What every body that has such a field contains, however its name is written."""


def steering_fields(body: bytes) -> list[str]:
    """Return the names of the steering fields that a body has; none if it is not a JSON object."""
    fields = load(body) if _PERHAPS.search(body) else None
    if fields is None:
        return []
    found: list[str] = [name for name in (*RANK_FIELDS, *HANDOFF_FIELDS) if name in fields]
    arguments = fields.get(EXTRA_ARGUMENTS)
    if isinstance(arguments, dict) and not TRANSFERS.isdisjoint(arguments):
        found.append(EXTRA_ARGUMENTS)
    return found


def without_steering(body: bytes) -> bytes:
    """Return the body without its steering fields, however often it has them."""
    found = steering_fields(body)
    return cut_members(body, found) if found else body


def refuse_steering(body: bytes) -> None:
    """Raise BadRequest if a body has a steering field."""
    for name in steering_fields(body):
        raise BadRequest(f"`{name}` is not accepted: the router chooses what it names.", param=name)
