"""Fields by which a call would choose for itself what the router chooses: they are dropped, or the call is refused."""

import re
from typing import Final

from router.api.body.error_bodies import load
from router.api.body.json_edit import cut_member, member_span
from router.errors import BadRequest

RANK_FIELDS: Final = ("routed_dp_rank", "data_parallel_rank")
"""They name the data-parallel rank of an SGLang; the second is the field's old name."""
HANDOFF_FIELDS: Final = (
    *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
)
"""They name the prefill worker that has computed the prompt, and what it keeps."""
_PERHAPS: Final = re.compile(rb"_rank|kv_transfer_params|bootstrap_|\\u00[2-7]")
"""What every body that has such a field contains, however its name is written."""


def steering_fields(body: bytes) -> list[str]:
    """Return the names of the steering fields that a body has; none if it is not a JSON object."""
    fields = load(body) if _PERHAPS.search(body) else None
    return [] if fields is None else [name for name in (*RANK_FIELDS, *HANDOFF_FIELDS) if name in fields]


def without_steering(body: bytes) -> bytes:
    """Return the body without its steering fields, however often it has them."""
    for name in steering_fields(body):
        while member_span(body, name) is not None:
            body = cut_member(body, name)
    return body


def refuse_steering(body: bytes) -> None:
    """Raise BadRequest if a body has a steering field."""
    for name in steering_fields(body):
        raise BadRequest(f"`{name}` is not accepted: the router chooses what it names.", param=name)
