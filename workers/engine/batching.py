"""What the continuous batching of both engines shares: the life of a request and the frame of a step.

PURE: no clock, no I/O, no global random. Time is only what `step` returns. A request is owned by `waiting` or by
`running` from `submit` until the step that emits its last token, or until `abort`. Then its KV is released (cached
blocks may stay cached) and the request is forgotten.

Prefill and decode on different engines: a request that hands off is held after its end, with its KV, until
`release_held`. One that pulls is `loading` from the step that allocates its memory until `loaded`, `recompute` or
`abort`; then it is ready to be admitted. What carries the KV from one engine to the other is the caller's.
"""

from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

from workers.engine.block_log import BlockLog
from workers.engine.hardware import Batch, Hardware
from workers.engine.model import Counters, EngineConfig, FinishReason, Output, QueueFull, Request, RequestTooLarge
from workers.engine.sampling import answer_length, initial_state, next_token, walk
from workers.engine.tokenizer import EOS


class Sequence:
    """A request in the engine: its tokens so far, and how many of them have their KV computed."""

    __slots__ = (
        *("_length", "cached_tokens", "computed", "ended", "prompt_length", "pulls", "request", "state", "tokens"),
    )

    def __init__(self, request: Request, seed: int) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.prompt_length = len(self.tokens)
        self.computed = 0
        self.cached_tokens: int | None = None  # None until first scheduled
        self.state = initial_state(seed, self.tokens, request.sample)
        self.ended = False
        self.pulls = request.pulls  # until the KV of its prompt has arrived
        self._length: int | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def tokens_left(self) -> int:
        """The number of tokens still to generate, the last included. The first read searches for the answer's end."""
        if self._length is None:
            request, generated = self.request, self.generated
            self._length = generated + answer_length(self.state, request.ignore_eos, request.max_tokens - generated)
        return self._length + self.prompt_length - len(self.tokens)

    def suffer(self, damage: int) -> None:
        """Go on to other tokens, if some of the KV is wrong: `damage` is not 0 then."""
        if damage:
            self.state = initial_state(damage, self.tokens, self.request.sample)

    def append_next(self, steps: int) -> list[int]:
        """Append the next `steps` tokens, none of which is the last."""
        tokens, self.state = walk(self.state, self.request.ignore_eos, steps)
        self.tokens += tokens
        self.computed += steps
        return tokens


S = TypeVar("S", bound=Sequence)


class Batching(ABC, Generic[S]):
    """An engine without its scheduler and cache, which `VllmEngine` and `SglangEngine` add."""

    def __init__(self, config: EngineConfig, hardware: Hardware) -> None:
        self.config = config
        self.hardware = hardware
        self.counters = Counters()
        self.last_step_prefilled = False
        self.last_step_context = 0
        """Tokens of context that the last `step` read; `jump` does not set it."""
        self._sequences: dict[str, S] = {}
        self._waiting: deque[S] = deque()
        self._running: list[S] = []
        self._loading: dict[str, S] = {}
        self._ready: deque[S] = deque()  # loaded, to be admitted before those that wait
        self._held: dict[str, S] = {}
        self._newly_loading: list[str] = []
        self._newly_held: list[str] = []
        self._stalled = False
        self._log: BlockLog | None = None

    def log_blocks(self) -> BlockLog:
        """Start to log what the cache stores and drops. Raises RuntimeError after the first request."""
        if self.counters.submitted_requests:
            raise RuntimeError("the cache has been used")
        self._log = BlockLog()
        self.flush_cache()
        self._log.take()
        return self._log

    def submit(self, request: Request) -> None:
        """Queue `request`.

        Raises ValueError if the prompt is empty, max_tokens is below 1, or the id is in use; RequestTooLarge if the
        request could never fit into the KV pool; QueueFull if `max_queued` requests are waiting.
        """
        if not request.prompt or request.max_tokens < 1 or request.id in self._sequences:
            raise ValueError("a request needs a prompt, max_tokens of at least 1 and an id of its own")
        if len(request.prompt) + request.max_tokens > self.max_request_tokens:
            raise RequestTooLarge(f"prompt and answer may hold {self.max_request_tokens} tokens together")
        if self.config.max_queued is not None and len(self._waiting) >= self.config.max_queued:
            raise QueueFull("The request queue is full.")
        sequence = self._new_sequence(request)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)
        self.counters.submitted_requests += 1

    def abort(self, request_id: str) -> bool:
        """Remove a request at once and release its KV. Returns False if the engine does not hold it (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        sequence.ended = True
        self._drop(sequence)
        self.counters.aborted_requests += 1
        return True

    def step(self) -> tuple[float, list[Output]]:
        """Run one engine step. Returns the seconds it takes and the tokens that exist at its end.

        Returns (0.0, []) if nothing is waiting or running, or if what waits finds no memory and nothing runs.
        """
        if not self.has_work:
            return 0.0, []
        before, preempted = len(self._sequences), self.counters.preempted_requests
        batch, sampled = self._schedule()
        self._stalled = not batch.new_tokens and self.counters.preempted_requests == preempted
        if not batch.new_tokens:
            return 0.0, []
        elapsed = self.hardware.step_seconds(batch)
        self._count_step(batch, elapsed)
        outputs = [self._emit(sequence) for sequence in sampled]
        self.counters.generation_tokens += len(outputs)
        if len(self._sequences) < before:
            self._remove_ended(sampled)
        return elapsed, outputs

    def lookahead(self, limit: int) -> list[float]:
        """Return the seconds of each of the next steps, at most `limit`, that only decode all running requests.

        No request is admitted, preempted or finished in these steps. Empty if the next step is of another kind, or may
        be. Changes nothing; `submit` and `abort` invalidate the result.
        """
        if not self._running or self._ready or not self._only_decodes():
            return []
        steps = min(limit, min([sequence.tokens_left for sequence in self._running]) - 1)
        if steps < 1:
            return []
        steps = self._possible_decode_steps(steps)
        size = len(self._running)
        context = self.running_context
        batches = (Batch(decodes=size, decode_context=context + size * step) for step in range(1, steps + 1))
        return [self.hardware.step_seconds(batch) for batch in batches]

    def jump(self, steps: int) -> list[tuple[str, list[int]]]:
        """Run the first `steps` of the steps that `lookahead` returned, as if `step` were called that many times.

        Returns the id of each running request and the tokens it gained.
        """
        self._allocate_for_decodes(steps)
        gained = [(sequence.request.id, sequence.append_next(steps)) for sequence in self._running]
        self._cache_decoded()
        self.counters.steps += steps
        self.counters.generation_tokens += steps * len(gained)
        self.last_step_prefilled = False
        return gained

    def take_allocated(self) -> list[str]:
        """Return the requests that pull and have got their memory since the last call: their KV may come now."""
        taken, self._newly_loading = self._newly_loading, []
        return taken

    def tokens_to_pull(self, request_id: str) -> int:
        """Return how many tokens of a loading request are not in this engine's own cache; 0 if it is not loading."""
        sequence = self._loading.get(request_id)
        return 0 if sequence is None else sequence.prompt_length - sequence.computed

    def loaded(self, request_id: str, cached_tokens: int | None = None, damage: int = 0) -> bool:
        """Note that the KV of a prompt has arrived: the request can be admitted, and computes its last token itself.

        `cached_tokens`: the prefix hit that its outputs report, None for that of this engine. `damage`: 0 if the KV is
        that of the prompt; any other number leads to an answer of other tokens. vLLM caches wrong KV like any other, so
        that later requests with this prefix get such answers, too. Returns False if the request is not loading (any
        more).
        """
        sequence = self._loading.pop(request_id, None)
        if sequence is None:
            return False
        self.counters.external_hits += sequence.prompt_length - sequence.computed
        sequence.pulls = False
        if cached_tokens is not None:
            sequence.cached_tokens = cached_tokens
        self._store_loaded(sequence, damage)
        sequence.suffer(damage)
        sequence.computed = sequence.prompt_length - 1
        self._ready.append(sequence)
        return True

    def recompute(self, request_id: str) -> bool:
        """Note that the KV of a prompt will not come: the request computes all of it, first in the queue."""
        sequence = self._loading.pop(request_id, None)
        if sequence is None:
            return False
        self._release_loading(sequence)
        sequence.pulls, sequence.computed = False, 0
        self._waiting.appendleft(sequence)
        return True

    def take_held(self) -> list[str]:
        """Return the requests that hand off and have ended since the last call: their KV is held."""
        taken, self._newly_held = self._newly_held, []
        return taken

    def release_held(self, request_id: str) -> bool:
        """Release the KV that is held for a decode engine. Returns False if it is not held (any more)."""
        sequence = self._held.pop(request_id, None)
        if sequence is None:
            return False
        self._release(sequence)
        return True

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs; those whose KV is still to come do neither."""
        return len(self._sequences) > len(self._loading)

    @property
    def stalled(self) -> bool:
        """True if the last step computed nothing, because what waits finds no memory or waits for KV."""
        return self._stalled

    @property
    def loading(self) -> int:
        """The number of requests whose KV is to come from a prefill engine: they hold memory, and compute nothing."""
        return len(self._loading)

    @property
    def loaded_waiting(self) -> int:
        """The number of requests whose KV has come from a prefill engine, and that have not been admitted yet."""
        return len(self._ready)

    @property
    def held(self) -> int:
        """The number of ended requests whose KV is held for a decode engine."""
        return len(self._held)

    @property
    def running(self) -> int:
        """The number of requests that hold KV, those in the middle of their prefill included."""
        return len(self._running)

    @property
    def running_context(self) -> int:
        """The tokens that the running requests have computed, cached ones included."""
        return sum([sequence.computed for sequence in self._running])

    @property
    def running_ids(self) -> list[str]:
        return [sequence.request.id for sequence in self._running]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_uncached_tokens(self) -> int:
        """Return the tokens to compute if all waiting requests were scheduled now. O(waiting tokens)."""
        return sum(len(sequence.tokens) - self._peek(sequence) for sequence in self._waiting)

    def cached_prefix_tokens(self, prompt: tuple[int, ...]) -> int:
        """Return how many tokens of `prompt` are cached, without touching the cache."""
        return self._peek(self._new_sequence(Request("", prompt, 1)))

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Usable KV tokens."""

    @property
    @abstractmethod
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request may hold."""

    @property
    @abstractmethod
    def used_tokens(self) -> int:
        """KV tokens held by running requests."""

    @property
    @abstractmethod
    def cached_tokens(self) -> int:
        """Tokens whose KV a new request could hit, in use or not."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is accounted for exactly once. O(cache)."""

    @abstractmethod
    def flush_cache(self) -> None:
        """Drop all cached KV. Raises RuntimeError while there is work."""

    @abstractmethod
    def _new_sequence(self, request: Request) -> S: ...

    @abstractmethod
    def _schedule(self) -> tuple[Batch, list[S]]:
        """Choose one step's work and account for it. Returns the batch and the sequences that gain a token."""

    @abstractmethod
    def _only_decodes(self) -> bool:
        """True if the next step, given enough memory, would decode all running requests and admit none."""

    @abstractmethod
    def _possible_decode_steps(self, steps: int) -> int:
        """Return how many of `steps` decode steps find memory and admit nobody. Requires `_only_decodes`."""

    @abstractmethod
    def _allocate_for_decodes(self, steps: int) -> None:
        """Allocate what all running requests need for `steps` decode steps."""

    @abstractmethod
    def _cache_decoded(self) -> None:
        """Add to the cache what decode steps have completed."""

    @abstractmethod
    def _release(self, sequence: S) -> None:
        """Release the KV of a sequence that has ended."""

    @abstractmethod
    def _release_loading(self, sequence: S) -> None:
        """Release the memory of a sequence that is loading or ready."""

    @abstractmethod
    def _store_loaded(self, sequence: S, damage: int) -> None:
        """Account for the KV of a prompt that has arrived, right (0) or wrong."""

    @abstractmethod
    def _peek(self, sequence: S) -> int:
        """Return how many tokens of `sequence` are cached, without touching the cache."""

    def _drop(self, sequence: S) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)
        elif self._loading.pop(sequence.request.id, None) is not None:
            self._release_loading(sequence)
        elif sequence in self._ready:
            self._ready.remove(sequence)
            self._release_loading(sequence)
        else:
            self._waiting.remove(sequence)

    def _first_scheduled(self, sequence: S, hit: int) -> None:
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hit
            self.counters.prefix_queries += sequence.prompt_length
            self.counters.prefix_hits += hit

    def _count_step(self, batch: Batch, elapsed: float) -> None:
        self.counters.steps += 1
        self.last_step_prefilled = bool(batch.extends)
        self.last_step_context = batch.context
        if batch.extends:
            self.counters.prefill_steps += 1
            self.counters.prefilled_tokens += sum(new for new, _ in batch.extends)
            self.counters.prefill_seconds += elapsed

    def _emit(self, sequence: S) -> Output:
        request = sequence.request
        token, sequence.state = next_token(sequence.state, request.ignore_eos)
        sequence.tokens.append(token)
        generated = len(sequence.tokens) - sequence.prompt_length
        if generated == 1:
            self.counters.prompt_tokens += sequence.prompt_length
        finish: FinishReason | None = None
        if token == EOS:
            finish = "stop"
        elif generated >= request.max_tokens:
            finish = "length"
        if finish:
            self._finish(sequence, finish)
        return Output(request.id, token, finish, sequence.cached_tokens or 0)

    def _finish(self, sequence: S, reason: FinishReason) -> None:
        sequence.ended = True
        del self._sequences[sequence.request.id]
        self.counters.finished_requests[reason] += 1
        self.counters.finished_prompt_tokens += sequence.prompt_length
        self.counters.finished_generation_tokens += sequence.generated

    def _remove_ended(self, sampled: list[S]) -> None:
        self._running = [sequence for sequence in self._running if not sequence.ended]
        for sequence in sampled:
            if sequence.ended and sequence.request.hands_off:
                self._held[sequence.request.id] = sequence
                self._newly_held.append(sequence.request.id)
            elif sequence.ended:
                self._release(sequence)

    def _begin_loading(self, sequence: S, hit: int) -> None:
        """Take the head of the queue out of it; its memory is allocated."""
        self._waiting.popleft()
        self._loading[sequence.request.id] = sequence
        self._newly_loading.append(sequence.request.id)
        self._first_scheduled(sequence, hit)
