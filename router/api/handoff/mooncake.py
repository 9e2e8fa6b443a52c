"""vLLM with its Mooncake connector: both workers are called at once, with a transfer id that the router makes up.

The prefill worker's answer says nothing. The decode worker finds it at its bootstrap server, by the id of its engine,
and waits for the KV cache. After `kv_connector/v1/mooncake` of vLLM 0.32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from router.api.body.json_object import insert_members, read_object
from router.api.handoff.legs import finish_reasons, one_token_body
from router.api.handoff.nixl import PARAMS
from router.errors import WorkerBroke


@dataclass(frozen=True, slots=True)
class MooncakeTransfer:
    """One request's transfer."""

    transfer_id: str
    engine: str
    """The id of the prefill worker's engine."""
    address: str
    """The URL of the prefill worker's bootstrap server."""

    abort_id = None

    def prefill_body(self, body: bytes) -> bytes:
        """The first token must not end the answer: the prefill worker would not keep the cache."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self.transfer_id}
        return one_token_body(body, {PARAMS: orjson.dumps(params), "ignore_eos": b"true"})

    def decode_body(self, body: bytes) -> bytes:
        return insert_members(body, {PARAMS: self.kept_params})

    @property
    def kept_params(self) -> bytes:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": self.transfer_id,
            "remote_engine_id": self.engine,
            "remote_bootstrap_addr": self.address,
        }
        return orjson.dumps(params)

    def check_prefill(self, answer: Mapping[str, Any]) -> None:
        if finish_reasons(answer) != ["length"]:
            raise WorkerBroke("The prefill worker has not kept the prompt.")


def read_engine_ids(body: bytes) -> dict[int, str]:
    """Return the id of each rank's engine, from the answer of a bootstrap server to `/query`. Raises WorkerBroke."""
    entries = {rank: entry.get("engine_id") for rank, entry in read_object(body).items() if isinstance(entry, dict)}
    found = {int(rank): each for rank, each in entries.items() if rank.isdecimal() and isinstance(each, str)}
    if not found:
        raise WorkerBroke("The bootstrap server names no engine.")
    return found
