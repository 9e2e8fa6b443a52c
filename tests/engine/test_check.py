"""Tests `d2lpm check` at real servers: it reports flags that fit, and names the flag to change where one does not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .fleet import Engine
from .wire import WORKER_KEY, get

pytestmark = pytest.mark.engine

CHANGES = {"vllm": "--enable-prefix-caching", "sglang": "--schedule-policy fcfs"}
"""The flag to change at each server of the fleet `embedding`."""


def checked(engines: tuple[Engine, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "router.yaml"
    file.write_text(json.dumps({"worker": [engine.url for engine in engines], "worker_api_key": WORKER_KEY}))
    command = [str(Path(sys.executable).with_name("d2lpm")), "check", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.fleets("vllm", "sglang", "small vllm", "small sglang", "mixed")
def test_check_accepts_servers_with_flags_that_fit(engines: tuple[Engine, ...], tmp_path: Path) -> None:
    """The check succeeds, and prints each server's engine, model and cache size."""
    done = checked(engines, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for engine in engines:
        card = rf"{engine.dialect} [\d.]+ serves tiny, its cache holds \d+ tokens, in blocks of {engine.block_tokens}; "
        assert re.search(card + "its flags fit", done.stdout), done.stdout


@pytest.mark.fleets("embedding")
def test_check_names_the_flag_to_change_at_each_server(engines: tuple[Engine, ...], tmp_path: Path) -> None:
    """The check fails and leaves each server alive, though an SGLang that only embeds dies of a completion."""
    done = checked(engines, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for engine in engines:
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"127.0.0.1:{engine.port}: ")]
        found = [line for line in lines if "; start it with" in line]
        assert [CHANGES[engine.dialect] in line for line in found] == [True], found
        assert get(engine.url + "/v1/models", WORKER_KEY).status == 200
