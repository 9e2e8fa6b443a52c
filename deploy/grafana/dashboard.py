"""The dashboard, as Grafana reads it: `python deploy/grafana/dashboard.py > deploy/grafana/dashboards/d2lpm.json`."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any, Final

DATASOURCE: Final = {"type": "prometheus", "uid": "prometheus"}
WIDTH: Final = 24
"""Columns of Grafana's grid."""
HEIGHT: Final = 8
"""Rows of it that a panel takes."""
CLIENTS: Final = 12
"""Clients drawn in one panel, those with most."""
TOKENS: Final = "suffix: tok/s"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and what its lines are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time."""

    title: str
    about: str
    """What it shows and what is good, for the reader of the panel."""
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False
    most: float | None = None
    """The end of the axis."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side."""

    title: str
    panels: tuple[Panel, ...] = field(default=())


def top(expr: str) -> str:
    """Of the clients chosen, those with most."""
    return f"topk({CLIENTS}, {expr})"


def percentiles(histogram: str) -> tuple[Query, ...]:
    """Three of a histogram, over all models."""
    inner = f"sum by (le) (rate({histogram}_bucket[$__rate_interval]))"
    return tuple(Query(f"histogram_quantile({share}, {inner})", f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99))


def rate(counter: str, by: str) -> str:
    """A counter's increase per second, summed up to these labels."""
    return f"sum by ({by}) (rate({counter}[$__rate_interval]))"


FAIRNESS: Final = Row(
    "Is it fair?",
    (
        Panel(
            "Share of service",
            "Of all service in cost units, what each client got. Clients of equal weight that all wait should have "
            "equal shares; whoever asks for less than its share gets all that it asks for.",
            "percentunit",
            (Query(top('client:d2lpm_service_share:ratio_rate1m{client=~"$client"}'), "{{client}}"),),
            stacked=True,
            most=1,
        ),
        Panel(
            "Service of those who wait, against the best served",
            "Per weight, over five minutes in which the client always had requests waiting. 1 is fair; a client near "
            "0 starves.",
            "percentunit",
            (Query('bottomk(12, client:d2lpm_service_of_waiting:ratio_rate5m{client=~"$client"})', "{{client}}"),),
        ),
        Panel(
            "Service gap and its bound",
            "The largest difference in service per weight between two clients that wait in the same queue, and what "
            "the theorem lets it be. Above the bound would be an error.",
            "suffix: units",
            (
                Query("max by (worker) (d2lpm_service_gap_cost_units)", "gap, {{worker}}"),
                Query("max by (worker) (d2lpm_service_gap_bound_cost_units)", "bound, {{worker}}"),
            ),
        ),
        Panel(
            "Deficit counters",
            "Each client's credit in cost units, the least over the workers; below 0 it owes, and waits until others "
            "have caught up.",
            "suffix: units",
            (
                Query(
                    'bottomk(12, min by (client, counter) (d2lpm_deficit_cost_units{client=~"$client"}))',
                    "{{client}}, {{counter}}",
                ),
            ),
        ),
    ),
)
TURNS: Final = Row(
    "Does everybody have a turn?",
    (
        Panel(
            "Rounds",
            "How long it takes until each client with a call open is served: one call of mean cost each at full rate "
            "(fair), and in fact (current, last). A current round that does not end leaves somebody out.",
            "s",
            (Query("max by (round) (d2lpm_round_seconds)", "{{round}}"),),
        ),
        Panel(
            "Longest wait in fair rounds",
            "For the first token, of calls that wait now or waited in the last minute, and the longest time for which "
            "a client that waits was served nothing. Above 3 somebody waits for others' quanta.",
            "short",
            (
                Query("max by (calls) (d2lpm_longest_wait_rounds)", "{{calls}}"),
                Query("max by (instance) (d2lpm_longest_unserved_rounds)", "unserved"),
            ),
        ),
        Panel(
            "Clients unserved",
            "With a call that waits, and served nothing for longer than a fair round; beside those with a call open.",
            "short",
            (
                Query("sum by (instance) (d2lpm_unserved_clients)", "unserved for a round"),
                Query('sum by (instance) (d2lpm_round_clients{clients="open"})', "with a call open"),
            ),
        ),
        Panel(
            "Service lag",
            "How far each client is behind an even share of what is served, per weight, by the time in which calls of "
            "its wait: in the router or in an engine. One that rises all the time gets less than its share.",
            "suffix: units",
            (
                Query(top('max by (client) (d2lpm_client_service_lag_cost_units{client=~"$client"})'), "{{client}}"),
                Query("max by (instance) (d2lpm_service_lag_cost_units)", "largest"),
            ),
        ),
    ),
)
WAITING: Final = Row(
    "Who waits, and how long?",
    (
        Panel(
            "Waiting requests by client",
            "What the window lets no worker have yet. A queue is no fault: whose it is, tells whom it costs.",
            "short",
            (Query(top('sum by (client) (d2lpm_client_queued_requests{client=~"$client"})'), "{{client}}"),),
            stacked=True,
        ),
        Panel(
            "Waiting time by client, p50",
            "Median of the client's last 256 requests.",
            "s",
            (
                Query(
                    top('max by (client) (d2lpm_client_wait_seconds{client=~"$client",percentile="50"})'), "{{client}}"
                ),
            ),
        ),
        Panel(
            "Waiting time by client, p95",
            "Of the client's last 256 requests. A light client's should stay low whatever a heavy one does.",
            "s",
            (
                Query(
                    top('max by (client) (d2lpm_client_wait_seconds{client=~"$client",percentile="95"})'), "{{client}}"
                ),
            ),
        ),
        Panel(
            "Refusals by reason",
            "docs/operations.md says what each means.",
            "reqps",
            (Query(rate('d2lpm_requests_total{outcome=~"rejected-.*"}', "outcome"), "{{outcome}}"),),
        ),
    ),
)
SPEED: Final = Row(
    "How fast?",
    (
        Panel(
            "Time to first token",
            "From arrival, with the time in the queue.",
            "s",
            percentiles("d2lpm_time_to_first_token_seconds"),
        ),
        Panel("Time in the queue", "From arrival to a worker.", "s", percentiles("d2lpm_queue_seconds")),
        Panel(
            "Tokens",
            "Input computed (extend), input found in a cache (cached: nobody pays for it) and output.",
            TOKENS,
            (Query(rate("d2lpm_service_tokens_total", "kind"), "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Requests by their end",
            "Those that ended in this second.",
            "reqps",
            (Query(rate("d2lpm_requests_total", "outcome"), "{{outcome}}"),),
        ),
    ),
)
CACHES: Final = Row(
    "Are the caches warm?",
    (
        Panel(
            "Hit rate",
            "Of the prompts' tokens, how many the engine found in its prefix cache.",
            "percentunit",
            (
                Query("worker:d2lpm_cache_hits:ratio_rate5m", "{{worker}}"),
                Query("d2lpm:cache_hits:ratio_rate5m", "all"),
            ),
            most=1,
        ),
        Panel(
            "Calibration error",
            "How far predictions of what is cached are off, as a share of the prompt. Above 15 % they are discounted.",
            "percentunit",
            (Query("max by (worker) (d2lpm_cache_error_ratio)", "{{worker}}"),),
        ),
        Panel(
            "Charged of what was computed",
            "Tokens charged to clients, of those that the engine computed by its own counters. 1 is right.",
            "percentunit",
            (Query("worker:d2lpm_charged_of_computed:ratio_rate30m", "{{worker}}"),),
        ),
        Panel(
            "Wrong predictions",
            "Tokens predicted and not there, and there and not predicted.",
            TOKENS,
            (
                Query(rate("d2lpm_cache_false_hit_tokens_total", "worker"), "not there, {{worker}}"),
                Query(rate("d2lpm_cache_missed_hit_tokens_total", "worker"), "not predicted, {{worker}}"),
            ),
        ),
        Panel(
            "Believed to be cached",
            "Against what the KV cache can hold.",
            "short",
            (
                Query("sum by (worker) (d2lpm_cache_believed_tokens)", "believed, {{worker}}"),
                Query("max by (worker) (d2lpm_worker_kv_tokens)", "capacity, {{worker}}"),
            ),
        ),
    ),
)
WORKERS: Final = Row(
    "How are the workers?",
    (
        Panel(
            "In flight against the window",
            "Requests at each worker, and how many its window allows. At the window the engine is busy, and the rest "
            "waits here, where the order is fair.",
            "short",
            (
                Query("sum by (worker) (d2lpm_worker_running_requests)", "in flight, {{worker}}"),
                Query("max by (worker) (d2lpm_worker_window_requests)", "window, {{worker}}"),
            ),
        ),
        Panel(
            "Unstarted input against the window",
            "Uncached input tokens without a first token: the engine's own queue, kept short.",
            "short",
            (
                Query("sum by (worker) (d2lpm_worker_unstarted_tokens)", "unstarted, {{worker}}"),
                Query("max by (worker) (d2lpm_worker_window_unstarted_tokens)", "window, {{worker}}"),
            ),
        ),
        Panel(
            "Retries",
            "Tries that failed, by fault, and requests sent to another worker.",
            "reqps",
            (
                Query(rate("d2lpm_lost_tries_total", "fault"), "lost: {{fault}}"),
                Query(
                    'sum(rate(d2lpm_dispatches_total{why="tried again"}[$__rate_interval])) or vector(0)', "tried again"
                ),
            ),
        ),
        Panel(
            "Health and breakers",
            "1 while a worker answers polls; 1 while its failures keep it from its full share.",
            "short",
            (
                Query("min by (worker) (d2lpm_worker_healthy)", "healthy, {{worker}}"),
                Query('sum by (worker) (d2lpm_worker_breaker{state!="closed"})', "breaker, {{worker}}"),
            ),
            most=1,
        ),
    ),
)
ROUTER: Final = Row(
    "And the router itself?",
    (
        Panel(
            "Event loop lag",
            "The longest standstill of the last half minute. Above 0.02 s something is wrong.",
            "s",
            (Query("max by (instance) (d2lpm_event_loop_lag_seconds)", "{{instance}}"),),
        ),
        Panel("Connections", "Of clients.", "short", (Query("sum by (instance) (d2lpm_connections)", "{{instance}}"),)),
        Panel(
            "Unread answers",
            "What clients do not read and the router holds for them.",
            "bytes",
            (Query("sum by (instance) (d2lpm_client_unread_bytes)", "{{instance}}"),),
        ),
        Panel(
            "Jain's index",
            "Of service by weight over the last minute, of clients that waited: 1 is equal, 1/n if one has all.",
            "percentunit",
            (Query("min by (instance) (d2lpm_jain_index)", "{{instance}}"),),
            most=1,
        ),
    ),
)
ROWS: Final = (FAIRNESS, TURNS, WAITING, SPEED, CACHES, WORKERS, ROUTER)


def dashboard(rows: tuple[Row, ...]) -> dict[str, Any]:
    """Grafana's JSON: each row's panels side by side, the rows below each other."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        position = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": position, "panels": []})
        width = WIDTH // len(row.panels)
        for column, panel in enumerate(row.panels):
            position = {"x": column * width, "y": y + 1, "w": width, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, **timeseries(panel), "gridPos": position})
        y += 1 + HEIGHT
    return {
        "uid": "d2lpm",
        "title": "d2lpm-router",
        "tags": ["llm"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [clients()]},
        "panels": panels,
    }


def timeseries(panel: Panel) -> dict[str, Any]:
    """One panel's JSON but for its place."""
    stacking = {"mode": "normal" if panel.stacked else "none"}
    axis = {"min": 0} if panel.unit in ("s", "percentunit", "reqps", TOKENS) else {}
    most = {} if panel.most is None else {"max": panel.most}
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 40 if panel.stacked else 5, "stacking": stacking}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom, **axis, **most}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
            for at, query in enumerate(panel.queries)
        ],
    }


def clients() -> dict[str, Any]:
    """The choice of clients at the head of the page."""
    return {
        "name": "client",
        "label": "Client",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(d2lpm_service_tokens_total, client)", "refId": "clients"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    json.dump(dashboard(ROWS), sys.stdout, indent=2)
    print()
