"""The two calls of a request whose prompt one engine computes and another one decodes: vLLM with its NIXL connector.

The prefill worker is asked for one token and keeps the prompt's KV cache; its answer has `kv_transfer_params`, which
say where. The decode worker gets the client's call with these parameters exactly as they came, and fetches the cache.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from router.api.answer.usage import read_usage
from router.api.body.fields import Fields
from router.api.body.json_edit import cut_members, insert_members, member_value, put_members
from router.api.body.json_object import read_object
from router.core.model.request import Usage
from router.errors import WorkerBroke

PARAMS: Final = "kv_transfer_params"
KEEP: Final = b'{"do_remote_decode":true,"do_remote_prefill":false}'
"""The parameters by which a prefill worker keeps what it has computed."""
LIMITS: Final = ("max_tokens", "max_completion_tokens")
NOT_PREFILLED: Final = frozenset({"stream_options", "min_tokens", "return_token_ids", "stop", "stop_token_ids"})
"""Members of a call that mean nothing for one token that nobody sees, or contradict it."""
FOR_ONE_ENGINE: Final = frozenset({"prompt_logprobs", "echo", "suffix", "use_beam_search"})
"""Members by which an answer has more of the prompt than its KV cache tells, or is computed from several sequences."""


def is_for_one_engine(fields: Fields, answers: int) -> bool:
    """Return whether one engine must compute all of a call. `answers`: number of answers over all prompts.

    What a prefill worker keeps is read once, so it serves one answer.
    """
    if answers != 1 or (fields.get("best_of") or 1) != 1 or 0 in map(fields.get, LIMITS):
        return True
    return any(fields.get(name) not in (None, False, "") for name in FOR_ONE_ENGINE.intersection(fields))


def prefill_body(body: bytes) -> bytes:
    """Return the body that asks a prefill worker for the prompt of a call, and to keep it."""
    members = orjson.loads(body)
    if not NOT_PREFILLED.isdisjoint(members):
        body = cut_members(body, NOT_PREFILLED)
    # Completions know only the first limit: without it, the prefill worker would compute more than the prompt.
    limits = [LIMITS[0], *[name for name in LIMITS[1:] if members.get(name) is not None]]
    values = {"stream": b"false", PARAMS: KEEP, **dict.fromkeys(limits, b"1")}
    if "n" in members:
        values["n"] = b"1"
    return put_members(body, values, members)


class KeptPrompt(NamedTuple):
    """What a prefill worker answers."""

    params: bytes
    """Where it keeps the prompt, as JSON."""
    usage: Usage | None


def read_kept_prompt(body: bytes) -> KeptPrompt:
    """Read a prefill worker's answer. Raises WorkerBroke if it does not say where the prompt is kept."""
    answer = read_object(body)
    if not isinstance(answer.get(PARAMS), dict) or not answer[PARAMS] or _failed(answer):
        raise WorkerBroke("The prefill worker does not say where it keeps the prompt.")
    params = member_value(body, PARAMS)
    assert params is not None, "it was parsed"
    return KeptPrompt(params, read_usage(answer.get("usage")))


def _failed(answer: Mapping[str, Any]) -> bool:
    """Return whether an answer with status 200 says that its engine has failed."""
    choices = answer.get("choices")
    aborted = isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") in ("abort", "error") for choice in choices
    )
    return aborted or answer.get("error") is not None


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
