"""The settings by topic, for help texts and the commented YAML file; most operators set only the basic ones."""

from typing import Final, NamedTuple


class Section(NamedTuple):
    """Settings of one topic, by name."""

    title: str
    basic: tuple[str, ...]
    """Settings that `--help` shows."""
    advanced: tuple[str, ...]
    """Settings that only `--help-all` shows."""


SECTIONS: Final = (
    Section(
        "Listening",
        ("config", "host", "port"),
        ("admin_port", "admin_host", "tls_cert", "tls_key", "allowed_hosts", "cors_origins", "processes"),
    ),
    Section(
        "Cluster",
        (),
        (
            *("cluster", "cluster_store", "cluster_address", "cluster_secret_file"),
            *("cluster_tls_cert", "cluster_tls_key", "cluster_tls_ca"),
        ),
    ),
    Section(
        "Workers",
        ("worker", "worker_api_key", "worker_dns", "emulate"),
        (
            *("worker_kubernetes", "kubernetes_api", "kubernetes_namespace"),
            *("alias", "workers_file", "discovery_interval", "poll_interval", "ranks", "barrier"),
            *("prefill", "decode", "handoff_seconds", "pd_fallback", "connector"),
        ),
    ),
    Section(
        "Scheduling",
        ("policy",),
        (
            *("extend_weight", "output_weight", "seed", "client_limit"),
            *("window", "max_inflight", "max_unstarted_tokens"),
        ),
    ),
    Section(
        "Waiting requests",
        (),
        (
            *("max_queued", "max_queued_bytes", "max_queued_per_client", "max_queued_bytes_per_client"),
            *("queue_ttl", "heartbeat"),
        ),
    ),
    Section(
        "Agent sessions",
        (),
        (
            *("sessions", "session_labels", "session_fill", "session_idle", "session_idle_after_turn"),
            *("session_turn", "session_growth", "session_grace", "session_limit"),
        ),
    ),
    Section(
        "Clients",
        ("clients", "admin_key"),
        (
            *("admin_on_public", "identity", "trusted_header", "trusted_proxy", "usage_days"),
            *("isolate", "response_headers", "strict"),
        ),
    ),
    Section(
        "Prefix cache",
        (),
        (
            *("hash_secret", "prefix_limit", "kv_tokens_default", "min_match_tokens"),
            *("kv_events", "tokenizer", "token_budget"),
        ),
    ),
    Section(
        "Client connections",
        (),
        (
            *("body_limit", "max_held_bytes", "header_limit", "url_limit"),
            *("header_timeout", "body_timeout", "write_timeout", "keep_alive"),
            *("max_connections", "max_connections_per_address"),
        ),
    ),
    Section(
        "Failing workers",
        (),
        (
            *("connect_timeout", "first_token_timeout", "token_timeout", "silence_timeout"),
            *("tries", "retry_budget", "retry_floor", "continuation", "breaker_failures", "breaker_cooldown"),
        ),
    ),
    Section("Stored responses", (), ("stored_responses", "background_responses")),
    Section(
        "State and logs",
        ("state", "log_level"),
        (
            "drain_timeout",
            "drain_delay",
            "state_interval",
            "state_fresh",
            "journal",
            "log_format",
            "access_log",
            "otel",
        ),
    ),
)
"""Every setting but the policy parameters, each in one section."""
