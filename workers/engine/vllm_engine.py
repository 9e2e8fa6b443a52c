"""vLLM's scheduler (v1): one token budget per step, running requests first, preemption by recomputation.

After `vllm/v1/core/sched/scheduler.py`: running requests in order take one token each, or the next chunk of their
prompt; then waiting requests in order take the rest of the budget, unless this step preempted a request. A waiting
request is admitted if there is room for all its tokens, although it gets blocks only for those that the step computes;
one that does not fit blocks the queue behind it. When a running request cannot grow, the last running one is preempted:
it loses all its blocks, goes to the head of the queue and recomputes, often from its own cached blocks. Blocks become
findable when they are scheduled, generated ones included.

A request whose KV comes from a prefill engine gets the blocks of its whole prompt, beside what is cached here, and
waits outside the queue (WAITING_FOR_REMOTE_KVS); once the KV has arrived, it is admitted before the others and computes
its last prompt token.

Left out: priorities, speculative decoding, encoder inputs, pipeline and asynchronous scheduling.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from workers.engine.batching import Batching, Sequence
from workers.engine.block_log import ROOT_HASH, Cleared, Stored, chained_hashes
from workers.engine.caches.block_pool import BlockPool
from workers.engine.hardware import Batch, Hardware
from workers.engine.model import EngineConfig, Request


class BlockSequence(Sequence):
    """A request with its blocks, in order, and the hashes of its full blocks."""

    __slots__ = ("blocks", "hashes", "remembered")

    def __init__(self, request: Request, seed: int, block_size: int) -> None:
        super().__init__(request, seed)
        self.blocks: list[int] = []
        self.remembered = 0  # leading blocks registered in the pool
        self.hashes: list[int] = []
        self.extend_hashes(block_size, self.prompt_length // block_size)

    def extend_hashes(self, block_size: int, full_blocks: int) -> None:
        new = self.tokens[len(self.hashes) * block_size : full_blocks * block_size]
        self.hashes += chained_hashes(self.hashes[-1] if self.hashes else ROOT_HASH, new, block_size)


class VllmEngine(Batching[BlockSequence]):
    """An emulated vLLM engine core."""

    def __init__(self, config: EngineConfig, hardware: Hardware) -> None:
        super().__init__(config, hardware)
        self._block_size = config.block_size
        self._pool = self._new_pool()
        self._damaged: dict[int, tuple[int, int]] = {}  # block: the version with wrong KV, and how it is wrong

    @property
    def capacity(self) -> int:
        return self._pool.size * self._block_size

    @property
    def max_request_tokens(self) -> int:
        return self.capacity

    @property
    def used_tokens(self) -> int:
        return (self._pool.size - self._pool.free) * self._block_size

    @property
    def cached_tokens(self) -> int:
        return self._pool.cached * self._block_size

    def held_blocks(self, request_id: str) -> list[tuple[int, int]]:
        """Return the blocks held for a decode engine, each with its version, which changes when it is reused."""
        blocks = self._held[request_id].blocks
        return list(zip(blocks, self._pool.versions(blocks), strict=True))

    def overwritten(self, blocks: Iterable[tuple[int, int]]) -> bool:
        """True if one of these blocks, with their versions, has been reused since."""
        each = list(blocks)
        return self._pool.versions(block for block, _ in each) != [version for _, version in each]

    def flush_cache(self) -> None:
        if self._sequences or self._held:
            raise RuntimeError("the cache is in use")
        self._pool = self._new_pool()
        self._damaged.clear()
        if self._log is not None:
            self._log.add(Cleared())

    def check_integrity(self) -> None:
        assert not any(sequence.blocks for sequence in self._waiting)
        transferring = (*self._loading.values(), *self._ready)
        self._pool.check_integrity(s.blocks for s in (*self._running, *transferring, *self._held.values()))
        assert len(self._sequences) == len(self._running) + len(self._waiting) + len(transferring)
        for sequence in self._running:
            assert sequence.computed <= len(sequence.blocks) * self._block_size
        for sequence in self._sequences.values():
            assert self._peek(sequence) == len(self._hits(sequence)) * self._block_size

    def _new_pool(self) -> BlockPool:
        return BlockPool(self.config.kv_tokens // self._block_size - 1, self._log)  # block 0 is vLLM's null block

    def _new_sequence(self, request: Request) -> BlockSequence:
        return BlockSequence(request, self.config.seed, self._block_size)

    def _schedule(self) -> tuple[Batch, list[BlockSequence]]:
        batch, sampled = Batch(), list[BlockSequence]()
        running = len(self._running)
        budget = self._schedule_running(batch, sampled)
        if len(self._running) == running:  # no request was preempted
            self._admit_waiting(budget, batch, sampled)
        self.counters.evicted_tokens = self._pool.evicted * self._block_size
        return batch, sampled

    def _schedule_running(self, batch: Batch, sampled: list[BlockSequence]) -> int:
        budget, size = self.config.max_batched_tokens, self._block_size
        for sequence in self._running:  # preemption removes from its end
            if not budget:
                break
            new = min(len(sequence.tokens) - sequence.computed, budget)
            if sequence.computed + new > len(sequence.blocks) * size and not self._grow(sequence, new):
                break
            self._compute(sequence, new, batch, sampled)
            budget -= new
        return budget

    def _grow(self, sequence: BlockSequence, new: int) -> bool:
        """Make room for `new` tokens, preempting from the end. Returns False if this preempted `sequence` itself."""
        missing = -(-(sequence.computed + new) // self._block_size) - len(sequence.blocks)
        if missing <= 0:
            return True
        while (blocks := self._pool.allocate(missing)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += blocks
        return True

    def _preempt(self, sequence: BlockSequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        self._waiting.appendleft(sequence)
        self.counters.preempted_requests += 1
        self.counters.preempted_input_tokens += sequence.prompt_length
        self.counters.preempted_output_tokens += sequence.generated

    def _admit_waiting(self, budget: int, batch: Batch, sampled: list[BlockSequence]) -> None:
        while self._ready and budget > 0 and len(self._running) < self.config.max_running:
            self._running.append(self._ready[0])
            self._compute(self._ready.popleft(), 1, batch, sampled)
            budget -= 1
        while self._waiting and budget > 0 and len(self._running) < self.config.max_running:
            sequence = self._waiting[0]
            hits = self._hits(sequence)
            if sequence.pulls:
                if not self._allocate_prompt(sequence, hits):
                    return
                continue
            blocks = self._allocate_part(sequence, hits, budget) if self._fits(sequence, hits) else None
            if blocks is None:
                return
            hit = len(hits) * self._block_size
            new = min(len(sequence.tokens) - hit, budget)
            self._running.append(self._waiting.popleft())
            sequence.blocks, sequence.computed, sequence.remembered = blocks, hit, len(hits)
            self._first_scheduled(sequence, hit)
            sequence.suffer(self._damage(hits))
            self._compute(sequence, new, batch, sampled)
            budget -= new

    def _damage(self, blocks: list[int]) -> int:
        """Return what is wrong with the KV in these blocks, 0 if nothing is."""
        if not self._damaged:
            return 0
        known = [self._damaged.get(block, (0, 0)) for block in blocks]
        versions = self._pool.versions(blocks)
        return next((damage for (at, damage), now in zip(known, versions, strict=True) if damage and at == now), 0)

    def _allocate_prompt(self, sequence: BlockSequence, hits: list[int]) -> bool:
        """Let the head of the queue load its prompt, if there is memory for it."""
        blocks = self._pool.allocate(-(-sequence.prompt_length // self._block_size) - len(hits), hits)
        if blocks is None:
            return False
        sequence.blocks, sequence.remembered = blocks, len(hits)
        sequence.suffer(self._damage(hits))
        sequence.computed = len(hits) * self._block_size
        self._begin_loading(sequence, sequence.computed)
        return True

    def _fits(self, sequence: BlockSequence, hits: list[int]) -> bool:
        """True if there is memory for all tokens of a waiting request that are not cached."""
        blocks = -(-len(sequence.tokens) // self._block_size)
        return self._pool.can_allocate(blocks - len(hits), hits)

    def _allocate_part(self, sequence: BlockSequence, hits: list[int], budget: int) -> list[int] | None:
        """Allocate blocks for the part of a waiting request that the budget allows, beside its cached ones."""
        end = min(len(sequence.tokens), len(hits) * self._block_size + budget)
        return self._pool.allocate(-(-end // self._block_size) - len(hits), hits)

    def _hits(self, sequence: BlockSequence) -> list[int]:
        """Return the cached leading blocks."""
        return self._pool.find(sequence.hashes[: self._hittable(sequence)])

    def _hittable(self, sequence: BlockSequence) -> int:
        """Return the most blocks it could hit; the last token is always computed because its logits are needed."""
        return min(len(sequence.hashes), (len(sequence.tokens) - 1) // self._block_size)

    def _compute(self, sequence: BlockSequence, new: int, batch: Batch, sampled: list[BlockSequence]) -> None:
        computed = sequence.computed = sequence.computed + new
        if new == 1 and computed > sequence.prompt_length:
            batch.decodes += 1
            batch.decode_context += computed
        else:
            batch.extends.append((new, computed))
        if computed // self._block_size > sequence.remembered:
            self._remember_full_blocks(sequence)
        if computed == len(sequence.tokens):
            sampled.append(sequence)

    def _remember_full_blocks(self, sequence: BlockSequence) -> None:
        full = sequence.computed // self._block_size
        sequence.extend_hashes(self._block_size, full)
        before = sequence.remembered
        for index in range(before, full):
            self._pool.remember(sequence.blocks[index], sequence.hashes[index])
        if self._log is not None:
            parent = sequence.hashes[before - 1] if before else None
            tokens = sequence.tokens[before * self._block_size : full * self._block_size]
            self._log.add(Stored(sequence.hashes[before:full], parent, tokens))
        sequence.remembered = full

    def _only_decodes(self) -> bool:
        # Only the last running request can be in its prefill: it took the rest of a step's budget, so none followed it.
        last = self._running[-1]
        if last.computed < last.prompt_length or last.computed + 1 < len(last.tokens):
            return False
        if len(self._running) > self.config.max_batched_tokens:
            return False
        return self._cannot_admit or self._head_blocked()

    @property
    def _cannot_admit(self) -> bool:
        """True if no request would be admitted even with unlimited memory."""
        return not self._waiting or len(self._running) >= min(self.config.max_running, self.config.max_batched_tokens)

    def _head_blocked(self) -> bool:
        """True if there is no memory for the head of the queue."""
        return not self._fits(self._waiting[0], self._hits(self._waiting[0]))

    def _possible_decode_steps(self, steps: int) -> int:
        # Evictions cannot make a blocked request fit: a prefix loses its tail first, one block for each that is taken.
        if not self._cannot_admit and self._may_complete(self._waiting[0], steps):
            return 0
        usable = self._pool.free
        for step, growing in enumerate(self._growing(steps)):
            usable -= len(growing)
            if usable < 0:
                return step
        return steps

    def _may_complete(self, waiting: BlockSequence, steps: int) -> bool:
        """True if a running request may, within `steps`, complete the first block that `waiting` misses."""
        hittable = self._hittable(waiting)
        block = self._pool.count_found(waiting.hashes, hittable)
        if block == hittable:
            return False
        for sequence in self._running:
            current, last = sequence.computed // self._block_size, (sequence.computed + steps) // self._block_size
            if current < block < last or (
                current == block < last and sequence.hashes[:block] == waiting.hashes[:block]
            ):
                return True
        return False

    def _growing(self, steps: int) -> Iterator[list[BlockSequence]]:
        """Return, for each of the next decode steps, the sequences that need another block, in order."""
        by_phase = defaultdict[int, list[BlockSequence]](list)
        for sequence in self._running:
            by_phase[sequence.computed % self._block_size].append(sequence)
        return (by_phase[-step % self._block_size] for step in range(steps))

    def _allocate_for_decodes(self, steps: int) -> None:
        for growing in self._growing(steps):
            blocks = self._pool.allocate(len(growing))
            assert blocks is not None
            for sequence, block in zip(growing, blocks, strict=True):
                sequence.blocks.append(block)
        self.counters.evicted_tokens = self._pool.evicted * self._block_size

    def _cache_decoded(self) -> None:
        # Of two equal blocks, requests hit the one remembered first. Requests that fill equal blocks have equal
        # prompts, and of those the first in the list is never behind.
        for sequence in self._running:
            if sequence.computed // self._block_size > sequence.remembered:
                self._remember_full_blocks(sequence)

    def _release(self, sequence: BlockSequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []

    def _release_loading(self, sequence: BlockSequence) -> None:
        self._release(sequence)

    def _store_loaded(self, sequence: BlockSequence, damage: int) -> None:
        if damage:
            pulled = sequence.blocks[sequence.remembered :]
            versions = self._pool.versions(pulled)
            self._damaged |= {block: (version, damage) for block, version in zip(pulled, versions, strict=True)}
        sequence.computed = sequence.prompt_length
        if sequence.computed // self._block_size > sequence.remembered:
            self._remember_full_blocks(sequence)

    def _peek(self, sequence: BlockSequence) -> int:
        return self._pool.count_found(sequence.hashes, self._hittable(sequence)) * self._block_size
