"""What the mirror keeps beside the prefix tree: of each worker's cache, and of each request that is at a worker."""

from collections import Counter, deque
from typing import Final

from router.core.cache.calibration import Calibration
from router.core.cache.engine_rules import GENERIC, CacheRules
from router.core.cache.occupancy import Occupancy
from router.core.cache.prefix_node import Holding, Node
from router.core.cache.same_batch import NextBatch
from router.core.model.events import CacheReport
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import Request, WorkerId

HITS_REMEMBERED: Final = 32
"""The oldest of so many hits says what was still cached lately."""


class Run:
    """A request at a worker: what it pins there, what was predicted, and what it holds beside its prompts."""

    __slots__ = (
        *("chunks", "gained", "holding", "model", "output", "own", "paths", "pins", "predicted", "prompt_tokens"),
        *("prompts", "reads", "since", "worker"),
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
        self.chunks = sum([len(prompt.hashes) for prompt in request.prompts]) // HASH_BYTES
        """Of all its prompts."""
        self.gained = 0
        """Chunks that its prompts brought."""
        self.since = now
        self.predicted = predicted
        self.prompt_tokens = prompt_tokens
        self.reads = reads
        """Whether what is cached of its prompts is used; if not, its answer says nothing about what is cached."""
        self.output = 0
        self.own = 0.0
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
        self.block = GENERIC.block_tokens
        self.model = ""
        """That was served last; adapters are of one base."""
        self.own = 0.0
        """What its running requests hold beside their prompts, in tokens."""
        self.batch = NextBatch()
        self.batch_tokens: int | None = None
        self.calibration = Calibration()
        self.occupancy = Occupancy()
        self.evictions: Counter[str] = Counter()
        """Tokens, by what made them believed gone."""
        self.report: CacheReport | None = None
        self.ahead = 0.0
        """Tokens evicted here and not yet counted by the engine; below zero, the other way round."""
        self.ages: deque[float] = deque(maxlen=HITS_REMEMBERED)
        """Of the latest hits: how long before it was found had it been released, in seconds."""
        self.predicted = self.prompts = 0
        """Tokens, summed over the requests dispatched since the last report."""

    def empty(self) -> None:
        """Nothing is cached any more."""
        self.ahead = 0.0
        self.ages.clear()
        self.calibration.begin_anew()
