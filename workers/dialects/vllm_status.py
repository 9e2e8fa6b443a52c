"""What a vLLM server reports about itself: health, version, models, tokens and metrics.

Gauges are current as of the last step. Each counter has a *_created gauge, which reveals a restart.

Left out: histograms, and the development endpoints, which a production server does not have; but a worker with a KV
connector serves /server_info as with VLLM_SERVER_DEV_MODE=1, with the part that concerns it.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Final

from workers.api.call import ApiError, Body, text_tokens, token_list
from workers.api.http import HttpRequest, Response, Routes, json_response
from workers.dialects.counting import count_message_tokens
from workers.dialects.exposition import Exposition
from workers.dialects.refusals import refuse_chat_ends
from workers.engine.engine import Engine
from workers.engine.tokenizer import decode
from workers.engine.transfer.leases import Leases
from workers.settings import Role, WorkerSettings

VERSION: Final = "0.33.0"
CACHED_SOURCES: Final = ("device", "host", "p2p", "disk", "external_unspecified")
KV_ROLES: Mapping[Role, str] = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
TEXT: Final = b"text/plain; version=1.0.0; charset=utf-8"
PERMISSION: dict[str, object] = {
    **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
    **dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False),
    **{"id": "modelperm-emulated", "object": "model_permission", "organization": "*", "group": None},
}


class VllmStatus:
    """The endpoints of one vLLM worker other than generation, for all its ranks."""

    def __init__(
        self,
        settings: WorkerSettings,
        engines: Sequence[Engine],
        max_model_len: int,
        sources: Mapping[str, object],
        leases: Sequence[Leases] = (),
        side_port: int | None = None,
    ) -> None:
        """`engines`: its data-parallel ranks. `sources`: where KV events are published, empty if nowhere. `leases`:
        those of each rank, if the engine has a NIXL connector. `side_port`: where its connector listens.
        """
        self._side_port = side_port
        self._sources = sources
        self._settings = settings
        self._engines = engines
        self._max_model_len = max_model_len
        self._created = time.time()
        self._leases = leases

    def routes(self) -> Routes:
        info: Routes = {("GET", "/server_info"): lambda _: json_response(self.server_info())}
        return {
            **(info if self._settings.kv_connector is not None else {}),
            ("GET", "/health"): lambda _: Response(),
            ("GET", "/ping"): lambda _: Response(),
            ("POST", "/ping"): lambda _: Response(),
            ("GET", "/version"): lambda _: json_response({"version": VERSION}),
            ("GET", "/load"): lambda _: json_response({"server_load": 0}),  # vLLM counts only if configured to
            ("GET", "/kv_event_sources"): lambda _: json_response(self._sources),
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): lambda _: Response(self.metrics(), content_type=TEXT),
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/v1/messages/count_tokens"): self._count_message_tokens,
        }

    def server_info(self) -> dict[str, object]:
        """Return the configuration of the connector, as `?config_format=json` does."""
        settings = self._settings
        nixl = settings.kv_connector == "nixl"
        transfer = {
            "kv_connector": "NixlConnector" if nixl else "MooncakeConnector",
            "kv_role": KV_ROLES[settings.role],
            "kv_buffer_device": "cuda",
            "kv_connector_extra_config": {"kv_lease_duration": settings.kv_lease} if nixl else {},
            "kv_load_failure_policy": settings.kv_load_failure_policy,
        }
        port = "VLLM_NIXL_SIDE_CHANNEL_PORT" if nixl else "VLLM_MOONCAKE_BOOTSTRAP_PORT"
        return {"vllm_config": {"kv_transfer_config": transfer}, "vllm_env": {port: self._side_port}}

    def metrics(self) -> bytes:
        """Return all series in Prometheus' text format."""
        exposition = Exposition("vllm:", model_name=self._settings.model)
        for rank, engine in enumerate(self._engines):
            labelled = exposition.labelled(engine=str(rank))
            self._of_rank(labelled, engine)
            if self._leases:
                self._counter(labelled, "nixl_num_kv_expired_reqs", self._leases[rank].expired)
                self._counter(labelled, "nixl_num_notifications_after_expiry", self._leases[rank].late)
                self._counter(labelled, "nixl_num_failed_transfers", self._leases[rank].failed)
                self._counter(labelled, "nixl_num_failed_notifications", 0)
        return exposition.text()

    def _of_rank(self, exposition: Exposition, engine: Engine) -> None:
        counts = engine.counters
        exposition.gauge("num_requests_running", engine.running)
        exposition.gauge("num_requests_waiting", engine.waiting + engine.loading)
        exposition.gauge("num_requests_waiting_by_reason", engine.waiting, reason="capacity")
        exposition.gauge("num_requests_waiting_by_reason", engine.loading, reason="deferred")
        connected = self._settings.kv_connector is not None
        if connected:
            self._fetches(exposition, engine)
        exposition.gauge("kv_cache_usage_perc", engine.used_tokens / engine.capacity)
        exposition.gauge("engine_sleep_state", 1, sleep_state="awake")
        exposition.gauge("cache_config_info", 1, **self._cache_config(engine))
        asked = counts.prefix_queries - counts.prefix_hits if connected else 0
        local = counts.prompt_tokens - counts.prefix_hits - counts.external_hits
        for name, value in (
            ("prefix_cache_queries", counts.prefix_queries),
            ("prefix_cache_hits", counts.prefix_hits),
            ("external_prefix_cache_queries", asked),
            ("external_prefix_cache_hits", counts.external_hits),
            ("prompt_tokens", counts.prompt_tokens),
            ("prompt_tokens_cached", counts.prefix_hits + counts.external_hits),
            ("generation_tokens", counts.generation_tokens),
            ("num_preemptions", counts.preempted_requests),
        ):
            self._counter(exposition, name, value)
        self._counter(exposition, "prompt_tokens_by_source", max(local, 0), source="local_compute")
        self._counter(exposition, "prompt_tokens_by_source", counts.prefix_hits, source="local_cache_hit")
        self._counter(exposition, "prompt_tokens_by_source", counts.external_hits, source="external_kv_transfer")
        for source in CACHED_SOURCES:
            cached = {"device": counts.prefix_hits, "p2p": counts.external_hits}.get(source, 0)
            self._counter(exposition, "prompt_tokens_cached_by_source", cached, source=source)
        for reason, finished in counts.finished_requests.items():
            self._counter(exposition, "request_success", finished, finished_reason=reason)

    def _fetches(self, exposition: Exposition, engine: Engine) -> None:
        """Add how many requests fetch their KV; an engine without a connector does not show it."""
        exposition.gauge("num_requests_kv_fetch_by_stage", 0, stage="waiting_to_start")
        exposition.gauge("num_requests_kv_fetch_by_stage", engine.loading, stage="in_progress")
        exposition.gauge("num_requests_kv_fetch_by_stage", engine.loaded_waiting, stage="completed_waiting")

    def _counter(self, exposition: Exposition, name: str, value: float, **labels: str) -> None:
        exposition.counter(f"{name}_total", value, **labels)
        exposition.gauge(f"{name}_created", self._created, **labels)

    def _cache_config(self, engine: Engine) -> dict[str, str]:
        config = engine.config
        info = {
            "block_size": str(config.block_size),
            "enable_prefix_caching": "True",
            "prefix_caching_hash_algo": "sha256",
        }
        if not self._settings.hide_capacity:
            info["num_gpu_blocks"] = str(engine.capacity // config.block_size + 1)
            info["kv_cache_size_tokens"] = str(engine.capacity)
            info["kv_cache_max_concurrency"] = f"{engine.capacity / self._max_model_len:.2f}"
        return info

    def _models(self, _request: HttpRequest) -> Response:
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": int(self._created),
            "owned_by": "vllm",
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._max_model_len,
            "permission": [{**PERMISSION, "created": int(self._created)}],
        }
        return json_response({"object": "list", "data": [model]})

    def _count_message_tokens(self, request: HttpRequest) -> Response:
        tokens = count_message_tokens(request.json())
        return json_response({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})

    def _tokenize(self, request: HttpRequest) -> Response:
        body = request.json()
        self._check_model(body)
        refuse_chat_ends(body)
        tokens = text_tokens(body)
        return json_response(
            {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens, "token_strs": None}
        )

    def _detokenize(self, request: HttpRequest) -> Response:
        return json_response({"prompt": decode(token_list(request.json().get("tokens"), "tokens"))})

    def _check_model(self, body: Body) -> None:
        name = body.get("model")
        if name not in (None, self._settings.model):
            raise ApiError(404, f"The model `{name}` does not exist.", "NotFoundError", "model")
