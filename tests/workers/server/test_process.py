"""`python -m workers` as a parent process sees it: it prints one line and exits promptly."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from workers.settings import WorkerSettings, parse_settings

PATIENCE = 120.0
"""Seconds after which a process counts as hung."""


@contextmanager
def worker(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "workers", "--port", "0", "--hardware", "instant", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    prefix, _, url = line.rstrip("\n").rpartition(" ")
    assert prefix == "workers: sglang tiny on", line
    return url


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_quietly_with_a_stream_open(number: signal.Signals) -> None:
    """The worker exits with status 0 and prints nothing more, although a client is being answered."""
    with worker("--dialect", "sglang", "--model", "tiny", "--speed", "0.01") as process:
        url = ready_url(process)
        body = b'{"prompt": "hi", "stream": true, "max_tokens": 30000, "ignore_eos": true}'
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            response.readline()
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (0, "", "")


def test_it_ends_with_its_parent() -> None:
    """The worker exits at the end of its standard input."""
    with worker("--dialect", "sglang", "--model", "tiny", "--exit-with-parent") as process:
        url = ready_url(process)
        with urllib.request.urlopen(f"{url}/ready", timeout=PATIENCE) as response:
            assert response.status == 200
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=PATIENCE) == 0


def test_a_signal_before_the_server_runs_is_not_lost() -> None:
    """The worker can be stopped as soon as its line is printed."""
    with worker("--dialect", "sglang", "--model", "tiny") as process:
        ready_url(process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 0


def test_every_setting_is_a_flag() -> None:
    """The command line sets every field of the dataclass, with its type and default."""
    assert parse_settings([]) == WorkerSettings()
    line = "--dialect sglang --order lpm --kv-tokens 5000 --speed inf --max-queued 3 --hide-capacity --api-key k"
    assert parse_settings(line.split()) == WorkerSettings(
        dialect="sglang",
        order="lpm",
        kv_tokens=5000,
        speed=float("inf"),
        max_queued=3,
        hide_capacity=True,
        api_key="k",
    )


def test_it_listens_at_an_address_of_ipv6() -> None:
    """The host in its URL stands in brackets."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with worker("--dialect", "sglang", "--model", "tiny", "--host", "::1") as process:
        url = ready_url(process)
        assert url.startswith("http://[::1]:")
        with urllib.request.urlopen(f"{url}/ready", timeout=PATIENCE) as response:
            assert response.status == 200


def test_an_address_in_use_is_one_line() -> None:
    """The line names the address; the exit status is that of a wrong command line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with worker("--port", str(port)) as process:
            out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(f"workers: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        *("--hardware abacus", "--dialect trt", "--order lpm", "--speed -1", "--max-model-len 1", "--kv-tokens 10"),
        *("--x 1", "--port 65536", "--step-times 1,2", "--step-times 1,-2,3", "--step-times 1,2,x"),
    ],
)
def test_mistakes_end_with_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error message names the program."""
    with pytest.raises(SystemExit) as ended:
        parse_settings(line.split())
    assert ended.value.code == 2
    assert "python -m workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--dialect vlm", "there is no 'vlm'; did you mean vllm? (choose from vllm, sglang)"),
        ("--dialct vllm", "unrecognized arguments: --dialct vllm; did you mean --dialect?"),
        ("--hardware h100-lama-7b", "unknown hardware 'h100-lama-7b'; did you mean h100-llama-7b? (known: "),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest_one(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags and their choices are named as the router names its own."""
    with pytest.raises(SystemExit):
        parse_settings(line.split())
    assert message in capsys.readouterr().err
