"""The summary of a simulation."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bench.report.records import Record, Result, ServiceSample, WorkerTotals
from bench.report.summary import summarise
from bench.workloads.parts.traffic import Outcome

TOTALS = WorkerTotals(6.0, 100, 900, 1000, 250, 100, 0, 0, 2.0, 300.0, 70.0, 500.0)


def record(
    client: str,
    arrived: float,
    started: float | None = None,
    finished: float | None = None,
    outcome: Outcome = Outcome.DONE,
) -> Record:
    if finished is None:
        outcome = Outcome.UNFINISHED
    return Record("r", client, outcome, arrived, arrived, started, finished, "w1", "load", 10, 0, 0, 5)


def result(*records: Record, service: Mapping[float, Mapping[str, float]] | None = None) -> Result:
    """Return a result measured from 10 s to 20 s, of clients of weights 1 and 2 who see ten times their actual
    service.
    """
    samples = tuple(
        ServiceSample(time, each, {client: 10 * value for client, value in each.items()})
        for time, each in (service or {10.0: {}, 20.0: {}}).items()
    )
    return Result(20.0, 10.0, records, {"w1": TOTALS, "w2": TOTALS}, {"a": 1.0, "b": 2.0}, samples)


def test_rates_are_of_the_measured_time() -> None:
    """Tokens, requests and busy time are divided by the seconds after the warm-up."""
    summary = summarise(result(record("a", 1, 2, 9), record("a", 8, 9, 12), record("b", 11, 12, 19)))
    assert summary["throughput_tokens_per_s"] == 200.0
    assert summary["output_tokens_per_s"] == 20.0
    assert summary["requests_per_s"] == 0.2
    assert summary["hit_rate"] == 0.25
    assert summary["workers"]["w1"]["utilisation"] == 0.6
    assert summary["workers"]["w2"]["service_gap_bound"] == 500.0


def test_outcomes_are_counted() -> None:
    """Each call that ended in the measured time counts under its outcome, and calls that did not end as unfinished."""
    records = (
        record("a", 1, 2, 9),
        record("a", 9, 10, 11),
        record("b", 9),
        record("b", 12, None, 13, Outcome.REJECTED),
    )
    summary = summarise(result(*records))
    assert summary["requests"] == {"done": 1, "rejected": 1, "cancelled": 0, "failed": 0, "unfinished": 1}
    assert summary["clients"]["a"]["requests"] == 1
    assert summary["clients"]["b"]["requests"] == 0


def test_a_starved_call_does_not_count_as_fast() -> None:
    """Waits are those of calls that arrived after the warm-up; one that still waits counts as longer than so far."""
    records = (record("a", 9, 9.5, 11), record("a", 11, 11.5, 12), record("a", 12), record("b", 12, None, 14))
    clients = summarise(result(*records))["clients"]
    assert clients["a"]["ttft_p50_s"] == 0.5
    assert clients["a"]["ttft_p99_s"] == 8.0
    assert clients["b"]["ttft_p50_s"] == 2.0  # the call does not stream: its first token comes with its last
    assert clients["a"]["latency_p50_s"] == 1.0
    assert clients["a"]["ttft_mean_s"] == pytest.approx(0.5 / 2 + 8.0 / 2)
    assert clients["a"]["latency_mean_s"] == pytest.approx(1.0 / 2 + 8.0 / 2)
    assert clients["b"]["latency_mean_s"] == 2.0


def test_service_is_what_was_added() -> None:
    """A client's service is what it was served in the measured time, in cost units."""
    service = {5.0: {"a": 10.0}, 10.0: {"a": 100.0}, 15.0: {"a": 150.0, "b": 7.0}, 20.0: {"a": 300.0, "b": 9.0}}
    clients = summarise(result(service=service))["clients"]
    assert clients["a"]["service"] == 200.0
    assert clients["b"]["service"] == 9.0
    assert (clients["a"]["client_service"], clients["b"]["client_service"]) == (2000.0, 90.0)


def test_jain_is_of_service_per_weight_while_all_are_active() -> None:
    """Jain's index covers the time from the first arrival of the last client to the last end of the first to stop."""
    service = {
        10.0: {"a": 0.0},
        12.0: {"a": 100.0, "b": 0.0},
        14.0: {"a": 150.0, "b": 100.0},
        16.0: {"a": 250.0, "b": 100.0},
    }
    records = (record("a", 1, 2, 15), record("b", 11, 12, 15.5), record("b", 13, None, 14))
    assert summarise(result(*records, service=service))["jain"] == 1.0
    longer = (*records, record("a", 16, None, 17), record("b", 16, None, 17))
    assert summarise(result(*longer, service=service))["jain"] == pytest.approx(200**2 / (2 * (150**2 + 50**2)))
    assert summarise(result(record("a", 1, 2, 15), service=service))["jain"] is None


def test_jain_may_differ_by_what_clients_see() -> None:
    """Cached tokens are service to a client, and none to the engine."""
    records = (record("a", 10, None, 20), record("b", 10, None, 20))
    samples = (ServiceSample(10.0, {}, {}), ServiceSample(20.0, {"a": 50.0, "b": 100.0}, {"a": 300.0, "b": 200.0}))
    summary = summarise(replace(result(*records), timeline=samples))
    assert summary["jain"] == 1.0
    assert summary["jain_client"] == pytest.approx(400**2 / (2 * (300**2 + 100**2)))


def test_programs_are_summed_up_by_client_and_together() -> None:
    """A program of two calls counts once, for its client and in total."""
    one = record("a", 11, 12, 13)._replace(program="1", program_calls=2)
    summary = summarise(result(one, one._replace(arrived=13, finished=16), record("b", 12, 13, 14)))
    assert summary["clients"]["a"]["programs"]["latency_mean_s"] == 5.0
    assert summary["clients"]["b"]["programs"]["latency_mean_s"] == 2.0
    assert summary["programs"]["latency_mean_s"] == 3.5
    assert summary["last_end_s"] == 16
