"""The metrics of requests and of the state."""

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.core.model.commands import Dispatch, Refusal, Reject
from router.core.model.cost import LinearCost
from router.core.model.events import (
    Arrived,
    Cancelled,
    Event,
    Failed,
    Fault,
    Finished,
    Held,
    Released,
    Resumed,
    Returned,
    Started,
    WorkerJoined,
)
from router.core.model.request import (
    ClientId,
    GroupId,
    Request,
    RequestId,
    Usage,
    Worker,
    WorkerId,
)
from router.telemetry.metrics.counts import OTHER, ClientLabels, DurationHistogram, ModelLabels
from router.telemetry.metrics.request_metrics import RequestMetrics
from router.telemetry.metrics.state_metrics import StateCollector
from router.telemetry.report import ClientReport, FairnessReport, Service, WorkerReport, WorkerWorkReport
from router.telemetry.turn_report import RoundReport, WaitReport
from tests.core.scenario import MODEL, Scene, key
from tests.support.running import RunningRouter, chat, running_router
from tests.support.scripted_engine import scripted_engine


async def scraped(router: RunningRouter) -> dict[str, Metric]:
    async with router.http.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(await response.text())}


def values(family: Metric, **labels: str) -> list[float]:
    """The samples that have these labels, of a counter or gauge."""
    return [s.value for s in family.samples if labels.items() <= s.labels.items() and not s.name.endswith("_created")]


async def test_a_scrape_parses_and_shows_what_happened() -> None:
    """Every metric has the prefix and a help text; requests, service, times and load are there."""
    async with scripted_engine() as engine, running_router(engine.url, worker_api_key="sk-x") as router:
        async with router.post(chat(user="ann", stream=True)) as post:
            await (await engine.call()).answer(prompt=10, completion=2)
            await post.read()
        async with router.post(chat(user="ann", stream=True)) as post:
            await (await engine.call()).respond(500, b"{}")
            await post.read()
        families = await scraped(router)
        assert all(name.startswith("d2lpm_") and family.documentation for name, family in families.items())
        requests = families["d2lpm_requests"]
        assert values(requests, client="user-ann", outcome="finished") == [1]
        assert values(requests, client="user-ann", outcome="failed") == [1]
        assert values(families["d2lpm_service_tokens"], client="user-ann", kind="output") == [2]
        worker = engine.url.removeprefix("http://")
        assert values(families["d2lpm_worker_healthy"], worker=worker) == [1]
        assert values(families["d2lpm_worker_running_requests"], worker=worker) == [0]
        states = {s.labels["state"]: s.value for s in families["d2lpm_worker_breaker"].samples}
        assert states == {"closed": 1, "open": 0, "half-open": 0, "silent": 0}
        for name in ("queue", "time_to_first_token", "request"):
            counts = [s.value for s in families[f"d2lpm_{name}_seconds"].samples if s.name.endswith("_count")]
            assert sum(counts) > 0, name


async def test_a_scrape_before_any_call_parses() -> None:
    """An empty state has valid values."""
    async with running_router("http://127.0.0.1:9") as router:
        families = await scraped(router)
        assert values(families["d2lpm_worker_healthy"]) == [0]


def test_the_number_of_client_labels_is_limited() -> None:
    """The first clients keep their own label; the others share one."""
    labels = ClientLabels(limit=2)
    assert [labels[ClientId(c)] for c in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_a_counter_never_falls() -> None:
    """Service that turns out less than was estimated does not look like a counter that began again; a client that was
    forgotten begins again.
    """
    entries = [
        Service(100, 0, 10, 120.0),
        Service(40, 60, 10, 60.0),
        Service(140, 160, 20, 180.0),
        None,
        Service(7, 0, 1, 9),
    ]
    reports = [FairnessReport("p", None, clients(service), Service(0, 0, 0, 0.0), {}) for service in entries]
    collector = StateCollector(ClientLabels())
    scrapes = []
    for collector.report in reports:
        scrapes.append({family.name: family for family in collector.collect()})
    extend = [values(families["d2lpm_service_tokens"], kind="extend") for families in scrapes]
    assert extend == [[100], [100], [140], [], [7]]
    assert [values(families["d2lpm_service_cost_units"]) for families in scrapes] == [[120], [120], [180], [], [9]]


def test_charged_and_computed_tokens_of_a_worker_are_metrics() -> None:
    """Tokens are counted by kind; a corrected charge lowers no counter, and an engine without counts has no value."""
    collector = StateCollector(ClientLabels())
    scrapes = []
    for card in (WorkerWorkReport(100, 20, 120, None, 0.9), WorkerWorkReport(80, 25, 130, None)):
        worker = WorkerReport("http://w", True, 0, 0, 0, None, None, None, None, work=card)
        collector.report = FairnessReport("p", None, {}, Service(0, 0, 0, 0.0), {WorkerId("w"): worker})
        families = {family.name: family for family in collector.collect()}
        charged, computed = families["d2lpm_worker_charged_tokens"], families["d2lpm_worker_computed_tokens"]
        kinds = [(family, kind) for family in (charged, computed) for kind in ("extend", "output")]
        scrapes.append([values(family, worker="w", kind=kind) for family, kind in kinds])
        scrapes[-1].append(values(families["d2lpm_worker_charged_of_computed_ratio"], worker="w"))
    assert scrapes == [[[100], [20], [120], [], [0.9]], [[100], [25], [130], [], []]]


def test_rounds_waits_and_lags_are_metrics_where_they_are_known() -> None:
    """The metrics have totals and values per client; a client without its own label has only a share."""
    each = ClientReport(1.0, Service(0, 0, 0, 0.0), 0, 0, None, None, {}, 0.25, 40.0, 7.0)
    served = ClientReport(1.0, Service(0, 0, 0, 0.0), 0, 0, None, None, {}, 0.25)
    entries = {ClientId("ann"): each, ClientId("bob"): served, ClientId("cyd"): each}
    rounds, waits = RoundReport(3, 2.0, 5.0, 1, None), WaitReport(9.0, 4.5, 3.0, 1.5, 7.0, 3.5, 2)
    known = FairnessReport("p", None, entries, Service(0, 0, 0, 0.0), {}, 40.0, rounds, waits)
    collector = StateCollector(ClientLabels(2))
    scrapes = []
    for collector.report in (known, FairnessReport("p", None, {}, Service(0, 0, 0, 0.0), {})):
        families = {family.name: family for family in collector.collect()}
        scrapes.append({name: _by_label(families[f"d2lpm_{name}"]) for name in FELT})
    assert scrapes[0] == {
        "client_service_lag_cost_units": {"ann": 40.0, "bob": 0.0},
        "client_unserved_seconds": {"ann": 7.0},
        "client_service_share_ratio": {"ann": 0.25, "bob": 0.25, OTHER: 0.25},
        "service_lag_cost_units": {"": 40.0},
        "round_seconds": {"fair": 2.0, "current": 5.0},
        "round_clients": {"open": 3, "unserved": 1},
        "longest_wait_seconds": {"waiting": 9.0, "lately": 3.0},
        "longest_wait_rounds": {"waiting": 4.5, "lately": 1.5},
        "longest_unserved_rounds": {"": 3.5},
        "unserved_clients": {"": 2},
    }
    assert scrapes[1]["longest_wait_rounds"] == scrapes[1]["unserved_clients"] == {}
    assert scrapes[1]["round_seconds"] == {"current": 0.0}


FELT = (
    *("client_service_lag_cost_units", "client_unserved_seconds", "client_service_share_ratio"),
    *("service_lag_cost_units", "round_seconds", "round_clients", "longest_wait_seconds", "longest_wait_rounds"),
    *("longest_unserved_rounds", "unserved_clients"),
)


def _by_label(family: Metric) -> dict[str, float]:
    return {"".join(sample.labels.values()): sample.value for sample in family.samples}


def clients(service: Service | None) -> dict[ClientId, ClientReport]:
    """Return one client with this service, or none."""
    return {} if service is None else {ClientId("ann"): ClientReport(1.0, service, 0, 0, None, None, {})}


def request(name: str) -> Request:
    return Request(RequestId(name), ClientId("ann"), "m", ())


def test_only_models_that_a_worker_serves_have_a_label() -> None:
    """Other names that clients ask for share one label."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, ClientLabels())
    for number in range(3):
        invented = Request(RequestId(str(number)), ClientId("ann"), f"invented{number}", ())
        metrics.observe(0.0, Arrived(invented), [Reject(invented.id, Refusal.NO_WORKER)])
    metrics.observe(0.0, WorkerJoined(Worker(WorkerId("w"), frozenset(["m"]))), [])
    metrics.observe(0.0, Arrived(request("3")), [])
    metrics.observe(1.0, Finished(RequestId("3")), [])
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    counted = [(s.labels["model"], s.value) for s in families["d2lpm_requests"].samples]
    assert counted == [(OTHER, 3), ("m", 1)]
    labels = ModelLabels(limit=1)
    labels.add(["b", "a"])
    assert [labels["a"], labels["b"]] == ["a", OTHER]


def test_a_request_is_counted_once_however_it_ends() -> None:
    """Events after its end do not count, such as the cancellation of a refused request."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, ClientLabels())
    refused, finished = request("1"), request("2")
    metrics.observe(0.0, Arrived(refused), [Reject(refused.id, Refusal.QUEUE_FULL)])
    metrics.observe(0.0, Cancelled(refused.id), [])
    metrics.observe(0.0, Arrived(finished), [])
    metrics.observe(1.0, Finished(finished.id), [])
    metrics.observe(1.0, Finished(finished.id), [])
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    counted = {s.labels["outcome"]: s.value for s in families["d2lpm_requests"].samples if s.name.endswith("_total")}
    assert counted == {"rejected-saturated": 1, "finished": 1}


def test_a_duration_counts_in_every_bucket_that_includes_it() -> None:
    """Buckets are cumulative and include their bounds; the last includes all, and the sum is there."""
    durations = DurationHistogram("d2lpm_x_seconds", "Text.")
    for seconds in (0.0, 0.001, 0.0025, 600.0, 601.0):
        durations.observe("m", seconds)
    (family,) = durations.families()
    samples = family.samples
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert (buckets["0.001"], buckets["0.005"], buckets["300.0"], buckets["600.0"], buckets["+Inf"]) == (2, 3, 3, 4, 5)
    others = {s.name[15:]: s.value for s in samples if "le" not in s.labels}
    assert others == {"_count": 5, "_sum": pytest.approx(1201.0035)}


def test_why_requests_failed_is_counted() -> None:
    """A request that fails, or is refused a retry, counts once under the fault of its last attempt."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, ClientLabels())
    metrics.observe(0.0, WorkerJoined(Worker(WorkerId("w"), frozenset(["m"]))), [])
    for name in ("1", "2", "3"):
        metrics.observe(0.0, Arrived(request(name)), [])
    metrics.observe(1.0, Failed(RequestId("1"), accepted=True, fault=Fault.ERROR), [])
    broken = Returned(RequestId("2"), accepted=True, fault=Fault.BROKEN)
    metrics.observe(1.0, broken, [Reject(RequestId("2"), Refusal.NO_RETRY)])
    metrics.observe(1.0, Cancelled(RequestId("2")), [])
    metrics.observe(1.0, Finished(RequestId("3")), [])
    faults = {
        fault: registry.get_sample_value("d2lpm_failed_requests_total", {"model": "m", "fault": fault})
        for fault in ("error", "broken", "call")
    }
    assert faults == {"error": 1, "broken": 1, "call": None}


def test_time_between_tokens_is_the_mean_of_a_stream() -> None:
    """It counts from the first token to the end, and not for an answer that does not stream or has one token."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, ClientLabels())
    metrics.observe(0.0, WorkerJoined(Worker(WorkerId("w"), frozenset(["m"]))), [])
    for name, started, tokens in (("1", True, 11), ("2", False, 11), ("3", True, 1)):
        metrics.observe(0.0, Arrived(request(name)), [])
        if started:
            metrics.observe(1.0, Started(RequestId(name)), [])
        metrics.observe(3.0, Finished(RequestId(name), Usage(5, tokens)), [])
    found = [registry.get_sample_value(f"d2lpm_inter_token_seconds_{of}", {"model": "m"}) for of in ("count", "sum")]
    assert found == [1, pytest.approx(0.2)]


def test_service_and_waiting_are_known_by_client_and_model() -> None:
    """Served cost follows the engine's usage; a client that waits and is served nothing has a cost of 0."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, ClientLabels(), LinearCost(1.0, 2.0))
    metrics.observe(0.0, WorkerJoined(Worker(WorkerId("w"), frozenset(["m", "n"]))), [])
    metrics.observe(0.0, Arrived(request("1")), [])
    metrics.observe(0.0, Arrived(Request(RequestId("2"), ClientId("bob"), "n", ())), [])
    assert registry.get_sample_value("d2lpm_model_queued_requests", {"client": "bob", "model": "n"}) == 1
    metrics.observe(1.0, Finished(RequestId("1"), Usage(10, 3, 6)), [])
    pairs = [("ann", "m"), ("bob", "n"), ("ann", "n")]
    costs = [
        registry.get_sample_value("d2lpm_model_service_cost_units_total", {"client": client, "model": model})
        for client, model in pairs
    ]
    assert costs == [10, 0, None]


def test_queue_time_is_known_by_group_of_clients() -> None:
    """The time in the queue is counted for the group of the client, and for clients without one together."""
    registry = CollectorRegistry()
    scene = Scene("d2lpm", workers=("w1",))
    metrics = RequestMetrics(registry, ClientLabels())
    for name, group in (("1", GroupId("gold")), ("2", None)):
        asked = Request(RequestId(name), ClientId(f"of {group}"), MODEL, (key(name),), group=group)
        event = Arrived(asked)
        metrics.observe(0.0, event, scene.feed(event))
    for label in ("gold", "none"):
        assert registry.get_sample_value("d2lpm_group_queue_seconds_count", {"client_group": label}) == 1


def test_a_request_of_an_earlier_run_is_counted_when_it_ends() -> None:
    """It may be sent to another worker before that."""
    metrics, scene = RequestMetrics(CollectorRegistry(), ClientLabels()), Scene("d2lpm", workers=("w1", "w2"))
    asked = Request(RequestId("r"), ClientId("ann"), MODEL, (key("x"),))
    events: list[Event] = [
        Held(),
        Resumed(asked, WorkerId("w1"), 0),
        Released(),
        Returned(asked.id, accepted=True, fault=Fault.BROKEN),
        Finished(asked.id),
    ]
    dispatches = []
    for event in events:
        commands = scene.feed(event)
        dispatches += [command for command in commands if isinstance(command, Dispatch)]
        metrics.observe(1.0, event, commands)
    assert [command.worker for command in dispatches] == ["w2"]
    (requests,) = [family for family in metrics.collect() if family.name == "d2lpm_requests"]
    assert [sample.value for sample in requests.samples] == [1]
