"""Prompts that prefill workers keep for this front, until a decode worker fetches them or they are released.

A prefill worker frees a prompt when its lease is over, and vLLM then answers a late read with status 200 and wrong
text. So each front measures the age of a prompt itself, whatever it took until the scheduler's answer arrived.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from router.api.body.call import COMPLETIONS
from router.api.handoff.nixl import release_body
from router.core.model.request import RequestId, Role, WorkerId
from router.errors import RouterError
from router.upstream.connections import WorkerConnections
from router.upstream.http_client import IdleTimeouts

RELEASE_SECONDS: Final = 2.0
"""How long a decode worker may take to refuse a call, or to give a sign of life; and how long after `handoff_seconds` a
release is still sent, as the lease is 5 s longer at least."""
MAX_RELEASES: Final = 256
"""Releases under way at most. What is not released is freed by the lease."""


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """A prompt that a prefill worker keeps."""

    worker: WorkerId
    params: bytes
    """Where it is, as JSON, for the decode worker."""
    since: float
    """When the prefill worker's answer arrived, in seconds on the front's clock."""


class PromptReleases:
    """Releases prompts that no decode worker will fetch. A help only: what is not released is freed by its lease."""

    def __init__(self, connections: WorkerConnections, seconds: float) -> None:
        """`seconds`: the greatest age of a prompt that a decode worker may be sent to fetch."""
        self._connections = connections
        self.seconds: Final = seconds
        self._tasks: set[asyncio.Task[None]] = set()

    def is_fresh(self, held: HeldPrompt, now: float) -> bool:
        """Return whether a prompt is young enough to be fetched."""
        return now - held.since <= self.seconds

    def release(self, held: HeldPrompt, model: str, now: float, failed: WorkerId | None = None) -> None:
        """Release a prompt in the background, unless its lease may be over. `failed`: a decode worker, perhaps dead."""
        worker = self._decode_worker(model, failed)
        if worker is None or len(self._tasks) >= MAX_RELEASES or now - held.since > self.seconds + RELEASE_SECONDS:
            return
        task = asyncio.get_running_loop().create_task(self._send(worker, held.params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def is_alive(self, worker: WorkerId, path: str = "/health") -> bool:
        """Return whether a worker gives a sign of life within `RELEASE_SECONDS`: an answer at this path."""
        timeouts = IdleTimeouts(RELEASE_SECONDS, RELEASE_SECONDS)
        try:
            upstream = await self._connections.by_id[worker].forward(
                path, b"", RequestId("d2lpm-alive"), timeouts, method="GET"
            )
        except (RouterError, KeyError):  # KeyError: it has left meanwhile
            return False
        upstream.close()
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the releases under way, which take a few seconds at most."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _decode_worker(self, model: str, failed: WorkerId | None) -> WorkerId | None:
        cards = [worker.card for worker in self._connections.by_id.values()]
        able = [card.id for card in cards if card.role is Role.DECODE and card.healthy and model in card.models]
        return min(able, key=lambda worker: worker == failed, default=None)

    async def _send(self, worker: WorkerId, params: bytes) -> None:
        timeouts = IdleTimeouts(RELEASE_SECONDS, RELEASE_SECONDS)
        with suppress(RouterError, KeyError):  # KeyError: the worker has left meanwhile
            upstream = await self._connections.by_id[worker].forward(
                COMPLETIONS, release_body(params), RequestId("d2lpm-release"), timeouts
            )
            try:
                await upstream.read_beginning(2**16, lambda _: True)
            finally:
                upstream.close()
