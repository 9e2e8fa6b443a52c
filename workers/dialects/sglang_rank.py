"""What the scheduler of one SGLang rank reports about itself, in the metrics and in /v1/loads."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from workers.dialects.exposition import Exposition
from workers.engine.block_log import refreshes_after_step
from workers.engine.sglang_engine import SglangEngine
from workers.settings import WorkerSettings

IDLE_LOG_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """One reading of the scheduler; throughput and hit rate cover the time since the previous reading."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    available_tokens: int = 0
    evictable_tokens: int = 0
    hit_rate: float = 0.0
    throughput: float = 0.0  # generated tokens per real second


class SglangRank:
    """The readings of one engine: of a server's only one, or of one of its data-parallel ranks."""

    def __init__(
        self, settings: WorkerSettings, engine: SglangEngine, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        self.engine = engine
        self._role = settings.role
        self._shows_capacity = not settings.hide_capacity
        self._max_model_len = max_model_len
        self._clock = clock
        self._time_factor = 1 / settings.speed if settings.speed else 0.0
        self._gauges = Gauges(available_tokens=engine.available_tokens)
        self._steps = 0
        self._read_at = clock()
        self._read_counts = (0, 0, 0)  # generated, hit and queried tokens at the last reading

    def after_step(self) -> None:
        """Refresh the gauges if SGLang does so after this step: not after a dummy step, which its scheduler skips."""
        if self.engine.counters.steps > self._steps and refreshes_after_step(self.engine):
            self._refresh()
        self._steps = self.engine.counters.steps

    def add_metrics(self, exposition: Exposition) -> None:
        """Add the scheduler's series, refreshed if it has been idle for long."""
        if not self.engine.has_work and self._clock() - self._read_at > IDLE_LOG_SECONDS * self._time_factor:
            self._refresh()
        self._add_gauges(exposition)
        self._add_counters(exposition)

    def load(self, rank: int) -> dict[str, object]:
        """Return the entry of this rank in /v1/loads."""
        engine, counts = self.engine, self.engine.counters
        waiting = engine.waiting_uncached_tokens()
        load: dict[str, object] = {
            "timestamp": time.time(),
            "dp_rank": rank,
            "num_running_reqs": engine.running,
            "num_waiting_reqs": engine.waiting,
            "num_waiting_uncached_tokens": waiting,
            "num_used_tokens": engine.used_tokens,
            "num_total_tokens": engine.used_tokens + waiting,
            "num_active_tokens": engine.used_tokens,
            "utilization": engine.running / engine.config.max_running,
            "gen_throughput": self._gauges.throughput,
            "cache_hit_rate": self._gauges.hit_rate,
            "total_prefill_uncached_tokens": counts.prefilled_tokens,
            "total_prefill_busy_us": int(counts.prefill_seconds * self._time_factor * 1e6),
        }
        if self._shows_capacity:
            load["max_total_num_tokens"] = engine.capacity
            load["max_running_requests"] = engine.config.max_running
            load["token_usage"] = engine.used_tokens / engine.capacity
        return load

    def _add_gauges(self, exposition: Exposition) -> None:
        gauges, config = self._gauges, self.engine.config
        exposition.gauge("num_running_reqs", gauges.running)
        exposition.gauge("num_queue_reqs", gauges.waiting)
        exposition.gauge("num_used_tokens", gauges.used_tokens)
        exposition.gauge("kv_used_tokens", gauges.used_tokens)
        exposition.gauge("kv_evictable_tokens", gauges.evictable_tokens)
        exposition.gauge("cache_hit_rate", gauges.hit_rate)
        exposition.gauge("gen_throughput", gauges.throughput)
        exposition.gauge("page_size", config.block_size)
        exposition.gauge("context_len", self._max_model_len)
        exposition.gauge("num_retracted_reqs", 0)
        exposition.gauge("num_paused_reqs", 0)
        if self._role == "prefill":
            exposition.gauge("num_prefill_inflight_queue_reqs", self.engine.held)
        elif self._role == "decode":
            exposition.gauge("num_decode_prealloc_queue_reqs", self.engine.waiting)
            exposition.gauge("num_decode_transfer_queue_reqs", self.engine.loading)
        if self._shows_capacity:
            exposition.gauge("token_usage", gauges.used_tokens / self.engine.capacity)
            exposition.gauge("utilization", gauges.running / config.max_running)
            exposition.gauge("kv_available_tokens", gauges.available_tokens)
            exposition.gauge("max_total_num_tokens", self.engine.capacity)
            exposition.gauge("num_pages", self.engine.capacity // config.block_size)

    def _add_counters(self, exposition: Exposition) -> None:
        counts = self.engine.counters
        counted(exposition, "evicted_tokens_total", counts.evicted_tokens)
        exposition.counter("realtime_tokens_total", counts.prefilled_tokens, mode="prefill_compute")
        exposition.counter("realtime_tokens_total", counts.prefix_hits, mode="prefill_cache")
        exposition.counter("realtime_tokens_total", counts.generation_tokens, mode="decode")
        counted(exposition, "num_retracted_input_tokens_total", counts.preempted_input_tokens)
        counted(exposition, "num_retracted_output_tokens_total", counts.preempted_output_tokens)

    def _refresh(self) -> None:
        engine, counts, now = self.engine, self.engine.counters, self._clock()
        read = (counts.generation_tokens, counts.prefix_hits, counts.prefix_queries)
        generated, hits, queries = (new - old for new, old in zip(read, self._read_counts, strict=True))
        self._gauges = Gauges(
            running=engine.running,
            waiting=engine.waiting,
            used_tokens=engine.used_tokens,
            available_tokens=engine.available_tokens,
            evictable_tokens=engine.evictable_tokens,
            hit_rate=hits / queries if queries else 0.0,
            throughput=generated / (now - self._read_at) if now > self._read_at else 0.0,
        )
        self._read_at, self._read_counts = now, read


def counted(exposition: Exposition, name: str, value: float, **labels: str) -> None:
    """Add a counter if it is not zero: SGLang does not expose a counter before its first count."""
    if value:
        exposition.counter(name, value, **labels)
