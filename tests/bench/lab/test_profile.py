"""The CPU time of each stage of the router."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from bench.lab.micro.own_router import ROUTER
from bench.lab.micro.profile import LOOP, STAGES, Measured, stage_of, stage_of_file, table


def test_a_file_belongs_to_the_first_stage_whose_path_fits() -> None:
    """Files that are not the router's belong to no stage, except the HTTP protocol of uvicorn."""
    assert stage_of_file(ROUTER + "front/http/connection.py") == "client connection"
    assert stage_of_file(ROUTER + "front/relay.py") == "gateway, relay"
    assert stage_of_file(ROUTER + "core/model/prompt_key.py") == "parse, render, hash"
    assert stage_of_file("/usr/lib/site-packages/uvicorn/protocols/http/httptools_impl.py") == "client connection"
    assert stage_of_file("/usr/lib/site-packages/uvicorn/server.py") is None
    assert stage_of_file("/usr/lib/python3/json/decoder.py") is None


@pytest.mark.parametrize("beginning", STAGES)
def test_each_stage_names_files_that_exist(beginning: str) -> None:
    """No row of the table is empty because its files were renamed."""
    if not beginning.startswith("uvicorn"):
        path = Path(ROUTER) / beginning
        assert path.is_dir() or path.with_suffix(".py").exists()


def test_a_library_counts_for_the_stage_that_calls_it() -> None:
    """A function outside the router belongs to the stage of the innermost router function below it."""
    frame = _frame_in("front/relay.py", _frame_of_a_library)
    assert stage_of(frame) == "gateway, relay"
    assert stage_of(sys._getframe()) == LOOP


def test_stages_share_the_cpu_time_by_their_samples() -> None:
    """A stage with a quarter of the samples took a quarter of the CPU time."""
    measured = Measured(requests=10, cpu_seconds=0.004, samples={"channel": 1, "scheduler": 3})
    assert measured.total == pytest.approx(400)
    assert measured.micros("channel") == pytest.approx(100)
    assert measured.micros(LOOP) == 0
    assert [line for line in table(measured, measured) if re.match(r"channel +100\.0 +100\.0 +6\.25", line)]


def test_the_command_measures_the_running_router() -> None:
    """The table has a row for each stage, and the stages of a request took time."""
    command = [sys.executable, "-m", "bench", "profile", "--seconds", "1"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    rows = dict(re.findall(r"^(\S.*?) +(?:[\d.]+) +(?:[\d.]+) +([\d.]+)$", lines, re.MULTILINE))
    assert set(rows) == {LOOP, *STAGES.values(), "all"}
    assert float(rows["all"]) > 0
    assert float(rows["scheduler"]) > 0


def _frame_of_a_library() -> FrameType:
    return sys._getframe()


def _frame_in(file: str, function: Callable[[], FrameType]) -> FrameType:
    """Call a function from one that claims to be in this file of the router."""
    namespace: dict[str, object] = {"function": function}
    exec(compile("def call():\n    return function()\nframe = call()", ROUTER + file, "exec"), namespace)
    frame = namespace["frame"]
    assert isinstance(frame, FrameType)
    return frame
