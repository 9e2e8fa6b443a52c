"""SGLang's scheduler: prefill before decode, one chunked request at a time, admission by reserved tokens.

After `sglang/srt/managers/scheduler.py`, `schedule_policy.py` and `schedule_batch.py`. A step is either a prefill batch
or a decode of all running requests. A prefill batch goes first whenever one can be formed: the rest of the chunked
request, then waiting requests in order until one does not fit. To fit, a request needs room for the tokens to prefill,
one page, and min(max_tokens left, 4096) more, beside what the batch has reserved and what running requests are expected
to need: the same minimum, multiplied by `new_token_ratio` for requests that may end earlier. This ratio starts at 0.7,
decays to 14 % of that over 600 decode steps and is raised by a retraction. When decoding runs out of memory, the
request with the shortest answer is retracted to the end of the queue and starts again. With pages of more than one
token, a step evicts as if every request in it needed another page. LPM order sorts the queue by matched prefix, unless
more than 128 requests wait. The KV of answers enters the tree when a request ends, that of prompts after each chunk.

A request whose KV comes from a prefill engine gets the memory of its whole prompt when it would be admitted, and counts
as running from then on; once the KV has arrived, it computes its last prompt token in the next prefill batch (a real
engine gets the first token with the KV).

Left out: in-batch prefix de-duplication of LPM, mixed prefill and decode batches, the overlap schedule (which delays
each token by a step), priorities, speculative decoding.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from workers.engine.batching import Batching, Sequence
from workers.engine.block_log import Cleared
from workers.engine.caches.radix_cache import Node, RadixCache
from workers.engine.hardware import Batch, Hardware
from workers.engine.model import EngineConfig, Request

MAX_PREFILL_TOKENS: Final = 16_384
LPM_MAX_WAITING: Final = 128
RESERVED_OUTPUT_LIMIT: Final = 4096
INITIAL_NEW_TOKEN_RATIO: Final = 0.7
MIN_NEW_TOKEN_RATIO: Final = 0.14 * INITIAL_NEW_TOKEN_RATIO
RATIO_DECAY: Final = (INITIAL_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600
RETRACT_DECODE_STEPS: Final = 20


class RadixSequence(Sequence):
    """A request with its lock in the tree: `in_tree` tokens belong to the tree, `private` tokens to the request."""

    __slots__ = ("chunk", "in_tree", "node", "private")

    def __init__(self, request: Request, seed: int) -> None:
        super().__init__(request, seed)
        self.node: Node | None = None
        self.in_tree = 0
        self.private = 0
        self.chunk = 0  # tokens that the batch being formed prefills

    @property
    def output_left(self) -> int:
        """The most tokens still expected, as far as the engine looks ahead."""
        return min(self.request.max_tokens - self.generated, RESERVED_OUTPUT_LIMIT)


@dataclass(slots=True)
class Room:
    """What is left for the prefill batch being formed: tokens to compute, and KV tokens already reserved."""

    budget: int
    reserved: float


class SglangEngine(Batching[RadixSequence]):
    """An emulated SGLang scheduler. `_running` holds the chunked request too, as its last element."""

    def __init__(self, config: EngineConfig, hardware: Hardware) -> None:
        super().__init__(config, hardware)
        self._cache = RadixCache(config.kv_tokens, config.block_size)
        self._chunked: RadixSequence | None = None
        self._full = False  # no request fits until a running one leaves
        self._ratio = INITIAL_NEW_TOKEN_RATIO

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def max_request_tokens(self) -> int:
        return self.capacity - self._cache.page - 1

    @property
    def used_tokens(self) -> int:
        return self.capacity - self._cache.reclaimable

    @property
    def cached_tokens(self) -> int:
        return self._cache.size

    @property
    def evictable_tokens(self) -> int:
        return self._cache.evictable

    @property
    def available_tokens(self) -> int:
        return self._cache.available

    def flush_cache(self) -> None:
        if self._sequences or self._held:
            raise RuntimeError("the cache is in use")
        self._cache = RadixCache(self.config.kv_tokens, self.config.block_size, self._log)
        if self._log is not None:
            self._log.add(Cleared())

    def check_integrity(self) -> None:
        self._cache.check_integrity()
        transferring = (*self._loading.values(), *self._ready)
        private = sum(s.private for s in (*self._running, *transferring, *self._held.values()))
        assert self._cache.available + self._cache.size + private == self.capacity
        assert len(self._sequences) == len(self._running) + len(self._waiting) + len(transferring)
        assert not any(sequence.private or sequence.node for sequence in self._waiting)
        for sequence in self._running:
            assert sequence.computed <= sequence.in_tree + sequence.private < sequence.computed + self._cache.page

    def _new_sequence(self, request: Request) -> RadixSequence:
        return RadixSequence(request, self.config.seed)

    def _schedule(self) -> tuple[Batch, list[RadixSequence]]:
        # A request that did not fit is tried again when the batch is empty, and while a prompt is prefilled in chunks.
        if not self._running or self._chunked:
            self._full = False
        prefill = self._form_prefill()
        batch, sampled = self._prefill(prefill) if prefill else self._decode() if self._running else (Batch(), [])
        self.counters.evicted_tokens = self._cache.evicted
        return batch, sampled

    def _form_prefill(self) -> list[RadixSequence]:
        budget = min(self.config.max_batched_tokens, MAX_PREFILL_TOKENS)
        room = Room(budget, self._expected_output())
        batch = self._admit_ready(room)
        if self._chunked is not None:
            batch.append(self._continue(self._chunked, room))
        if self._full or not self._waiting:
            return batch
        self._full = self._slots_used >= self.config.max_running
        if not self._full:
            self._sort_waiting()
            batch += self._admit(room)
        return batch

    @property
    def _slots_used(self) -> int:
        return len(self._running) + len(self._loading) + len(self._ready)

    def _admit_ready(self, room: Room) -> list[RadixSequence]:
        """Move requests whose KV has arrived to `_running`, before the chunked request."""
        admitted = list(self._ready)
        self._ready.clear()
        for sequence in admitted:
            sequence.chunk = 1
            self._take(room, sequence)
        chunked = len(self._running) - (self._chunked is not None)
        self._running[chunked:chunked] = admitted
        return admitted

    def _sort_waiting(self) -> None:
        if self.config.order == "lpm" and len(self._waiting) <= LPM_MAX_WAITING:
            self._waiting = deque(sorted(self._waiting, key=lambda sequence: -self._match(sequence)[1]))

    def _expected_output(self) -> float:
        running = (sequence for sequence in self._running if sequence is not self._chunked)
        expecting = (*running, *self._loading.values())
        return sum(s.output_left * (1.0 if s.request.ignore_eos else self._ratio) for s in expecting)

    def _continue(self, chunked: RadixSequence, room: Room) -> RadixSequence:
        """Add the next chunk of its prompt to the batch, even if no room is left: it must end to free memory."""
        left = int(self._cache.reclaimable - room.reserved)
        chunked.chunk = min(len(chunked.tokens) - chunked.computed, min(room.budget, left) if left > 0 else room.budget)
        self._take(room, chunked)
        return chunked

    def _admit(self, room: Room) -> list[RadixSequence]:
        """Move waiting requests that fit to `_running`, at most one of them with only a part of its prompt."""
        admitted: list[RadixSequence] = []
        while self._waiting and (room.budget > 0 or self._exhausted(room)):
            if self._slots_used >= self.config.max_running:
                self._full = True
                break
            sequence = self._waiting[0]
            node, hit = self._match(sequence)
            extend = len(sequence.tokens) - hit
            self._cache.lock(node)
            if extend + sequence.output_left + self._cache.page >= self._cache.reclaimable - room.reserved:
                self._cache.unlock(node)
                self._full = bool(self._running)
                break
            if sequence.pulls:
                self._allocate_prompt(sequence, node, hit)
                room.reserved += self._paged(extend) + self._cache.page
                continue
            chunk = extend if self._paged(extend) <= room.budget else room.budget - room.budget % self._cache.page
            if not chunk:
                self._cache.unlock(node)
                break
            sequence.node, sequence.in_tree, sequence.computed, sequence.chunk = node, hit, hit, chunk
            self._take(room, sequence)
            self._first_scheduled(sequence, hit)
            self._running.append(self._waiting.popleft())
            admitted.append(sequence)
            if self._exhausted(room):
                self._full = True
                break
        return admitted

    def _allocate_prompt(self, sequence: RadixSequence, node: Node, hit: int) -> None:
        """Let the head of the queue load its prompt; there is memory for it."""
        sequence.node, sequence.in_tree, sequence.computed = node, hit, hit
        self._cache.allocate(self._grow_private(sequence, len(sequence.tokens)))
        self._begin_loading(sequence, hit)

    def _release_loading(self, sequence: RadixSequence) -> None:
        self._cache.free(sequence.private)
        self._unlock(sequence)
        self._full = False

    def _store_loaded(self, sequence: RadixSequence, damage: int) -> None:
        """Do nothing: the cache gets the prompt with its last token."""

    def _take(self, room: Room, sequence: RadixSequence) -> None:
        """Subtract what the batch being formed needs for this request."""
        paged = self._paged(sequence.chunk)
        room.budget -= paged
        room.reserved += paged + self._cache.page
        if sequence.computed + sequence.chunk == len(sequence.tokens):
            room.reserved += min(sequence.request.max_tokens, RESERVED_OUTPUT_LIMIT)

    def _exhausted(self, room: Room) -> bool:
        return self._cache.reclaimable <= room.reserved

    def _match(self, sequence: RadixSequence) -> tuple[Node, int]:
        """Match all tokens but the last, which is always computed because its logits are needed."""
        return self._cache.match(sequence.tokens, len(sequence.tokens) - 1)

    def _prefill(self, sequences: list[RadixSequence]) -> tuple[Batch, list[RadixSequence]]:
        batch = Batch()
        self._make_room(sum(sequence.chunk for sequence in sequences), len(sequences))
        for sequence in sequences:
            self._cache.allocate(self._grow_private(sequence, sequence.computed + sequence.chunk))
            sequence.computed += sequence.chunk
            batch.extends.append((sequence.chunk, sequence.computed))
        for sequence in sequences:
            self._give_to_tree(sequence)
        sampled = [sequence for sequence in sequences if sequence.computed == len(sequence.tokens)]
        self._chunked = sequences[-1] if sequences[-1].computed < len(sequences[-1].tokens) else None
        return batch, sampled

    def _grow_private(self, sequence: RadixSequence, computed: int) -> int:
        """Raise the private share to hold `computed` tokens in whole pages. Returns the tokens to allocate for it."""
        grown = self._paged(computed) - sequence.in_tree - sequence.private
        sequence.private += grown
        return grown

    def _give_to_tree(self, sequence: RadixSequence) -> None:
        """Insert the whole pages computed so far and lock the node at their end; duplicates go back to the pool."""
        node, present = self._cache.insert(sequence.tokens, sequence.computed)
        length = sequence.computed - sequence.computed % self._cache.page
        self._cache.free(present - sequence.in_tree)
        sequence.private -= length - sequence.in_tree
        self._cache.lock(node)
        if sequence.node:
            self._cache.unlock(sequence.node)
        sequence.node, sequence.in_tree = node, length

    def _decode(self) -> tuple[Batch, list[RadixSequence]]:
        missing = self._missing_pages()
        if missing * self._cache.page > self._cache.reclaimable:
            missing = self._retract(missing)
        else:
            self._ratio = max(self._ratio - RATIO_DECAY, MIN_NEW_TOKEN_RATIO)
        self._make_room(0, len(self._running))
        self._cache.allocate(missing * self._cache.page)
        context = 0
        for sequence in self._running:
            if sequence.computed == sequence.in_tree + sequence.private:
                sequence.private += self._cache.page
            sequence.computed += 1
            context += sequence.computed
        return Batch(decodes=len(self._running), decode_context=context), list(self._running)

    def _make_room(self, tokens: int, requests: int) -> None:
        """Evict what a step may need: if a page has several tokens, another page per request, needed or not."""
        self._cache.make_room(tokens + (requests * self._cache.page if self._cache.page > 1 else 0))

    def _missing_pages(self) -> int:
        """Return the pages that the next token of every running request needs."""
        return sum(sequence.computed == sequence.in_tree + sequence.private for sequence in self._running)

    def _retract(self, missing: int) -> int:
        """Requeue requests, shortest answer first, until the rest can decode. Returns the pages the rest needs."""
        self._running.sort(key=lambda sequence: (sequence.generated, -sequence.prompt_length), reverse=True)
        while missing * self._cache.page > self._cache.reclaimable:
            victim = self._running.pop()
            missing -= victim.computed == victim.in_tree + victim.private
            self._cache.free(victim.private)
            self._unlock(victim)
            victim.computed = 0
            self._waiting.append(victim)
            self.counters.preempted_requests += 1
            self.counters.preempted_input_tokens += victim.prompt_length
            self.counters.preempted_output_tokens += victim.generated
        decoded = sum(sequence.generated for sequence in self._running) + RETRACT_DECODE_STEPS * len(self._running)
        wanted = sum(sequence.request.max_tokens for sequence in self._running) + 1
        self._ratio = min(decoded / wanted, 1.0)
        self._full = False
        return missing

    def _only_decodes(self) -> bool:
        return self._chunked is None and (self._full or not self._waiting)

    def _possible_decode_steps(self, steps: int) -> int:
        reclaimable = self._cache.reclaimable
        for step, missing in enumerate(self._missing_of_each(steps)):
            reclaimable -= missing * self._cache.page
            if reclaimable < 0:
                return step
        return steps

    def _missing_of_each(self, steps: int) -> Iterator[int]:
        """Return `_missing_pages` of each of the next decode steps."""
        page = self._cache.page
        room = Counter((s.in_tree + s.private - s.computed) % page for s in self._running)
        return (room[step % page] for step in range(steps))

    def _allocate_for_decodes(self, steps: int) -> None:
        for _ in range(steps):
            self._ratio = max(self._ratio - RATIO_DECAY, MIN_NEW_TOKEN_RATIO)
        # `step` evicts before each step. The last one evicts the most: what the steps before it took, and its own.
        *before, _ = self._missing_of_each(steps)
        self._make_room(sum(before) * self._cache.page, len(self._running))
        for sequence in self._running:
            self._cache.allocate(self._grow_private(sequence, sequence.computed + steps))
        self.counters.evicted_tokens = self._cache.evicted

    def _cache_decoded(self) -> None:
        """Do nothing: the cache gets answers when they are complete."""

    def _release(self, sequence: RadixSequence) -> None:
        self._give_to_tree(sequence)
        self._cache.free(sequence.private)
        self._unlock(sequence)
        self._full = False
        if sequence is self._chunked:
            self._chunked = None
        if not self._sequences:
            self._ratio = INITIAL_NEW_TOKEN_RATIO

    def _unlock(self, sequence: RadixSequence) -> None:
        assert sequence.node is not None
        self._cache.unlock(sequence.node)
        sequence.node, sequence.in_tree, sequence.private = None, 0, 0

    def _peek(self, sequence: RadixSequence) -> int:
        return self._cache.peek(sequence.tokens, len(sequence.tokens) - 1)

    def _paged(self, tokens: int) -> int:
        return -(-tokens // self._cache.page) * self._cache.page
