"""What the cache mirror keeps beside the prefix tree: caches, the requests that use them, prefill batches, and how
accurate the predictions for a worker are, compared with what its engine reports afterwards.
"""

from collections import Counter, deque
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

from router.core.cache.engine_rules import GENERIC, CacheRules
from router.core.cache.prefix_node import Holding, Node
from router.core.model.events import CacheReport
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import Request, WorkerId

ANSWERS_KEPT: Final = 200
"""Answers over which the error is averaged."""
MIN_ANSWERS: Final = 20
"""Answers needed before anything is concluded from their error, or from an engine that reports nothing."""
MAX_MEAN_ERROR: Final = 0.15
"""Mean error, as a share of the prompt, above which predictions are discounted."""


Comparison = tuple[float, int, int]
"""The error of a prediction, as a share of the prompt; the tokens predicted; the tokens found."""


@dataclass(slots=True)
class CacheTotals:
    """Sums over all answers of a worker that reported cached tokens, in tokens."""

    answers: int = 0
    prompt: int = 0
    predicted: int = 0
    actual: int = 0
    false_hit: int = 0
    """Predicted, but not cached."""
    missed_hit: int = 0
    """Cached, but not predicted."""


class Calibration:
    """Compares predictions with reports for one worker."""

    def __init__(self) -> None:
        self.totals = CacheTotals()
        self.discount = 1.0
        """The factor to apply to predictions, at most 1: less while they promise too much."""
        self._recent: deque[Comparison] = deque()
        self._error = 0.0
        self._predicted = self._actual = 0
        """This and `_actual`: sums over the recent comparisons, in tokens."""
        self._unreported = 0
        """Answers that reported nothing about the cache."""

    @property
    def error(self) -> float | None:
        """Mean absolute error of the recent comparisons, as a share of the prompt; None if there are none."""
        return max(0.0, self._error) / len(self._recent) if self._recent else None

    @property
    def suspect(self) -> bool:
        """Whether the predictions are too wrong to be used without a discount."""
        return len(self._recent) >= MIN_ANSWERS and self._error > MAX_MEAN_ERROR * len(self._recent)

    @property
    def silent(self) -> bool:
        """Whether the engine never reports what was cached."""
        return not self.totals.answers and self._unreported >= MIN_ANSWERS

    def record_unreported(self) -> None:
        """Count an answer that reported nothing about the cache."""
        self._unreported += 1

    def record(self, predicted: int, actual: int, prompt: int) -> None:
        """Record how many tokens of its prompt an answer reported as cached. `predicted` is before any discount."""
        totals = self.totals
        totals.answers += 1
        totals.prompt += prompt
        totals.predicted += predicted
        totals.actual += actual
        if predicted > actual:
            totals.false_hit += predicted - actual
        else:
            totals.missed_hit += actual - predicted
        self._add(predicted, actual, prompt)

    def record_totals(self, predicted: int, actual: int, prompt: int) -> None:
        """Record sums over several prompts, from the counters of an engine whose answers report nothing."""
        if predicted or actual:
            self._add(predicted, actual, prompt)

    def reset(self) -> None:
        """Start again, because the cache was emptied: earlier errors say nothing about its new content."""
        self._recent.clear()
        self._error, self._predicted, self._actual = 0.0, 0, 0
        self.discount = 1.0

    def _add(self, predicted: int, actual: int, prompt: int) -> None:
        # An engine's counters may rise for prompts of an earlier report: more hits than prompts are no larger error.
        error = min(1.0, abs(predicted - actual) / max(1, prompt))
        self._recent.append((error, predicted, actual))
        self._error += error
        self._predicted += predicted
        self._actual += actual
        if len(self._recent) > ANSWERS_KEPT:
            error, predicted, actual = self._recent.popleft()
            self._error -= error
            self._predicted -= predicted
            self._actual -= actual
        self.discount = min(1.0, self._actual / max(1, self._predicted)) if self.suspect else 1.0


JITTER: Final = 0.002
"""Seconds within which requests that were sent at once may reach an engine."""


class Starting(Protocol):
    """What shows whether an attempt still waits for its first token."""

    @property
    def started(self) -> bool:
        """Whether its first token was seen or guessed."""


@dataclass(slots=True, eq=False)
class PrefillingPrompt:
    """A request whose prompt is not computed yet. Positions are in chunks."""

    hashes: bytes
    found_chunks: int
    """Chunks that other requests of its batch will find of it."""
    room_chunks: int | None
    """How much of other prompts its last batch has room for; None if one batch takes all of it."""
    starts_at: float
    """When the batch it waits for is expected to be formed, in seconds; a first token may show it earlier."""
    flight: Starting | None = None
    """The attempt at the worker; None if it is not known there."""

    @property
    def is_waiting(self) -> bool:
        """Whether the attempt waits for its first token, as far as is known."""
        return self.flight is not None and not self.flight.started


class NextBatch:
    """What one worker is prefilling or is about to prefill, as far as that can be seen from outside."""

    def __init__(self) -> None:
        self.batch_chunks = 0
        """How much of a prompt goes into one batch; 0 if unknown, and then one batch takes any prompt."""
        self._computing: dict[PrefillingPrompt, None] = {}
        self._last_formed = -inf
        """When a first token last showed that a batch is over, in seconds."""

    def __len__(self) -> int:
        return len(self._computing)

    def add(self, hashes: bytes, held: int, now: float, starts_at: float) -> tuple[PrefillingPrompt, int]:
        """Add a request whose first `held` chunks are held. Returns it, and how many of these will be computed when it
        starts.

        `starts_at`: when the batch that the request waits for is expected to be formed, in seconds.
        """
        computing = self._computing
        past = [each for each in computing if each.room_chunks is None and each.starts_at + JITTER < now]
        for each in past:
            del computing[each]
        size, found = len(hashes) // HASH_BYTES, held
        for each in computing:
            if each.found_chunks < found and _shares_missing(hashes, each) and self._joins(each, size):
                found = each.found_chunks
        whole = (size - found) // self.batch_chunks * self.batch_chunks if self.batch_chunks else 0
        room = self.batch_chunks - (size - found - whole) if whole else None
        added = PrefillingPrompt(hashes, found + whole, room, starts_at)
        computing[added] = None
        return added, found

    def would_find(self, hashes: bytes) -> int | None:
        """Return how many chunks of a prompt a request sent now would find at most; None if nothing limits that.

        This goes by first tokens, and not by the expected start of a batch: that may be too early, whereas a request
        that is held back too long loses one step only.
        """
        ahead = [each for each in self._computing if each.is_waiting and _shares_missing(hashes, each)]
        return min([each.found_chunks for each in ahead], default=None)

    @staticmethod
    def _joins(other: PrefillingPrompt, size: int) -> bool:
        """Return whether a prompt of `size` chunks is computed in the same batch as the end of another's; takes room
        there.
        """
        if other.room_chunks is None:
            return True
        other.room_chunks -= size - other.found_chunks
        return other.room_chunks >= 0

    def on_first_token(self, computed: PrefillingPrompt | None, now: float) -> None:
        """Note a first token: one batch is over, and the next one takes as many of the waiting prompts as fit."""
        if computed is not None:
            self.remove(computed)
        if now <= self._last_formed + JITTER:
            return
        self._last_formed = now
        left = self.batch_chunks or inf
        for each in [each for each in self._computing if each.room_chunks is None]:
            left -= len(each.hashes) // HASH_BYTES - each.found_chunks
            if left < 0:
                break
            del self._computing[each]

    def remove(self, prompt: PrefillingPrompt) -> None:
        """Remove a request that is computed, or never will be."""
        self._computing.pop(prompt, None)


def _shares_missing(hashes: bytes, other: PrefillingPrompt) -> bool:
    """Return whether a prompt shares the first chunk that another is about to compute, and so all chunks before it."""
    start = other.found_chunks * HASH_BYTES
    chunk = other.hashes[start : start + HASH_BYTES]
    return bool(chunk) and hashes[start : start + HASH_BYTES] == chunk


HITS_KEPT: Final = 32
"""Latest hits whose age is kept; the oldest of them shows what was still cached recently."""


class PinnedRun:
    """An attempt in its worker's cache: what it pins, what was predicted, and what it holds beside its prompts."""

    __slots__ = (
        *("cache", "dispatched_at", "holding", "model", "new_chunks", "output", "own_tokens", "paths", "pins"),
        *("predicted_tokens", "prefilling", "prompt_chunks", "prompt_tokens", "prompts", "reads", "worker"),
    )

    def __init__(
        self,
        request: Request,
        worker: WorkerId,
        cache: "CacheState",
        holding: Holding,
        now: float,
        predicted: int,
        prompt_tokens: int,
        *,
        reads: bool,
    ) -> None:
        self.worker = worker
        self.cache = cache
        self.prefilling: PrefillingPrompt | None = None
        """Its place in the worker's next batches, where that matters."""
        self.model = request.model
        self.prompts = request.prompts
        self.prompt_chunks = sum([len(prompt.hashes) for prompt in request.prompts]) // HASH_BYTES
        """Chunks of all its prompts."""
        self.new_chunks = 0
        """Chunks that its prompts added to the worker's cache."""
        self.dispatched_at = now
        self.predicted_tokens = predicted
        self.prompt_tokens = prompt_tokens
        self.reads = reads
        """Whether the worker uses what is cached of its prompts; if not, its usage says nothing about the cache."""
        self.output = 0
        self.own_tokens = 0.0
        """Tokens that it holds and that the tree does not account for."""
        self.holding = holding
        """The worker's holding at dispatch; the worker has another one by now if its cache was emptied."""
        self.paths: list[list[tuple[int, float | None]]] = []
        """Per prompt, the nodes held at dispatch: up to which chunk, and when last touched; None for a pinned node."""
        self.pins: list[tuple[Node, object]] = []
        """Per prompt, the node with which it ends, and the epoch in which that was pinned."""

    def tokens_beside(self, block_tokens: int, chunk_tokens: float) -> float:
        """Return the tokens that it holds by now, in full blocks, beyond what the tree accounts for."""
        held = -(-(self.prompt_tokens + self.output) // block_tokens) * block_tokens
        return max(0.0, held - self.prompt_chunks * chunk_tokens)


DECAY: Final = 0.98
"""The weight that a past request keeps with each further one: about the last fifty count."""
PRIOR_CHUNKS: Final = 20.0
"""Chunks of the usual size that are assumed before any request."""
MAX_RATIO: Final = 2.0
"""Bound on the ratio of learned and usual size, either way: a wrong model of the cache must not distort the size."""


class Occupancy:
    """Learns how many tokens of one worker's cache a chunk of the prefix tree takes.

    That differs from the tokens of a prompt. Prompts that part within a chunk have one chunk each in the tree, whereas
    the engine keeps what they share of it once. The part of a prompt behind its last full chunk is not in the tree, and
    the part behind its last full block not in the cache. And answers have more or fewer tokens per byte than prompts.
    The engine reports what it computed of each request, and so what it stored; the tree knows by how many chunks it
    grew for that request.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._chunks = 0.0
        self._prior = PRIOR_CHUNKS
        """Chunks assumed to be of the usual size; decays like the sums."""

    def learn(self, tokens: int, chunks: int) -> None:
        """Learn from a request for which the engine stored this many tokens and the tree grew by this many chunks."""
        self._tokens = self._tokens * DECAY + max(0, tokens)
        self._chunks = self._chunks * DECAY + max(0, chunks)
        self._prior *= DECAY

    def chunk_tokens(self, usual: float) -> float:
        """Return how much of the cache a chunk takes, in tokens. `usual`: what a chunk of a prompt has on average."""
        chunks = self._chunks + self._prior
        learned = (self._tokens + self._prior * usual) / chunks if chunks else usual
        return min(MAX_RATIO * usual, max(usual / MAX_RATIO, learned))


class CacheState:
    """The state of one worker's cache, except what it holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """In tokens."""
        self.engine = ""
        """The kind of engine, as in `engine_rules`."""
        self.rules: CacheRules = GENERIC
        self.block_tokens = GENERIC.block_tokens
        self.model = ""
        """The model served last; adapters share one base."""
        self.own_tokens = 0.0
        """What the worker's running requests hold beside their prompts, in tokens."""
        self.runs: dict[PinnedRun, None] = {}
        """The attempts in flight, in order of dispatch."""
        self.batch = NextBatch()
        self.batch_tokens: int | None = None
        self.calibration = Calibration()
        self.occupancy = Occupancy()
        self.evictions: Counter[str] = Counter()
        """Tokens evicted, by the signal that revealed the eviction."""
        self.report: CacheReport | None = None
        self.evicted_ahead = 0.0
        """Tokens evicted here and not yet counted by the engine; negative if the engine counted more."""
        self.hit_ages: deque[float] = deque(maxlen=HITS_KEPT)
        """For each of the latest hits, how long before it the prefix was released, in seconds."""
        self.predicted_tokens = self.prompt_tokens = 0
        """This and `prompt_tokens`: sums over the requests dispatched since the last report, in tokens."""

    def clear(self) -> None:
        """Reset what was learned of the cache's content, because the cache is empty."""
        self.evicted_ahead = 0.0
        self.hit_ages.clear()
        self.calibration.reset()
