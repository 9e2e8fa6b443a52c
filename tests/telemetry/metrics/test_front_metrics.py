"""The metrics of several fronts: sums that never go back."""

from collections import Counter
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from router.channel.codec import FRONT_DECODER, encode
from router.channel.messages import FrontMeasured, ProcessLoad
from router.front.byte_budget import ByteBudget
from router.front.http.connection_limits import Connections, FrontLimits
from router.telemetry.metrics.component_metrics import AdmissionMetrics
from router.telemetry.metrics.front_metrics import FrontMeasurements, ProcessMetrics, measured_metrics


def report(refusals: Mapping[str, int], load: ProcessLoad | None = None) -> FrontMeasured:
    """What a front reports, after its way over the channel."""
    budget = ByteBudget(100)
    collectors = [AdmissionMetrics(refusals), Connections(FrontLimits(), budget), budget]
    measured = FrontMeasured(measured_metrics(collectors), load or ProcessLoad(0.0, 0.0))
    decoded = FRONT_DECODER.decode(encode(measured))
    assert isinstance(decoded, FrontMeasured)
    return decoded


def limited_calls(fronts: FrontMeasurements) -> dict[str, float]:
    """The counts of refused calls by reason, as on the page."""
    registry = CollectorRegistry()
    registry.register(fronts)
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name == "d2lpm_limited_calls_total"}


def test_counts_are_summed_and_outlive_their_front() -> None:
    """A report replaces the one before; a front that is started again begins at zero, and the sum goes on."""
    fronts = FrontMeasurements()
    fronts.take("front-1", report(Counter(a=1)))
    fronts.take("front-1", report(Counter(a=2)))
    fronts.take("front-2", report(Counter(a=3, b=1)))
    assert limited_calls(fronts) == {"a": 5, "b": 1}
    fronts.front_closed("front-1")
    assert limited_calls(fronts) == {"a": 5, "b": 1}
    fronts.take("front-1", report(Counter()))
    fronts.take("front-1", report(Counter(a=1)))
    assert limited_calls(fronts) == {"a": 6, "b": 1}
    fronts.front_closed("front-3")
    assert limited_calls(fronts) == {"a": 6, "b": 1}


def test_the_gauges_of_an_ended_front_are_gone() -> None:
    """A front that has ended holds no bytes and connections any more."""
    fronts = FrontMeasurements()
    fronts.take("front-1", report(Counter()))
    before = {metric.name: len(metric.samples) for metric in fronts.collect() if metric.type == "gauge"}
    assert before["d2lpm_connections"] == 1
    fronts.front_closed("front-1")
    assert not [metric for metric in fronts.collect() if metric.type == "gauge"]


def test_each_process_has_its_load() -> None:
    """The scheduler's own load is read at the scrape, and only fronts have a channel."""
    fronts = FrontMeasurements()
    fronts.take("front-2", report(Counter(), ProcessLoad(3.0, 0.5, 7, 0.25, 2)))
    found = {
        (sample.name, sample.labels["process"]): sample.value
        for metric in ProcessMetrics("scheduler", lambda: 0.1, lambda: 9, fronts, 4).collect()
        for sample in metric.samples
    }
    assert found["d2lpm_process_calls", "scheduler"] == 9
    assert found["d2lpm_process_calls", "front-2"] == 7
    assert found["d2lpm_process_cpu_seconds_total", "front-2"] == 3.0
    assert found["d2lpm_process_loop_lag_seconds", "scheduler"] == 0.1
    assert found["d2lpm_process_restarts_total", "scheduler"] == 4
    assert found["d2lpm_process_restarts_total", "front-2"] == 2
    assert [key for key in found if key[0] == "d2lpm_channel_delay_seconds"] == [
        ("d2lpm_channel_delay_seconds", "front-2")
    ]
