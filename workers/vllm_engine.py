"""vLLM's scheduler (v1): one token budget per step, running requests first, preemption by recomputation.

After `vllm/v1/core/sched/scheduler.py`: running requests in order take one token each, or the next chunk of their
prompt; then waiting requests in order take what is left, unless this step preempted somebody. A request that cannot be
allocated stops the queue behind it. When a running request cannot grow, the last running one is preempted: it loses all
its blocks, goes to the head of the queue and recomputes, often from its own cached blocks. Blocks become findable when
they are scheduled, generated ones too.
Left out: priorities, speculative decoding, encoder inputs, KV connectors, pipeline and asynchronous scheduling.
"""

from workers.batching import Batching, Sequence
from workers.hardware import Batch, Hardware
from workers.model import EngineConfig, Request
from workers.vllm_cache import ROOT_HASH, BlockPool, block_hash


class BlockSequence(Sequence):
    """A request with its blocks, in order, and the hashes of its full blocks."""

    __slots__ = ("blocks", "hashes", "remembered")

    def __init__(self, request: Request, seed: int, block_size: int) -> None:
        super().__init__(request, seed)
        self.blocks: list[int] = []
        self.remembered = 0  # leading blocks that the pool can find
        self.hashes: list[int] = []
        self.extend_hashes(block_size, self.prompt_length // block_size)

    def extend_hashes(self, block_size: int, full_blocks: int) -> None:
        for index in range(len(self.hashes), full_blocks):
            parent = self.hashes[-1] if index else ROOT_HASH
            self.hashes.append(block_hash(parent, self.tokens[index * block_size : (index + 1) * block_size]))


class VllmEngine(Batching[BlockSequence]):
    """An emulated vLLM engine core."""

    def __init__(self, config: EngineConfig, hardware: Hardware) -> None:
        super().__init__(config, hardware)
        self._block_size = config.block_size
        self._pool = self._new_pool()

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

    def flush_cache(self) -> None:
        if self.has_work:
            raise RuntimeError("the cache is in use")
        self._pool = self._new_pool()

    def check_integrity(self) -> None:
        assert not any(sequence.blocks for sequence in self._waiting)
        self._pool.check_integrity(sequence.blocks for sequence in self._running)
        assert len(self._sequences) == len(self._running) + len(self._waiting)
        for sequence in self._running:
            assert sequence.computed <= len(sequence.blocks) * self._block_size

    def _new_pool(self) -> BlockPool:
        return BlockPool(self.config.kv_tokens // self._block_size - 1)  # block 0 is vLLM's null block

    def _new_sequence(self, request: Request) -> BlockSequence:
        return BlockSequence(request, self.config.seed, self._block_size)

    def _schedule(self) -> tuple[Batch, list[BlockSequence]]:
        batch, sampled = Batch(), list[BlockSequence]()
        running = len(self._running)
        budget = self._schedule_running(batch, sampled)
        if len(self._running) == running:  # nobody was preempted
            self._admit_waiting(budget, batch, sampled)
        self.counters.evicted_tokens = self._pool.evicted * self._block_size
        return batch, sampled

    def _schedule_running(self, batch: Batch, sampled: list[BlockSequence]) -> int:
        budget = self.config.max_batched_tokens
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            new = min(len(sequence.tokens) - sequence.computed, budget)
            if not self._grow(sequence, new):
                break
            self._compute(sequence, new, batch, sampled)
            budget -= new
            index += 1
        return budget

    def _grow(self, sequence: BlockSequence, new: int) -> bool:
        """Make room for `new` tokens, preempting from the end; False if that took `sequence` itself."""
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
        while self._waiting and budget > 0 and len(self._running) < self.config.max_running:
            sequence = self._waiting[0]
            hits = self._hits(sequence)
            hit = len(hits) * self._block_size
            new = min(len(sequence.tokens) - hit, budget)
            blocks = self._pool.allocate(-(-(hit + new) // self._block_size) - len(hits), hits)
            if blocks is None:
                return
            self._running.append(self._waiting.popleft())
            sequence.blocks, sequence.computed, sequence.remembered = blocks, hit, len(hits)
            self._first_scheduled(sequence, hit)
            self._compute(sequence, new, batch, sampled)
            budget -= new

    def _hits(self, sequence: BlockSequence) -> list[int]:
        """Cached leading blocks; the last token is always computed, since its logits are needed."""
        return self._pool.find(sequence.hashes[: (len(sequence.tokens) - 1) // self._block_size])

    def _compute(self, sequence: BlockSequence, new: int, batch: Batch, sampled: list[BlockSequence]) -> None:
        if sequence.computed >= sequence.prompt_length and new == 1:
            batch.decodes += 1
            batch.decode_context += sequence.computed + 1
        else:
            batch.extends.append((new, sequence.computed + new))
        sequence.computed += new
        if sequence.computed // self._block_size > sequence.remembered:
            self._remember_full_blocks(sequence)
        if sequence.computed == len(sequence.tokens):
            sampled.append(sequence)

    def _remember_full_blocks(self, sequence: BlockSequence) -> None:
        full = sequence.computed // self._block_size
        sequence.extend_hashes(self._block_size, full)
        for index in range(sequence.remembered, full):
            self._pool.remember(sequence.blocks[index], sequence.hashes[index])
        sequence.remembered = full

    def _release(self, sequence: BlockSequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []

    def _peek(self, sequence: BlockSequence) -> int:
        return len(self._hits(sequence)) * self._block_size
