"""What the calls to prefill and decode workers have in common, whatever carries the KV cache from one to the other."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import orjson

from router.api.answer.usage import read_usage
from router.api.body.fields import LIMITS
from router.api.body.json_object import cut_members, put_members, read_object
from router.core.model.request import Usage
from router.errors import WorkerBroke

NOT_PREFILLED: Final = frozenset({"stream_options", "min_tokens", "return_token_ids", "stop", "stop_token_ids"})
"""Members of a call that mean nothing for one token that nobody sees, or contradict it."""


class Rendezvous(Protocol):
    """How the two calls of one request that are sent at once find each other."""

    def prefill_body(self, body: bytes) -> bytes:
        """Return the body for the prefill worker. `body`: of the call, in which the client steers nothing."""

    def decode_body(self, body: bytes) -> bytes:
        """Return the body for the decode worker."""

    def check_prefill(self, answer: Mapping[str, Any]) -> None:
        """Raise WorkerBroke if a prefill worker's answer means that its prompt never comes to the decode worker."""

    @property
    def kept_params(self) -> bytes | None:
        """The parameters, as JSON, by which a decode worker has the prefill worker let go of what it has computed and
        nobody has fetched; None if it keeps nothing then.
        """

    @property
    def abort_id(self) -> str | None:
        """The id by which either call can be aborted; None if that takes no more than closing its connection."""


def one_token_body(body: bytes, added: Mapping[str, bytes]) -> bytes:
    """Return the body that asks vLLM for the prompt of a call and one token. `added`: further members, as JSON."""
    members = orjson.loads(body)
    if not NOT_PREFILLED.isdisjoint(members):
        body = cut_members(body, NOT_PREFILLED)
    # Completions know only the first limit: without it, the prefill worker would compute more than the prompt.
    limits = [LIMITS[0], *[name for name in LIMITS[1:] if members.get(name) is not None]]
    values = {"stream": b"false", **added, **dict.fromkeys(limits, b"1")}
    if "n" in members:
        values["n"] = b"1"
    return put_members(body, values, members)


def prefill_failed(answer: Mapping[str, Any]) -> bool:
    """Return whether a prefill worker's answer with status 200 says that its engine has failed."""
    return "abort" in finish_reasons(answer) or "error" in finish_reasons(answer) or answer.get("error") is not None


def finish_reasons(answer: Mapping[str, Any]) -> list[object]:
    """Return why each choice of an answer ended."""
    choices = answer.get("choices")
    return (
        [each.get("finish_reason") for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    )


def read_prefill(rendezvous: Rendezvous, body: bytes) -> Usage | None:
    """Read the whole answer of a prefill worker that was called together with the decode worker.

    Raises WorkerBroke if the decode worker waits for a prompt that never comes.
    """
    answer = read_object(body)
    if prefill_failed(answer):
        raise WorkerBroke("The prefill worker has failed.")
    rendezvous.check_prefill(answer)
    return read_usage(answer.get("usage"))
