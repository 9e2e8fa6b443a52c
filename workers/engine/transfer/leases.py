"""KV that a vLLM engine holds for decode engines under a lease, after `kv_connector/v1/nixl` of vLLM 0.32.

The KV of an ended prefill is held for `duration` seconds. A decode engine renews the lease while the request waits in
its scheduler, reads the blocks and notifies. Nothing checks a read that comes too late: it gets what the blocks contain
by then, which is right only as long as none of them has been reused, and it is counted.

PURE: the caller passes the time, in seconds of the emulated machine.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from workers.engine.vllm_engine import VllmEngine

REMEMBERED: Final = 10_000
"""Hand-offs whose blocks are remembered after they were released, so that late reads find what they contain."""


class Leases:
    """The hand-offs of one engine."""

    def __init__(self, engine: VllmEngine, duration: float = 30.0) -> None:
        """`duration`: seconds from the end of a prefill; a renewal is good for two thirds of it."""
        self._engine = engine
        self._duration = duration
        self._ends: dict[str, float] = {}
        self._blocks: OrderedDict[str, list[tuple[int, int]]] = OrderedDict()
        self.expired = 0
        """Hand-offs whose lease ended before they were read or released."""
        self.late = 0
        """Notifications of reads, or of releases, that came after the hand-off had ended."""
        self.failed = 0
        """Reads by this engine, of what others hold, that failed."""

    def begin(self, request_id: str, now: float) -> None:
        """Start the lease of a request that the engine holds since now."""
        self._ends[request_id] = now + self._duration
        self._blocks[request_id] = self._engine.held_blocks(request_id)
        while len(self._blocks) > REMEMBERED + len(self._ends):
            self._blocks.popitem(last=False)

    def blocks(self, request_id: str) -> list[int]:
        """Return the numbers of the blocks that were held when the lease began, empty if it never began."""
        return [block for block, _ in self._blocks.get(request_id, ())]

    def renew(self, request_ids: Iterable[str], now: float) -> None:
        """Extend leases; those that have ended stay so."""
        self.expire(now)
        for request_id in request_ids:
            if request_id in self._ends:
                self._ends[request_id] = max(self._ends[request_id], now + self._duration * 2 / 3)

    def read(self, request_id: str, now: float) -> bool:
        """Read the blocks and release them. Returns whether they still contain the KV of this request."""
        self.expire(now)
        blocks = self._blocks.get(request_id)
        right = blocks is not None and not self._engine.overwritten(blocks)
        self.release(request_id, now)
        return right

    def release(self, request_id: str, now: float) -> None:
        """Note that the decode engine is through with a hand-off, or refused its request."""
        self.expire(now)
        if self._ends.pop(request_id, None) is None:
            self.late += 1
        else:
            self._engine.release_held(request_id)

    def spoil(self, request_id: str) -> None:
        """End a lease at once, as if its blocks had been reused since."""
        if self._ends.pop(request_id, None) is not None:
            self._engine.release_held(request_id)
            self.expired += 1
            self._blocks[request_id] = [(block, version - 1) for block, version in self._blocks[request_id]]

    def expire(self, now: float) -> None:
        """Release what no decode engine has read in time."""
        for request_id in [each for each, end in self._ends.items() if end <= now]:
            del self._ends[request_id]
            self._engine.release_held(request_id)
            self.expired += 1

    @property
    def next_end(self) -> float | None:
        """The time at which a lease ends next, None if there is none."""
        return min(self._ends.values(), default=None)
