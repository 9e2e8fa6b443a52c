"""What the cache mirror keeps besides the prefix tree: caches, the requests that use them, and shared batches."""

from collections import Counter, deque
from collections.abc import Container
from dataclasses import dataclass
from math import inf
from typing import Final

from router.core.cache.calibration import Calibration
from router.core.cache.engine_rules import GENERIC, CacheRules
from router.core.cache.occupancy import Occupancy
from router.core.cache.prefix_node import Holding, Node
from router.core.model.events import CacheReport
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import Request, RequestId, WorkerId

JITTER: Final = 0.002
"""Seconds by which calls that were sent at once may reach an engine one after the other."""


@dataclass(slots=True)
class PrefillingPrompt:
    """A request whose prompt is not computed yet; places in chunks."""

    hashes: bytes
    found_chunks: int
    """What others of its batch will find of it."""
    room_chunks: int | None
    """How much of other prompts its last batch takes; None where one batch takes all of it."""
    starts_at: float
    """When the batch is formed that it waits for, if no first token tells so before; in seconds."""


class NextBatch:
    """What one worker computes or is about to, as far as can be seen from outside."""

    def __init__(self) -> None:
        self.batch_chunks = 0
        """How much of a prompt goes into one batch; 0 where that is not known, and taken for enough."""
        self._computing: dict[RequestId, PrefillingPrompt] = {}
        self._formed = -inf
        """When a first token showed last that a batch is over, in seconds."""

    def __len__(self) -> int:
        return len(self._computing)

    def add(self, request: RequestId, hashes: bytes, held: int, now: float, formed: float) -> int:
        """A request is sent, of whose chunks so many are held; returns how many of these are computed by its turn.

        `formed`: when the batch will be formed that it waits for, in seconds.
        """
        computing = self._computing
        past = [each for each, other in computing.items() if other.room_chunks is None and other.starts_at + JITTER < now]
        for other in past:
            del computing[other]
        size, found = len(hashes) // HASH_BYTES, held
        for each in computing.values():
            if each.found_chunks < found and _alike(hashes, each) and self._joins(each, size):
                found = each.found_chunks
        whole = (size - found) // self.batch_chunks * self.batch_chunks if self.batch_chunks else 0
        room = self.batch_chunks - (size - found - whole) if whole else None
        computing[request] = PrefillingPrompt(hashes, found + whole, room, formed)
        return found

    def would_find(self, hashes: bytes, waiting: Container[RequestId]) -> int | None:
        """How many chunks of a prompt a request that is sent now would find at most; None where nothing limits that.

        By first tokens, and by `waiting`, the requests that wait for one: when a batch ought to be formed may be too
        early, and who is held back too long loses one step.
        """
        ahead = [each for each, other in self._computing.items() if _alike(hashes, other) and each in waiting]
        return min([self._computing[each].found_chunks for each in ahead], default=None)

    @staticmethod
    def _joins(other: PrefillingPrompt, size: int) -> bool:
        """Whether a prompt of so many chunks is computed in the same batch as another's end; then room is taken."""
        if other.room_chunks is None:
            return True
        other.room_chunks -= size - other.found_chunks
        return other.room_chunks >= 0

    def on_first_token(self, request: RequestId, now: float) -> None:
        """A first token is there: a batch is over, and of what waits as much as a batch takes is in the next one."""
        self.remove(request)
        if now <= self._formed + JITTER:
            return
        self._formed = now
        left = self.batch_chunks or inf
        for each in [each for each, other in self._computing.items() if other.room_chunks is None]:
            left -= len(self._computing[each].hashes) // HASH_BYTES - self._computing[each].found_chunks
            if left < 0:
                break
            del self._computing[each]

    def remove(self, request: RequestId) -> None:
        """It is computed, or never will be."""
        self._computing.pop(request, None)


def _alike(hashes: bytes, other: PrefillingPrompt) -> bool:
    """Whether a prompt begins with the first chunk that another is to compute, and so with all before it."""
    start = other.found_chunks * HASH_BYTES
    chunk = other.hashes[start : start + HASH_BYTES]
    return bool(chunk) and hashes[start : start + HASH_BYTES] == chunk


HITS_KEPT: Final = 32
"""The oldest of so many hits says what was still cached lately."""


class PinnedRun:
    """A request at a worker: what it pins there, what was predicted, and what it holds beside its prompts."""

    __slots__ = (
        *("dispatched_at", "holding", "model", "new_chunks", "output", "own_tokens", "paths", "pins"),
        *("predicted_tokens", "prompt_chunks", "prompt_tokens", "prompts", "reads", "worker"),
    )

    def __init__(
        self,
        request: Request,
        worker: WorkerId,
        holding: Holding,
        now: float,
        predicted: int,
        prompt_tokens: int,
        *,
        reads: bool,
    ) -> None:
        self.worker = worker
        self.model = request.model
        self.prompts = request.prompts
        self.prompt_chunks = sum([len(prompt.hashes) for prompt in request.prompts]) // HASH_BYTES
        """Of all its prompts."""
        self.new_chunks = 0
        """Chunks that its prompts brought."""
        self.dispatched_at = now
        self.predicted_tokens = predicted
        self.prompt_tokens = prompt_tokens
        self.reads = reads
        """Whether what is cached of its prompts is used; if not, its answer says nothing about what is cached."""
        self.output = 0
        self.own_tokens = 0.0
        """Tokens that it holds and that the tree does not know."""
        self.holding = holding
        """Of the worker, another one by now if its cache was emptied."""
        self.paths: list[list[tuple[int, float | None]]] = []
        """Of each prompt what was held at dispatch: up to which chunk, and when touched; None where it was pinned."""
        self.pins: list[tuple[Node, object]] = []
        """Of each prompt the node that it ends with, and the epoch in which that was pinned."""


class CacheState:
    """One worker's cache, but for what it holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """In tokens."""
        self.engine = ""
        """Its kind, as `cache_rules` knows it."""
        self.rules: CacheRules = GENERIC
        self.block_tokens = GENERIC.block_tokens
        self.model = ""
        """That was served last; adapters are of one base."""
        self.own_tokens = 0.0
        """What its running requests hold beside their prompts, in tokens."""
        self.batch = NextBatch()
        self.batch_tokens: int | None = None
        self.calibration = Calibration()
        self.occupancy = Occupancy()
        self.evictions: Counter[str] = Counter()
        """Tokens, by what made them believed gone."""
        self.report: CacheReport | None = None
        self.evicted_ahead = 0.0
        """Tokens evicted here and not yet counted by the engine; below zero, the other way round."""
        self.hit_ages: deque[float] = deque(maxlen=HITS_KEPT)
        """Of the latest hits: how long before it was found had it been released, in seconds."""
        self.predicted_tokens = self.prompt_tokens = 0
        """Tokens, summed over the requests dispatched since the last report."""

    def clear(self) -> None:
        """Nothing is cached any more."""
        self.evicted_ahead = 0.0
        self.hit_ages.clear()
        self.calibration.reset()
