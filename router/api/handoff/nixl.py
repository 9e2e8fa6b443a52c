"""vLLM with its NIXL connector: the prefill worker is called first, and keeps what it has computed.

It is asked for one token and keeps the prompt's KV cache; its answer has `kv_transfer_params`, which say where. The
decode worker gets the client's call with these parameters exactly as they came, and fetches the cache.
"""

from typing import Final, NamedTuple

import orjson

from router.api.answer.usage import read_usage
from router.api.body.json_object import insert_members, member_value, read_object
from router.api.handoff.legs import one_token_body, prefill_failed
from router.core.model.request import Usage
from router.errors import WorkerBroke

PARAMS: Final = "kv_transfer_params"
KEEP: Final = b'{"do_remote_decode":true,"do_remote_prefill":false}'
"""The parameters by which a prefill worker keeps what it has computed."""


def prefill_body(body: bytes) -> bytes:
    """Return the body that asks a prefill worker for the prompt of a call, and to keep it."""
    return one_token_body(body, {PARAMS: KEEP})


class KeptPrompt(NamedTuple):
    """What a prefill worker answers."""

    params: bytes
    """Where it keeps the prompt, as JSON."""
    usage: Usage | None


def read_kept_prompt(body: bytes) -> KeptPrompt:
    """Read a prefill worker's answer. Raises WorkerBroke if it does not say where the prompt is kept."""
    answer = read_object(body)
    if not isinstance(answer.get(PARAMS), dict) or not answer[PARAMS] or prefill_failed(answer):
        raise WorkerBroke("The prefill worker does not say where it keeps the prompt.")
    params = member_value(body, PARAMS)
    assert params is not None, "it was parsed"
    return KeptPrompt(params, read_usage(answer.get("usage")))


def decode_body(body: bytes, params: bytes) -> bytes:
    """Return the body that lets a decode worker fetch the prompt of a call. `body` has no parameters of its own."""
    return insert_members(body, {PARAMS: params})


RELEASED_MODEL: Final = "d2lpm: release"
"""No engine has a model of this name."""


def release_body(params: bytes) -> bytes:
    """Return the body of a completion that any decode worker refuses, for which it lets go of a kept prompt.

    vLLM tells the prefill worker so when it refuses a call with parameters because of its model; there is no call to do
    only that. A call that it cannot read at all, as without a prompt, it refuses too early for that.
    """
    return decode_body(orjson.dumps({"model": RELEASED_MODEL, "prompt": "-", "max_tokens": 1}), params)
