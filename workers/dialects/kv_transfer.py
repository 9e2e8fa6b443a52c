"""vLLM's `kv_transfer_params`, in calls and in answers, as of vLLM 0.32 (`kv_connector/v1/nixl`, `mooncake`). PURE.

Those of NIXL were compared with two vLLM 0.32 servers, which have all fields but remote_registration_generation.

Left out: parameters that come back from decode to prefill (`bidirectional_kv_xfer`), and the push mode of NIXL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from workers.api.call import Body, wrong_type

FIELD: Final = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A prompt whose KV a prefill engine holds: where, under which name, and what it found cached."""

    host: str
    port: int
    engine: str
    request_id: str
    cached_tokens: int | None

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PushedPrefill:
    """A prompt whose KV a prefill engine will send: which one, and under which name."""

    address: str
    engine: str
    transfer_id: str


def transfer_params(body: Body) -> Mapping[str, object]:
    """Return the parameters of a call, empty if it has none. Raises ApiError 400 if they are no object."""
    params = body.get(FIELD)
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise wrong_type(FIELD, "a valid dictionary")
    return params


def remote_prefill(params: Mapping[str, object]) -> RemotePrefill | None:
    """Return where the KV of a prompt is, None if it is nowhere, or if a part of the address is missing."""
    if not params.get("do_remote_prefill") or not params.get("remote_block_ids"):
        return None
    host, port = params.get("remote_host"), params.get("remote_port")
    engine, request_id = params.get("remote_engine_id"), params.get("remote_request_id")
    cached = params.get("remote_prefill_cached_tokens")
    if not (isinstance(host, str) and isinstance(engine, str) and isinstance(request_id, str)):
        return None
    if type(port) is not int:
        return None
    return RemotePrefill(host, port, engine, request_id, cached if type(cached) is int else None)


def pushed_prefill(params: Mapping[str, object]) -> PushedPrefill | None:
    """Return where the KV of a prompt will come from with Mooncake, None if from nowhere, or if a part is missing."""
    address, engine = params.get("remote_bootstrap_addr"), params.get("remote_engine_id")
    transfer_id = params.get("transfer_id")
    if not params.get("do_remote_prefill"):
        return None
    if not (isinstance(address, str) and isinstance(engine, str) and isinstance(transfer_id, str)):
        return None
    return PushedPrefill(address, engine, transfer_id)


def handed_off(
    engine: str, request_id: str, host: str, port: int, blocks: Sequence[int], tokens: int, cached_tokens: int
) -> dict[str, object]:
    """Return the parameters of a prefill's answer, which a router passes on as they are."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [
            [block + 1 for block in blocks]
        ],  # one list per group of layers; block 0 is the null block
        "remote_engine_id": engine,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }
