"""The live comparison of the learned window with none: its verdicts, its table, and one short run."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.lab.micro.window_live import LOADS, Load, Manner, Row, Seen, table, trial
from bench.workloads.unrelated import Unrelated

OFF = Seen(throughput=1000.0, requests_p95=100.0, tokens_p95=9000.0, lost=0.0)


def row(throughput: float, requests: float, tokens: float, dialect: str = "vllm") -> Row:
    return Row("short", dialect, True, OFF, Seen(throughput, requests, tokens, 0.01))


@pytest.mark.parametrize(
    ("seen", "passes"),
    [
        (row(970.0, 50, 4096), True),
        (row(969.0, 50, 4096), False),
        (row(990.0, 50, 4097), False),
        (row(990.0, 50, 16384, "sglang"), True),
        (row(990.0, 2, 16_000), True),
        (row(990.0, 3, 16_000), False),
    ],
)
def test_a_row_passes_with_the_throughput_and_a_short_queue(seen: Row, passes: bool) -> None:
    """A row needs 97 % of the throughput, and at most two step budgets or two requests in the engine's queue."""
    assert seen.passes == passes
    assert table([seen])[1].endswith("MISSED") != passes


def test_the_loads_exceed_what_a_worker_runs_at_once() -> None:
    """Each keeps at least 32 requests open, and measures longer than it warms up."""
    for load in LOADS.values():
        assert load.workload.client_count * load.workload.concurrency >= 32
        assert 2 * load.warmup < load.seconds


def test_a_queue_is_measured_inside_the_engine() -> None:
    """Without a window all open requests wait in the engine, with the learned window fewer: how few depends on the
    machine, which may leave the engine without a core for most of so short a time.
    """
    load = Load(Unrelated(input=50, output=20, concurrency=4), ("--max-running", "2"), 24.0, 8.0)
    off, learned = (trial(load, "vllm", window, Manner(speed=8.0), reported=False) for window in ("off", "learned"))
    assert min(off.throughput, learned.throughput) > 0
    assert off.requests_p95 > max(20, learned.requests_p95)
    assert off.tokens_p95 > max(20 * 50, learned.tokens_p95)


def test_a_mistake_is_reported(tmp_path: Path) -> None:
    """An invalid speed is reported before any process is started."""
    with pytest.raises(SystemExit) as caught:
        main(["window", "--speed", "0", "--json", str(tmp_path / "out.json")])
    assert caught.value.code == "window: error: --speed must be positive"
    assert not (tmp_path / "out.json").exists()
