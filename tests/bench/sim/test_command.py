"""The command `python -m bench simulate`, from its flags to its JSON."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.sim.command import configure, read_scenario, simulate, summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.combined import Misbehaving
from bench.workloads.documents import SharedDocuments
from bench.workloads.parts.lengths import Lengths
from bench.workloads.tree_of_thoughts import TreeOfThoughts
from router.channel.client import REPORT_STEPS, STEP_SECONDS
from router.core.fleet.window import FixedWindow, NoWindow
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters, DlpmParameters
from workers.engine.hardware import RankSteps

BRIEF = ("simulate", "--workload", "documents:documents=2,tokens=500,client_count=2", "--rate", "10", "--seconds", "3")
PERCENTILES = ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "latency_p50_s", "latency_p99_s")


def scenario(*flags: str) -> Scenario:
    parser = argparse.ArgumentParser()
    configure(parser)
    return read_scenario(parser.parse_args(flags))


def test_the_json_file_has_the_results_of_the_library(tmp_path: Path) -> None:
    """The file holds the flags, the summary of the same scenario, and the records on request."""
    out = tmp_path / "out.json"
    main([*BRIEF, "--workers", "2", "--seed", "7", "--warmup", "1", "--json", str(out), "--records"])
    written = json.loads(out.read_text())
    result = simulate(scenario(*BRIEF[1:], "--workers", "2", "--seed", "7", "--warmup", "1"))
    assert written["options"]["seed"] == 7
    assert {name: written[name] for name in summarise(result)} == json.loads(json.dumps(summarise(result)))
    assert written["records"] == json.loads(json.dumps([record._asdict() for record in result.records]))
    assert written["hit_rate"] > 0.5
    assert set(written["workers"]) == {"w1", "w2"}
    assert all(client[name] > 0 for client in written["clients"].values() for name in PERCENTILES)
    assert all(worker["service_gap"] <= worker["service_gap_bound"] for worker in written["workers"].values())


def test_the_command_prints_only_json() -> None:
    """Without a file, standard output is the JSON without records, and a pipe gets no progress bar."""
    ran = subprocess.run([sys.executable, "-m", "bench", *BRIEF], capture_output=True, text=True, check=True)
    assert "records" not in json.loads(ran.stdout)
    assert ran.stderr == ""


def test_flags_become_the_scenario() -> None:
    """Every flag sets its field of the scenario."""
    read = scenario(
        *("--report-seconds", "0.25"),
        *(
            "--policy",
            "d2lpm",
            "--set",
            "dlpm.quantum=5e3",
            "--set",
            "d2lpm.quantum=7e4",
            "--set",
            "d2lpm.load_slack=2",
        ),
        *("--workload", "prefix-40:tokens=800,weights=1/2", "--rate", "12.5", "--window", "fixed:requests=9"),
        *("--seconds", "8", "--warmup", "2", "--seed", "3", "--drain", "--no-jumps"),
        *("--workers", "3", "--speeds", "1,0.25", "--hardware", "h100-llama-7b", "--dialect", "sglang"),
        *("--order", "lpm", "--kv-tokens", "9000", "--slots", "7", "--max-batched-tokens", "512", "--hide-capacity"),
    )
    workload = read.workload
    assert isinstance(workload, SharedDocuments)
    assert (workload.documents, workload.tokens, workload.weights, workload.rate) == (40, 800, (1.0, 2.0), 12.5)
    assert read.settings.window == FixedWindow(requests=9)
    assert read.parameters == (DlpmParameters(quantum=5e3), D2lpmParameters(quantum=7e4, load_slack=2))
    assert (read.seconds, read.warmup, read.seed, read.drain, read.jumps) == (8.0, 2.0, 3, True, False)
    assert read.progress_seconds == 0.25
    assert [worker.speed for worker in read.workers] == [1.0, 0.25, 1.0]
    assert read.workers[0] == WorkerSpec(
        "h100-llama-7b", 1.0, "sglang", "lpm", 9000, None, 7, 512, reports_capacity=False
    )
    assert isinstance(scenario("--window", "off").settings.window, NoWindow)


def test_flags_make_the_workers_ranks_in_step() -> None:
    """All workers are ranks of one group, with the step times of a decode tier; without the flags, neither."""
    read = scenario("--workers", "2", "--barrier", "--rank-steps", "fixed=20,context=0.07")
    assert [(worker.barrier, worker.steps) for worker in read.workers] == [("ranks", RankSteps(20.0, 0.07))] * 2
    assert scenario("--rank-steps", "fixed=20,context=0.07,prefill=1").workers[0].steps == RankSteps(20.0, 0.07, 1.0)
    assert [(worker.barrier, worker.steps) for worker in scenario().workers] == [(None, None)]


def test_output_is_reported_as_often_as_by_a_front() -> None:
    """Without the flag, a simulation reports the output of streams in the interval of the router's fronts."""
    assert scenario().progress_seconds == pytest.approx(STEP_SECONDS * REPORT_STEPS)


def test_parts_of_a_workload_have_their_own_flags() -> None:
    """A part's parameters follow its name, and the rate is the total of all parts."""
    workload = scenario("--workload", "tot-s1:heavy.branches=3,light.output=90/20", "--rate", "2").workload
    assert isinstance(workload, Misbehaving)
    heavy, light = workload.heavy, workload.light
    assert isinstance(heavy, TreeOfThoughts)
    assert isinstance(light, TreeOfThoughts)
    assert (heavy.branches, light.branches, light.output, workload.rate) == (3, 2, Lengths(90, 20), 2.0)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--policy", "magic"), "unknown policy 'magic' (known: d2lpm"),
        (("--workload", "magic"), "unknown name 'magic' (known: documents"),
        (("--policy", "dlpm_hme"), "unknown policy 'dlpm_hme'; did you mean dlpm_home? (known: d2lpm"),
        (("--workload", "heavy-light", "--rate", "3"), "heavy-light has no rate"),
        (("--trace", "arena:trace.csv", "--rate", "3"), "a trace has times and no rate"),
        (("--window", "fixed:size=3"), "unknown parameter 'size' (known: requests"),
        (("--set", "magic.quantum=1"), "unknown family 'magic' (known:"),
        (("--set", "dlpm.quantum"), "'dlpm.quantum' is not parameter=value"),
        (("--set", "dlpm.quantum=-1"), "quantum must be positive"),
        (("--hardware", "abacus"), "unknown hardware 'abacus'"),
        (("--order", "lpm"), "vLLM has no lpm order"),
        (("--kv-tokens", "10"), "kv_tokens must hold at least four blocks"),
        (("--workers", "0"), "--workers must be at least 1"),
        (("--speeds", "1,x"), "'1,x' is no list of speeds"),
        (("--speeds", "0"), "speed must be positive"),
        (("--rank-steps", "fixed=20"), "--rank-steps needs fixed and context"),
        (("--rank-steps", "fixed=20,context=0.1,width=3"), "unknown parameter 'width' (known: fixed"),
        (("--rank-steps", "fixed=0,context=0.1"), "the fixed time of a step must be positive"),
        (("--seconds", "5", "--warmup", "5"), "more than the warm-up"),
    ],
)
def test_mistakes_are_reported(flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag ends the command before anything runs, and the message names what is wrong."""
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *flags])
    assert ended.value.code == 2
    log = capsys.readouterr().err
    assert log.startswith("simulate: error: ")
    assert complaint in log
