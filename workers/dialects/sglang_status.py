"""What an SGLang server reports about itself: health, server info, loads, tokens and metrics.

As in SGLang, the gauges of /metrics are refreshed only by a prefill batch, by every 40th decode step and, when idle, 30
s after the last refresh; counters and /v1/loads are always current. Emulates --enable-metrics.

Left out: histograms, and the second that a real /health takes because it generates a token: use /ready to probe a real
server.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from workers.api.call import ApiError, boolean, text_tokens, token_list
from workers.api.http import PLAIN, Handler, HttpRequest, Response, Routes, json_response
from workers.dialects.counting import count_message_tokens
from workers.dialects.exposition import Exposition
from workers.dialects.sglang_rank import SglangRank, counted
from workers.engine.sglang_engine import SglangEngine
from workers.engine.tokenizer import decode
from workers.settings import Role, WorkerSettings

VERSION: Final = "0.5.23"
BOOTSTRAP_PORT: Final = 8998
ENGINE_TYPES: Mapping[Role, str] = {"both": "unified", "prefill": "prefill", "decode": "decode"}
ONE_ACCELERATOR: Mapping[str, object] = {"accelerator": None, "num_accelerators": 1}


class SglangStatus:
    """The endpoints of one SGLang worker other than generation, for all its ranks."""

    def __init__(
        self,
        settings: WorkerSettings,
        engines: Sequence[SglangEngine],
        max_model_len: int,
        kv_events: Mapping[str, object] | None = None,
        *,
        side_port: int | None = None,
    ) -> None:
        """`engines`: its data-parallel ranks. `kv_events`: where KV events are published, None if nowhere. `side_port`:
        that of the bootstrap server.
        """
        self._side_port = side_port
        self._kv_events = kv_events
        self._settings = settings
        self._ranks = [SglangRank(settings, engine, max_model_len, time.monotonic) for engine in engines]
        self._engine = engines[0]
        """For what is the same on all ranks."""
        self._max_model_len = max_model_len
        self._created = int(time.time())

    def after_step(self) -> None:
        """Refresh the gauges of the ranks for which SGLang does so after this step."""
        for rank in self._ranks:
            rank.after_step()

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
        names = {"model_name": self._settings.model, "engine_type": ENGINE_TYPES[self._settings.role]}
        scheduler = Exposition("sglang:", **names, tp_rank="0", pp_rank="0", moe_ep_rank="0")
        for number, rank in enumerate(self._ranks):
            rank.add_metrics(scheduler.labelled(dp_rank=str(number)) if len(self._ranks) > 1 else scheduler)
        return scheduler.text() + self._tokenizer_counters(names)

    def _tokenizer_counters(self, names: Mapping[str, str]) -> bytes:
        """Return the counters of the front end. SGLang counts streams and whole answers apart; here all are streams."""
        exposition, streams = Exposition("sglang:", **names), {"is_streaming": "true"}
        each = [rank.engine.counters for rank in self._ranks]
        counted(exposition, "prompt_tokens_total", sum(counts.finished_prompt_tokens for counts in each), **streams)
        counted(
            exposition, "generation_tokens_total", sum(counts.finished_generation_tokens for counts in each), **streams
        )
        counted(exposition, "cached_tokens_total", sum(counts.prefix_hits for counts in each), cache_source="device")
        counted(exposition, "num_requests_total", sum(counts.submitted_requests for counts in each), **streams)
        counted(exposition, "num_aborted_requests_total", sum(counts.aborted_requests for counts in each))
        return exposition.text()

    def _loads(self, _request: HttpRequest) -> Response:
        loads = [rank.load(number) for number, rank in enumerate(self._ranks)]
        now = datetime.now(UTC).isoformat()
        return json_response({"timestamp": now, "version": VERSION, "loads": loads, **ONE_ACCELERATOR})

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
            "dp_size": len(self._ranks),
            "enable_dp_attention": len(self._ranks) > 1,
            "disaggregation_mode": "null" if self._settings.role == "both" else self._settings.role,
            "disaggregation_bootstrap_port": self._side_port or BOOTSTRAP_PORT,
            "internal_states": [{} for _ in self._ranks],
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
        if any(rank.engine.has_work for rank in self._ranks):
            return Response(b"Flush cache failed: requests are running or waiting.\n", 400, PLAIN)
        for rank in self._ranks:
            rank.engine.flush_cache()
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
