"""What the Grafana dashboard shows: its rows, their panels and the queries of these."""

from dataclasses import dataclass, field
from typing import Final, Literal

CLIENTS: Final = 12
"""Clients drawn in one panel, those with the largest values."""
TOKENS: Final = "suffix: tok/s"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, before it is restricted to the chosen routers and models, and the legend of its lines."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: lines over time, unless its kind is another one."""

    title: str
    description: str
    """What the panel shows and which values are good."""
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False
    axis_max: float | None = None
    """Upper end of the axis; None to fit the data."""
    kind: Literal["timeseries", "stat", "status-history"] = "timeseries"
    """status-history: a heat map with a row for each series."""
    alarming: float | None = None
    """Value from which on a number is red; below which, if it is negative."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels."""

    title: str
    panels: tuple[Panel, ...] = field(default=())


def top(expr: str) -> str:
    """Select the clients with the largest values."""
    return f"topk({CLIENTS}, {expr})"


def percentiles(buckets: str) -> tuple[Query, ...]:
    """Query three percentiles of the recorded buckets of a histogram."""
    inner = f"sum by (le) ({buckets})"
    return tuple(Query(f"histogram_quantile({share}, {inner})", f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99))


def rate(counter: str, by: str) -> str:
    """Query a counter's increase per second, summed by these labels."""
    return f"sum by ({by}) (rate({counter}[$__rate_interval]))"


def p95(buckets: str) -> str:
    """Query the 95th percentile of recorded buckets."""
    return f"histogram_quantile(0.95, sum by (le) ({buckets}))"


def stat(
    title: str, description: str, unit: str, expr: str, alarming: float | None = None, legend: str = "{{__name__}}"
) -> Panel:
    """Return a panel with one number."""
    return Panel(title, description, unit, (Query(expr, legend),), kind="stat", alarming=alarming)


FIRST_TOKEN: Final = "model:d2lpm_time_to_first_token_seconds_bucket:rate5m"
RUNNING: Final = "max by (version, policy) (d2lpm_build_info)"
FAILED: Final = "max(model:d2lpm_failures:ratio_rate5m)"
FAIRNESS: Final = Row(
    "Is it fair?",
    (
        Panel(
            "Share of service",
            "Each client's share of all service, in cost units. Clients of equal weight that all wait should have "
            "equal shares; a client that asks for less than its share gets all that it asks for.",
            "percentunit",
            (Query(top('client:d2lpm_service_share:ratio_rate1m{client=~"$client"}'), "{{client}}"),),
            stacked=True,
            axis_max=1,
        ),
        Panel(
            "Service of waiting clients, relative to the best served",
            "Service per weight over ten minutes, of clients that always had requests waiting, compared with the best "
            "served client of the same model. 1 is fair; a client near 0 starves.",
            "percentunit",
            (
                Query(
                    'bottomk(12, client_model:d2lpm_service_of_waiting:ratio_rate10m{client=~"$client"})',
                    "{{client}}, {{model}}",
                ),
            ),
        ),
        Panel(
            "Service gap and its bound",
            "The largest difference in service per weight between two clients that wait in the same queue, and "
            "the bound of the theorem. A gap above the bound would be an error of the router.",
            "suffix: units",
            (
                Query("max by (worker) (d2lpm_service_gap_cost_units)", "gap, {{worker}}"),
                Query("max by (worker) (d2lpm_service_gap_bound_cost_units)", "bound, {{worker}}"),
            ),
        ),
        Panel(
            "Deficits by client and worker",
            "Each client's deficit in cost units; at each worker, where the policy keeps one per worker. Red: the "
            "client has a debt there and waits until others have caught up.",
            "suffix: units",
            (
                Query(
                    'bottomk(24, min by (client, worker) (d2lpm_deficit_cost_units{client=~"$client"}))',
                    "{{client}} {{worker}}",
                ),
            ),
            kind="status-history",
            alarming=-1,
        ),
    ),
)
TURNS: Final = Row(
    "Is every client served?",
    (
        Panel(
            "Rounds",
            "How long it takes until each client with an open call is served: one call of mean cost each at full rate "
            "(fair), and as measured (current, last). If the current round does not end, some client is not served.",
            "s",
            (Query("max by (round) (d2lpm_round_seconds)", "{{round}}"),),
        ),
        Panel(
            "Longest wait in fair rounds",
            "The longest wait for a first token, of calls that wait now or waited in the last minute, and the longest "
            "time for which a waiting client was served nothing. Above 3, a client waits for others' quanta.",
            "short",
            (
                Query("max by (calls) (d2lpm_longest_wait_rounds)", "{{calls}}"),
                Query("max by (instance) (d2lpm_longest_unserved_rounds)", "unserved"),
            ),
        ),
        Panel(
            "Unserved clients",
            "Clients with a waiting call that were served nothing for longer than a fair round, and all clients with "
            "an open call.",
            "short",
            (
                Query("sum by (instance) (d2lpm_unserved_clients)", "unserved for a round"),
                Query('sum by (instance) (d2lpm_round_clients{clients="open"})', "with an open call"),
            ),
        ),
        Panel(
            "Service lag",
            "How far each client is behind an even share of service, per weight, while one of its calls waits in the "
            "router or in an engine. A client whose lag rises all the time gets less than its share.",
            "suffix: units",
            (
                Query(top('max by (client) (d2lpm_client_service_lag_cost_units{client=~"$client"})'), "{{client}}"),
                Query("max by (instance) (d2lpm_service_lag_cost_units)", "largest"),
            ),
        ),
    ),
)
WAITING: Final = Row(
    "Which clients wait, and how long?",
    (
        Panel(
            "Waiting requests by client",
            "Requests that no worker's window has room for yet. A queue is no fault; it shows which clients wait.",
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
            "95th percentile of the client's last 256 requests. That of a light client should stay low whatever a "
            "heavy client does.",
            "s",
            (
                Query(
                    top('max by (client) (d2lpm_client_wait_seconds{client=~"$client",percentile="95"})'), "{{client}}"
                ),
            ),
        ),
        Panel(
            "Refusals by reason",
            "docs/operations.md explains each reason.",
            "reqps",
            (Query('sum by (outcome) (model:d2lpm_requests:rate5m{outcome=~"rejected-.*"})', "{{outcome}}"),),
        ),
    ),
)
SPEED: Final = Row(
    "How fast?",
    (
        Panel(
            "Time to first token",
            "From arrival, including the time in the queue.",
            "s",
            percentiles(FIRST_TOKEN),
        ),
        Panel(
            "Time in the queue",
            "From arrival to dispatch.",
            "s",
            percentiles("model:d2lpm_queue_seconds_bucket:rate5m"),
        ),
        Panel(
            "Whole answers",
            "From arrival to the end of the answer.",
            "s",
            percentiles("model:d2lpm_request_seconds_bucket:rate5m"),
        ),
        Panel(
            "Time between tokens",
            "Mean time between two output tokens of a streamed answer, after its first.",
            "s",
            percentiles("model:d2lpm_inter_token_seconds_bucket:rate5m"),
        ),
        Panel(
            "Time in the queue by group, p95",
            "95th percentile, by the clients' group; none: clients without one.",
            "s",
            (
                Query(
                    "histogram_quantile(0.95, sum by (client_group, le) (group:d2lpm_queue_seconds_bucket:rate5m))",
                    "{{client_group}}",
                ),
            ),
        ),
        Panel(
            "Failed requests by model",
            "Share of requests that no worker answered.",
            "percentunit",
            (Query("model:d2lpm_failures:ratio_rate5m", "{{model}}"),),
        ),
        Panel(
            "Tokens",
            "Input computed (extend), input found in a cache (cached, not charged) and output.",
            TOKENS,
            (Query(rate("d2lpm_service_tokens_total", "kind"), "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Requests by outcome",
            "Requests that ended per second.",
            "reqps",
            (Query("sum by (outcome) (model:d2lpm_requests:rate5m)", "{{outcome}}"),),
        ),
    ),
)
CACHES: Final = Row(
    "Are the caches warm?",
    (
        Panel(
            "Hit rate",
            "Share of prompt tokens that the engine found in its prefix cache.",
            "percentunit",
            (
                Query("worker:d2lpm_cache_hits:ratio_rate5m", "{{worker}}"),
                Query("d2lpm:cache_hits:ratio_rate5m", "all"),
            ),
            axis_max=1,
        ),
        Panel(
            "Calibration error",
            "Mean error of predicted cached tokens, as a share of the prompt. Above 15 %, predictions that promise too "
            "much are discounted.",
            "percentunit",
            (Query("max by (worker) (d2lpm_cache_error_ratio)", "{{worker}}"),),
        ),
        Panel(
            "Charged over computed",
            "Tokens charged to clients, over those that the engine computed by its own counters. 1 is right.",
            "percentunit",
            (Query("worker:d2lpm_charged_of_computed:ratio_rate30m", "{{worker}}"),),
        ),
        Panel(
            "Wrong predictions",
            "Tokens predicted to be cached that were not, and cached tokens that were not predicted.",
            TOKENS,
            (
                Query(rate("d2lpm_cache_false_hit_tokens_total", "worker"), "not cached, {{worker}}"),
                Query(rate("d2lpm_cache_missed_hit_tokens_total", "worker"), "not predicted, {{worker}}"),
            ),
        ),
        Panel(
            "Believed to be cached",
            "Tokens believed to be cached, and the capacity of the KV cache.",
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
            "Requests at each worker, and how many its window allows. At the limit the engine is busy, and further "
            "requests wait in the router, where the order is fair.",
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
            "Attempts that failed, by fault, and requests sent again to another worker.",
            "reqps",
            (
                Query(rate("d2lpm_lost_tries_total", "fault"), "lost: {{fault}}"),
                Query(
                    'sum(rate(d2lpm_dispatches_total{why="tried again"}[$__rate_interval])) or vector(0)', "tried again"
                ),
            ),
        ),
        Panel(
            "Health and circuit breakers",
            "1 while a worker answers polls; 1 while its circuit breaker is not closed or the worker is silent.",
            "short",
            (
                Query("min by (worker) (d2lpm_worker_healthy)", "healthy, {{worker}}"),
                Query('sum by (worker) (d2lpm_worker_breaker{state!="closed"})', "breaker, {{worker}}"),
            ),
            axis_max=1,
        ),
    ),
)
ROUTER: Final = Row(
    "How is the router?",
    (
        Panel(
            "Event loop lag",
            "Longest delay of the event loop in the last half minute. Above 0.02 s something is wrong.",
            "s",
            (Query("max by (instance) (d2lpm_event_loop_lag_seconds)", "{{instance}}"),),
        ),
        Panel(
            "Memory",
            "Resident memory of each process.",
            "bytes",
            (Query("max by (instance, process) (d2lpm_process_resident_memory_bytes)", "{{process}}, {{instance}}"),),
        ),
        Panel(
            "Failed writes",
            "Failed writes of the journal and the state files, in five minutes. Any is a reason to look at the log.",
            "short",
            (Query("sum by (file) (increase(d2lpm_file_failures_total[5m]))", "{{file}}"),),
        ),
        Panel(
            "Connections",
            "Open connections of clients.",
            "short",
            (Query("sum by (instance) (d2lpm_connections)", "{{instance}}"),),
        ),
        Panel(
            "Unread answers",
            "Bytes of answers that the router holds because clients do not read them.",
            "bytes",
            (Query("sum by (instance) (d2lpm_client_unread_bytes)", "{{instance}}"),),
        ),
        Panel(
            "Jain's index",
            "Jain's index of service per weight over the last minute, of clients that waited for half of it or longer: "
            "1 if service is equal, 1/n if one of n clients has all. Without such clients there is none.",
            "percentunit",
            (Query("min by (instance) (d2lpm_jain_index)", "{{instance}}"),),
            axis_max=1,
        ),
    ),
)
NOW: Final = Row(
    "Now",
    (
        stat("Requests", "Requests that ended per second.", "reqps", "sum(model:d2lpm_requests:rate5m)"),
        stat("Failed", "Largest share of failed requests of a model.", "percentunit", FAILED, 0.05),
        stat(
            "First token, p95",
            "Of all requests.",
            "s",
            p95("model:d2lpm_time_to_first_token_seconds_bucket:rate5m"),
            30,
        ),
        stat("Queue, p95", "Of all requests.", "s", p95("model:d2lpm_queue_seconds_bucket:rate5m"), 30),
        stat("Waiting", "Requests that wait in the router.", "short", "sum(d2lpm_client_queued_requests)"),
        stat("Hit rate, all", "Share of prompts found in caches.", "percentunit", "d2lpm:cache_hits:ratio_rate5m"),
        stat("Workers up", "Workers that answer polls.", "short", "sum(max by (worker) (d2lpm_worker_healthy))"),
        stat(
            "Version",
            "What runs.",
            "none",
            "max by (version, policy) (d2lpm_build_info)",
            legend="{{version}} {{policy}}",
        ),
    ),
)
ROWS: Final = (NOW, FAIRNESS, TURNS, WAITING, SPEED, CACHES, WORKERS, ROUTER)
