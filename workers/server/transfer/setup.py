"""I/O: the connector that a worker's settings ask for."""

from collections.abc import Sequence

from workers.engine.vllm_engine import VllmEngine
from workers.server.clock import EmulatedClock
from workers.server.loop import EngineLoop
from workers.server.transfer.exchange import HttpExchange
from workers.server.transfer.nixl import NixlConnector, SideChannel, TransferTimes
from workers.settings import WorkerSettings


def nixl_connector(
    engines: Sequence[VllmEngine], loop: EngineLoop, settings: WorkerSettings, side_port: int
) -> NixlConnector:
    """Return the connector of a vLLM worker."""
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
