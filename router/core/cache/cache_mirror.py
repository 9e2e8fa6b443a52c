"""What each worker's prefix cache must hold by now: the engine's own bookkeeping, replayed from outside.

Theory of operation. A request that is dispatched has its prompt in the cache, pinned until it ends, and room for its
answer is taken while that grows; both evict, at once, what was released longest ago. When it ends, prompt and answer
are released, the end first. So the tree's list of a worker is the engine's free list, and its length is bounded by the
capacity that the engine tells, less what running requests hold beside their prompts. What the engine says later puts
right what was wrong:

- `cached_tokens` of an answer, against what was predicted when it was dispatched. Where less was there, all that goes
  on from the missing part is gone; and if nothing that old was found lately, so is everything released before it,
  since caches evict in that order. Where a prediction fails on something young, its text was never cached like that.
- A count of evicted tokens is brought in line with the evictions replayed; an age at which blocks are evicted ends
  everything older; a counter that fell, or began anew, and an engine asleep mean an empty cache.

Chunks are priced by the model's learned tokens per byte. An answer that cannot be matched later (its request failed, or
its text is not what the engine would be sent again) still fills the cache: it is kept under hashes that nothing has.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count
from math import inf
from typing import Final

from router.core.cache.cache_model import CacheState, PinnedRun
from router.core.cache.engine_rules import Tracking, blocks_for, computes_anew, rules_of, whole_blocks
from router.core.cache.prefix_node import Node
from router.core.cache.prefix_tree import PrefixTree
from router.core.model.events import CacheReport
from router.core.model.prompt_key import HASH_BYTES, PromptKey
from router.core.model.request import Request, RequestId, Usage, Worker, WorkerId
from router.core.predict.token_estimates import Estimates


class CacheMirror:
    """The caches of all workers, in the prefix tree."""

    def __init__(self, tree: PrefixTree, estimates: Estimates, capacity: int, tracking: Tracking) -> None:
        """`capacity`: tokens believed of a worker that does not tell its own."""
        self._tree = tree
        self._tracking = tracking
        self._estimates = estimates
        self._caches: defaultdict[WorkerId, CacheState] = defaultdict(lambda: CacheState(capacity))
        self.caches: Final[Mapping[WorkerId, CacheState]] = self._caches
        """Every worker heard of; one that is looked up is."""
        self._runs: dict[RequestId, PinnedRun] = {}
        self._strangers = count(1 << 63)
        self.uncached: set[WorkerId] = set()
        """Workers that keep no prefix cache; a match there is worth nothing."""
        self.changes = 0
        """Rises with whatever may change what a match in the tree is worth."""

    def cache(self, worker: WorkerId) -> CacheState:
        """One worker's."""
        return self._caches[worker]

    def update_worker(self, worker: Worker) -> None:
        """A worker is there, or its facts are new."""
        self.changes += 1
        state = self._caches[worker.id]
        state.engine, state.rules = worker.engine, rules_of(worker.engine)
        self._set_caching(worker.id, caches=worker.caches)
        state.batch_tokens = worker.batch_tokens
        if state.report is None or state.report.block_tokens is None:
            state.block_tokens = state.rules.block_tokens
        if worker.kv_tokens is not None:
            state.capacity = worker.kv_tokens

    def reads_cache(self, request: Request, worker: WorkerId) -> bool:
        """Whether a worker would use what its prefix cache holds of a request's prompts."""
        if worker in self.uncached:
            return False
        state = self._caches.get(worker)
        return not computes_anew("" if state is None else state.engine, request.computed_anew_by)

    def _set_caching(self, worker: WorkerId, *, caches: bool) -> None:
        """Note whether a worker keeps a prefix cache at all."""
        if caches:
            self.uncached.discard(worker)
        else:
            self.uncached.add(worker)

    def held_tokens(self, worker: WorkerId) -> float:
        """Tokens believed cached."""
        return 0.0 if worker in self.uncached else self._tree.held_chunks(worker) * self.chunk_tokens(worker)

    def chunk_tokens(self, worker: WorkerId) -> float:
        """What a chunk takes of a worker's cache, in tokens."""
        state = self._caches[worker]
        return state.occupancy.chunk_tokens(self._estimates.tokens_per_chunk(state.model))

    def whole_block_tokens(self, tokens: int, worker: WorkerId) -> int:
        """What the engine finds of so many tokens: full blocks."""
        return whole_blocks(tokens, self._caches[worker].block_tokens)

    def discounted(self, worker: WorkerId, tokens: int) -> int:
        """What a match is to be taken for, while matches there prove to be wrong."""
        share = self._caches[worker].calibration.discount
        return tokens if share == 1.0 or not self._tracking.corrects else int(tokens * share)

    def dispatch(
        self, request: Request, worker: WorkerId, now: float, matched: int, prompt_tokens: int, turn: float
    ) -> int:
        """A request goes to a worker that holds `matched` of its `prompt_tokens`; returns what will be found of them.

        `turn`: when the worker is expected to begin with it. Where the worker does not read its cache for this request,
        `matched` is 0; the prompt is in the cache all the same from then on, for those that come after it. (vLLM keeps
        what it computed anew beside what it had, until either is evicted; here that is held once.)
        """
        state = self._caches[worker]
        state.model = request.model
        reads = self.reads_cache(request, worker)
        predicted = matched
        if self._tells_computed(request, state):
            predicted = self._computed_by_then(request, worker, now, matched, turn)
        if reads:
            state.predicted_tokens += predicted
            state.prompt_tokens += prompt_tokens
        holding = self._tree.holding(worker)
        run = self._runs[request.id] = PinnedRun(request, worker, holding, now, predicted, prompt_tokens, reads=reads)
        replays = self._tracking.replays
        whole = replays and state.rules.whole_nodes
        before = self._tree.held_chunks(worker)
        for prompt in run.prompts:
            run.paths.append(self._tree.touches(prompt.hashes, worker))
            epoch = holding.epoch  # as it was before: this may void all pins, its own among them
            run.pins.append((self._tree.insert(prompt.hashes, worker, now, pin=replays, seal=whole), epoch))
        run.new_chunks = self._tree.held_chunks(worker) - before
        self._grow(run, state)
        self._keep_within(worker, state)
        return predicted

    def findable(self, request: Request, worker: WorkerId, matched: int, waiting: Container[RequestId]) -> int:
        """How many of these tokens, which a worker holds, a request would find there if it was sent now.

        `waiting`: the requests that wait at the worker for their first token, as far as is known.
        """
        state = self._caches.get(worker)
        if not matched or state is None or not self._tells_computed(request, state) or not state.batch:
            return matched
        (prompt,) = request.prompts
        found = state.batch.would_find(prompt.hashes, waiting)
        if found is None:
            return matched
        return min(matched, self.whole_block_tokens(self._estimates.measure(request.model, prompt).held(found), worker))

    def _tells_computed(self, request: Request, state: CacheState) -> bool:
        """Whether what is being computed is told from what is computed."""
        return state.rules.found_when_computed and self._tracking.replays and len(request.prompts) == 1

    def on_first_token(self, request: RequestId, now: float) -> None:
        """Its first token is there."""
        self._caches[self._runs[request].worker].batch.on_first_token(request, now)

    def set_output(self, request: RequestId, output: int) -> None:
        """A request has so many output tokens by now."""
        run = self._runs.get(request)
        if run is not None and output > run.output:
            state = self._caches[run.worker]
            run.output = output
            if self._grow(run, state):
                self._keep_within(run.worker, state)

    def end(
        self, request: RequestId, usage: Usage | None, answers: Sequence[PromptKey], now: float, *, computed: bool
    ) -> None:
        """A request is over; `computed`: at least in part, and not turned away."""
        run = self._runs.pop(request)
        state = self._caches[run.worker]
        state.batch.remove(request)
        state.own_tokens -= run.own_tokens
        here = self._tree.holding(run.worker) is run.holding
        if usage is not None and run.reads:
            self._compare(run, state, usage, here=here)
        for place, prompt in enumerate(run.prompts if here else ()):
            if self._tracking.replays:
                end, epoch = run.pins[place]
                self._tree.unpin(end, run.worker, now, epoch)
            if not computed:
                path = run.paths[place]
                held = path[-1][0] if path else 0
                self._tree.prune(prompt.hashes, run.worker, held, inf)
                self._hand_down(run.worker, prompt.hashes, held)
        if computed and here:
            before = self._tree.held_chunks(run.worker)
            self._keep_answers(run, usage, answers, now)
            if usage is not None and usage.cached_tokens is not None and run.reads and self._tracking.corrects:
                stored = whole_blocks(usage.input_tokens + usage.output_tokens - 1, state.block_tokens) - usage.cached_tokens
                state.occupancy.learn(stored, run.new_chunks + self._tree.held_chunks(run.worker) - before)
        self._keep_within(run.worker, state)

    def apply_report(self, worker: WorkerId, report: CacheReport, now: float) -> None:
        """The engine's metrics say this."""
        self.changes += 1
        state = self._caches[worker]
        before, state.report = state.report, report
        if report.block_tokens:
            state.block_tokens = report.block_tokens
        if report.caches is not None:
            self._set_caching(worker, caches=report.caches)
        if report.asleep or (before is not None and report.began_anew(before)):
            state.evictions["restart"] += round(self.held_tokens(worker))
            self.drop(worker)
        elif before is not None and self._tracking.corrects:
            self._take_counts(worker, state, before, now)
        state.predicted_tokens = state.prompt_tokens = 0

    def set_capacity(self, worker: WorkerId, capacity: int) -> None:
        """The engine said how much its cache can hold, in tokens."""
        state = self._caches[worker]
        if capacity != state.capacity:
            state.capacity = capacity
            self._keep_within(worker, state)

    def evict(self, worker: WorkerId, tokens: int, source: str = "told") -> None:
        """Forget this many tokens of a worker, released longest ago first."""
        chunk = self.chunk_tokens(worker)
        taken = self._tree.evict(worker, round(tokens / chunk), whole=self._caches[worker].rules.whole_nodes)
        self._caches[worker].evictions[source] += round(taken * chunk)

    def drop(self, worker: WorkerId) -> None:
        """A worker's cache is empty."""
        self.changes += 1
        self._tree.drop(worker)
        if worker in self._caches:
            self._caches[worker].clear()

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone, and nothing runs there."""
        self._tree.drop(worker)
        self._caches.pop(worker, None)
        self.uncached.discard(worker)

    def _computed_by_then(self, request: Request, worker: WorkerId, now: float, matched: int, turn: float) -> int:
        """What of a match does not stand at the worker's door like the request itself."""
        state = self._caches[worker]
        (prompt,) = request.prompts
        held = self._tree.match(prompt.hashes).get(worker, 0)
        state.batch.batch_chunks = int((state.batch_tokens or 0) / self._estimates.tokens_per_chunk(request.model))
        found = state.batch.add(request.id, prompt.hashes, held, now, turn)
        if found == held:
            return matched
        return min(matched, self.whole_block_tokens(self._estimates.measure(request.model, prompt).held(found), worker))

    def _grow(self, run: PinnedRun, state: CacheState) -> bool:
        """Account for what a request holds beside what the tree knows; whether that is more than before."""
        if not self._tracking.replays:
            return False
        held = blocks_for(run.prompt_tokens + run.output, state.block_tokens)
        own = max(0.0, held - run.prompt_chunks * self._estimates.tokens_per_chunk(run.model))
        more = own > run.own_tokens
        state.own_tokens += own - run.own_tokens
        run.own_tokens = own
        return more

    def _keep_within(self, worker: WorkerId, state: CacheState) -> None:
        """Evict what exceeds the worker's capacity."""
        if not self._tracking.evicts:
            return
        chunk = self.chunk_tokens(worker)
        held, room = self._tree.held_chunks(worker), (state.capacity - state.own_tokens) / chunk
        if held and held > room:
            whole = self._tracking.replays and state.rules.whole_nodes
            taken = self._tree.evict(worker, held - max(0, int(room)), whole=whole) * chunk
            state.evictions["replayed"] += round(taken)
            state.evicted_ahead += taken

    def _hand_down(self, worker: WorkerId, hashes: bytes, held: int) -> None:
        """What a refused request brought, all that is beyond its first `held` chunks, counts from now on as brought by
        one of those that found it there: the first that shares the most of it, which may be refused as well.
        """
        at = held * HASH_BYTES
        brought = Node(hashes[at:])
        heir: list[tuple[int, float | None]] = []
        most = 0
        for run in self._runs.values():
            for path, prompt in zip(run.paths, run.prompts, strict=True) if run.worker == worker else ():
                if path and path[-1][0] > held and prompt.hashes.startswith(brought.first, at):
                    shared = brought.shared(prompt.hashes, at)
                    if shared > most:
                        heir, most = path, shared
        while heir and heir[-1][0] > held:
            _, released = heir.pop()
            if held > (heir[-1][0] if heir else 0):
                heir.append((held, released))

    def _keep_answers(self, run: PinnedRun, usage: Usage | None, answers: Sequence[PromptKey], now: float) -> None:
        for answer in answers:
            self._tree.insert(answer.hashes, run.worker, now)
        if not answers and run.prompts:
            output = run.output if usage is None else usage.output_tokens
            chunks = round(output / self._estimates.tokens_per_chunk(run.model))
            names = b"".join([next(self._strangers).to_bytes(HASH_BYTES, "big") for _ in range(chunks)])
            if names:
                self._tree.insert(run.prompts[0].hashes + names, run.worker, now)

    def _compare(self, run: PinnedRun, state: CacheState, usage: Usage, *, here: bool) -> None:
        """Set what the engine found beside what was predicted."""
        if usage.cached_tokens is None:
            state.calibration.record_unreported()
            return
        actual = min(usage.cached_tokens, usage.input_tokens)
        state.calibration.record(run.predicted_tokens, actual, usage.input_tokens)
        if here and self._tracking.corrects and len(run.prompts) == 1:
            chunk = self._estimates.tokens_per_chunk(run.model)
            if run.paths[0]:
                self._estimates.on_cache_hit(run.model, run.prompts[0], run.paths[0][-1][0], actual)
            if run.predicted_tokens - actual > chunk + state.block_tokens:
                self._correct(run, state, int(actual / chunk) + 1)
            elif run.paths[0] and (released := run.paths[0][-1][1]) is not None:
                state.hit_ages.append(run.dispatched_at - released)

    def _correct(self, run: PinnedRun, state: CacheState, found: int) -> None:
        """Of a prompt only so many chunks were there: what else is gone?"""
        missing = next((released for end, released in run.paths[0] if end > found), None)
        if missing is None:  # it was pinned: in the middle of being computed
            return
        taken = self._tree.prune(run.prompts[0].hashes, run.worker, found, run.dispatched_at)
        if run.dispatched_at - missing > max(state.hit_ages, default=0.0):
            taken += self._tree.evict_older(run.worker, missing)
        state.evictions["corrected"] += round(taken * self.chunk_tokens(run.worker))

    def _take_counts(self, worker: WorkerId, state: CacheState, before: CacheReport, now: float) -> None:
        """Counters that rose since the report before."""
        report = state.report
        assert report is not None, "there was a report just now"
        evicted = _rise(before, report, lambda each: each.evicted_tokens)
        if evicted is not None:
            state.evicted_ahead -= evicted
            if state.evicted_ahead < 0:
                held = self.held_tokens(worker)
                self.evict(worker, round(-state.evicted_ahead), "counted")
                state.evicted_ahead += held - self.held_tokens(worker)
        seconds = _rise(before, report, lambda each: each.idle_seconds)
        blocks = _rise(before, report, lambda each: each.idle_blocks)
        if seconds is not None and blocks:
            # vLLM counts blocks that were never cached as well, which are young: what was found that old is no lie.
            taken = self._tree.evict_older(worker, now - max(seconds / blocks, *state.hit_ages, 0.0))
            state.evictions["aged"] += round(taken * self.chunk_tokens(worker))
        hits = _rise(before, report, lambda each: each.hit_tokens)
        if state.calibration.silent and hits is not None:
            state.calibration.record_totals(state.predicted_tokens, round(hits), state.prompt_tokens)


def _rise(before: CacheReport, after: CacheReport, of: Callable[[CacheReport], float | None]) -> float | None:
    """How far a counter rose; None where either report lacks it."""
    old, new = of(before), of(after)
    return None if old is None or new is None else new - old
