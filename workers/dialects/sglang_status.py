"""What an SGLang server reports about itself: health, server info, loads, tokens and metrics.

As in SGLang, the gauges of /metrics are refreshed only by a prefill batch, by every 40th decode step and, when idle, 30
s after the last refresh; counters and /v1/loads are always current. Emulates --enable-metrics.

Left out: histograms, and the second that a real /health takes because it generates a token: use /ready to probe a real
server.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from workers.api.call import ApiError, boolean, text_tokens, token_list
from workers.api.http import PLAIN, Handler, HttpRequest, Response, Routes, json_response
from workers.dialects.counting import count_message_tokens
from workers.dialects.exposition import Exposition
from workers.engine.block_log import refreshes_after_step
from workers.engine.sglang_engine import SglangEngine
from workers.engine.tokenizer import decode
from workers.settings import WorkerSettings

VERSION = "0.5.23"
IDLE_LOG_SECONDS = 30.0
ONE_ACCELERATOR: Mapping[str, object] = {"accelerator": None, "num_accelerators": 1}


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


class SglangStatus:
    """The endpoints of one SGLang worker other than generation. `clock` returns seconds."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: SglangEngine,
        max_model_len: int,
        kv_events: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kv_events`: where KV events are published, None if nowhere."""
        self._kv_events = kv_events
        self._settings = settings
        self._engine = engine
        self._max_model_len = max_model_len
        self._clock = clock
        self._created = int(time.time())
        self._time_factor = 1 / settings.speed if settings.speed else 0.0
        self._gauges = Gauges(available_tokens=engine.available_tokens)
        self._read_at = clock()
        self._read_counts = (0, 0, 0)  # generated, hit and queried tokens at the last reading

    def after_step(self) -> None:
        """Refresh the gauges if SGLang does so after this step."""
        if refreshes_after_step(self._engine):
            self._refresh()

    def routes(self) -> Routes:
        plain: dict[tuple[str, str], Handler] = {
            ("GET", path): lambda _: Response() for path in ("/health", "/health_generate", "/ready", "/ping")
        }
        both = {("POST", f"{root}/{name}"): handler for root in ("", "/v1") for name, handler in self._texts()}
        return {
            **plain,
            **both,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_server_info"): self._server_info,
            ("POST", "/v1/messages/count_tokens"): self._count_message_tokens,
            ("GET", "/v1/loads"): self._loads,
            ("GET", "/v1/models"): self._models,
            ("GET", f"/v1/models/{self._settings.model}"): lambda _: json_response(self._model()),
            ("GET", "/metrics"): lambda _: Response(self.metrics(), content_type=PLAIN),
            ("GET", "/flush_cache"): self._flush_cache,
            ("POST", "/flush_cache"): self._flush_cache,
        }

    def metrics(self) -> bytes:
        """Return all series in Prometheus' text format."""
        if not self._engine.has_work and self._clock() - self._read_at > IDLE_LOG_SECONDS * self._time_factor:
            self._refresh()
        names = {"model_name": self._settings.model, "engine_type": "unified"}
        scheduler = Exposition("sglang:", **names, tp_rank="0", pp_rank="0", moe_ep_rank="0")
        self._scheduler_gauges(scheduler)
        self._scheduler_counters(scheduler)
        return scheduler.text() + self._tokenizer_counters(names)

    def _tokenizer_counters(self, names: Mapping[str, str]) -> bytes:
        """Return the counters of the front end. SGLang counts streams and whole answers apart; here all are streams."""
        exposition, counts = Exposition("sglang:", **names), self._engine.counters
        streams = {"is_streaming": "true"}
        _counted(exposition, "prompt_tokens_total", counts.finished_prompt_tokens, **streams)
        _counted(exposition, "generation_tokens_total", counts.finished_generation_tokens, **streams)
        _counted(exposition, "cached_tokens_total", counts.prefix_hits, cache_source="device")
        _counted(exposition, "num_requests_total", counts.submitted_requests, **streams)
        _counted(exposition, "num_aborted_requests_total", counts.aborted_requests)
        return exposition.text()

    def _scheduler_gauges(self, exposition: Exposition) -> None:
        gauges, config = self._gauges, self._engine.config
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
        if not self._settings.hide_capacity:
            exposition.gauge("token_usage", gauges.used_tokens / self._engine.capacity)
            exposition.gauge("utilization", gauges.running / config.max_running)
            exposition.gauge("kv_available_tokens", gauges.available_tokens)
            exposition.gauge("max_total_num_tokens", self._engine.capacity)
            exposition.gauge("num_pages", self._engine.capacity // config.block_size)

    def _scheduler_counters(self, exposition: Exposition) -> None:
        counts = self._engine.counters
        _counted(exposition, "evicted_tokens_total", counts.evicted_tokens)
        exposition.counter("realtime_tokens_total", counts.prefilled_tokens, mode="prefill_compute")
        exposition.counter("realtime_tokens_total", counts.prefix_hits, mode="prefill_cache")
        exposition.counter("realtime_tokens_total", counts.generation_tokens, mode="decode")
        _counted(exposition, "num_retracted_input_tokens_total", counts.preempted_input_tokens)
        _counted(exposition, "num_retracted_output_tokens_total", counts.preempted_output_tokens)

    def _refresh(self) -> None:
        engine, counts, now = self._engine, self._engine.counters, self._clock()
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

    def _loads(self, _request: HttpRequest) -> Response:
        engine, counts = self._engine, self._engine.counters
        waiting = engine.waiting_uncached_tokens()
        load: dict[str, object] = {
            "timestamp": time.time(),
            "dp_rank": 0,
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
        if not self._settings.hide_capacity:
            load["max_total_num_tokens"] = engine.capacity
            load["max_running_requests"] = engine.config.max_running
            load["token_usage"] = engine.used_tokens / engine.capacity
        now = datetime.now(UTC).isoformat()
        return json_response({"timestamp": now, "version": VERSION, "loads": [load], **ONE_ACCELERATOR})

    def _server_info(self, _request: HttpRequest) -> Response:
        config = self._engine.config
        info: dict[str, object] = {
            "model_path": self._settings.model,
            "served_model_name": self._settings.model,
            "page_size": config.block_size,
            "schedule_policy": config.order,
            "chunked_prefill_size": config.max_batched_tokens,
            "max_queued_requests": config.max_queued,
            "context_length": self._max_model_len,
            "internal_states": [{}],
            "version": VERSION,
        }
        if self._kv_events is not None:
            info["kv_events"] = self._kv_events
        if not self._settings.hide_capacity:
            info["max_total_num_tokens"] = self._engine.capacity
            info["max_running_requests"] = config.max_running
        return json_response(info)

    def _model_info(self, _request: HttpRequest) -> Response:
        model = self._settings.model
        return json_response({"model_path": model, "tokenizer_path": model, "is_generation": True})

    def _models(self, _request: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    def _model(self) -> dict[str, object]:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._max_model_len,
        }

    def _flush_cache(self, _request: HttpRequest) -> Response:
        if self._engine.has_work:
            return Response(b"Flush cache failed: requests are running or waiting.\n", 400, PLAIN)
        self._engine.flush_cache()
        return Response(b"Cache flushed.\n", content_type=PLAIN)

    def _texts(self) -> list[tuple[str, Handler]]:
        return [("tokenize", self._tokenize), ("detokenize", self._detokenize)]

    def _count_message_tokens(self, request: HttpRequest) -> Response:
        return json_response({"input_tokens": count_message_tokens(request.json())})

    def _tokenize(self, request: HttpRequest) -> Response:
        body = request.json()
        if boolean(body, "continue_final_message") and body.get("add_generation_prompt") is False:
            raise ApiError(400, "continue_final_message needs add_generation_prompt to open the assistant turn.")
        tokens = text_tokens(body)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self._max_model_len})

    def _detokenize(self, request: HttpRequest) -> Response:
        return json_response({"text": decode(token_list(request.json().get("tokens"), "tokens"))})


def _counted(exposition: Exposition, name: str, value: float, **labels: str) -> None:
    """Add a counter if it is not zero: SGLang does not expose a counter before its first count."""
    if value:
        exposition.counter(name, value, **labels)
