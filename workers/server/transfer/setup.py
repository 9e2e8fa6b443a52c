"""I/O: the connector that a worker's settings ask for."""

from collections.abc import Sequence
from typing import Final

from workers.engine.sglang_engine import SglangEngine
from workers.engine.vllm_engine import VllmEngine
from workers.server.clock import EmulatedClock
from workers.server.loop import EngineLoop
from workers.server.transfer.bootstrap import BootstrapConnector
from workers.server.transfer.exchange import HttpExchange
from workers.server.transfer.mooncake import MooncakeConnector
from workers.server.transfer.nixl import NixlConnector, SideChannel
from workers.server.transfer.pulls import TransferTimes
from workers.settings import WorkerSettings

SGLANG_TIMEOUT: Final = 300.0
MOONCAKE_TIMEOUT: Final = 480.0
"""Seconds: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT."""


def bootstrap_connector(
    engines: Sequence[SglangEngine], loop: EngineLoop, settings: WorkerSettings
) -> BootstrapConnector:
    """Return the connector of an SGLang worker."""
    return BootstrapConnector(
        engines,
        loop,
        EmulatedClock(settings.speed),
        HttpExchange(),
        prefills=settings.role == "prefill",
        times=TransferTimes(*settings.transfer_seconds()),
        patience=SGLANG_TIMEOUT if settings.transfer_timeout is None else settings.transfer_timeout,
    )


def vllm_connector(
    engines: Sequence[VllmEngine], loop: EngineLoop, settings: WorkerSettings, side_port: int
) -> NixlConnector | MooncakeConnector:
    """Return the connector of a vLLM worker."""
    if settings.kv_connector == "nixl":
        return nixl_connector(engines, loop, settings, side_port)
    return MooncakeConnector(
        engines,
        loop,
        EmulatedClock(settings.speed),
        HttpExchange(),
        f"http://{settings.host}:{side_port}",
        times=TransferTimes(*settings.transfer_seconds()),
        patience=MOONCAKE_TIMEOUT if settings.transfer_timeout is None else settings.transfer_timeout,
        recompute=settings.kv_load_failure_policy == "recompute",
    )


def nixl_connector(
    engines: Sequence[VllmEngine], loop: EngineLoop, settings: WorkerSettings, side_port: int
) -> NixlConnector:
    """Return the connector of a vLLM worker with NIXL."""
    return NixlConnector(
        engines,
        loop,
        EmulatedClock(settings.speed),
        HttpExchange(),
        SideChannel(settings.host, side_port),
        lease=settings.kv_lease,
        times=TransferTimes(*settings.transfer_seconds()),
        recompute=settings.kv_load_failure_policy == "recompute",
    )
