"""The command `d2lpm` as a process: one-line errors, its greeting, and its end."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import httpx
import pytest

from router.cli.main import COMMANDS
from router.config.sources import keys
from router.front.http.connection import ACCEPTS_PER_TURN
from tests.support.processes import process_count, process_flags
from tests.support.running import emulated_workers

README = Path(__file__).parents[2] / "README.md"
PATIENCE = 180.0
"""Seconds after which a process or a server counts as hung."""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("D2LPM_")}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "router", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def mistake(*arguments: str) -> str:
    """Run a command that must end with exit code 2 and one line on standard error; return the line."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert re.fullmatch(r"d2lpm: .+\n", done.stderr), done.stderr
    return done.stderr


class Router:
    """A router in its own process."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self._log = log
        self.greeting = []
        for line in process.stdout:
            self.greeting.append(line.strip())
            if line.startswith("  curl "):
                break
        self.curl = self.greeting[-1]
        self.url = self.greeting[0].split()[3].strip(",")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait for the process to end; return its exit code and its log."""
        code = self.process.wait(PATIENCE)
        self._log.seek(0)
        return code, self._log.read()


@contextmanager
def serving(directory: Path, *flags: str, files: int | None = None) -> Iterator[Router]:
    """Run a router. `files`: its limit of open files."""
    command = [sys.executable, "-m", "router", "serve", "--port", "0", *process_flags(), *flags]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    with (
        (directory / "log").open("w+") as log,
        subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        ) as process,
    ):
        try:
            yield Router(process, log)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Run a router in front of two emulated workers, for all tests that do not stop it."""
    with serving(tmp_path_factory.mktemp("router"), "--emulate", "2", "--policy", "least_requests") as made:
        yield made


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sreve"], "there is no 'sreve'; did you mean serve? (choose from serve, "),
        (["keys", "ad"], "there is no 'ad'; did you mean add? (choose from add, "),
        (["serve"], "--worker"),
        (["serve", "--prot", "two\nlines"], "--prot two lines; did you mean --port?"),
        (["serve", "--config", "/no/such/file"], "/no/such/file: No such file or directory"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], named: str) -> None:
    """A wrong command line gives exit code 2 and one line that names the mistake, without usage or traceback."""
    assert named in mistake(*arguments)


def test_an_unknown_key_is_one_line(tmp_path: Path) -> None:
    """The line names the file and the key."""
    file = tmp_path / "router.yaml"
    file.write_text("wrkers: []")
    assert f"{file}: unknown key wrkers" in mistake("serve", "--config", str(file))


def test_a_busy_port_is_one_line() -> None:
    """A port in use is reported before any emulated worker starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = mistake("serve", "--emulate", "1", "--port", str(port))
    assert line.endswith(
        f"cannot listen on 127.0.0.1:{port}: Address already in use; stop what listens there, or choose another port\n"
    )


def test_help_and_version_end_well() -> None:
    """Help and version print what they should and exit with 0; the help of `serve` fits on 60 lines."""
    done = run("serve", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help-all" in done.stdout
    assert len(done.stdout.splitlines()) <= 60
    assert "--max-unstarted-tokens" in run("serve", "--help-all").stdout
    assert re.fullmatch(r"d2lpm \d+\.\d+\.\d+( compiled)?\n", run("--version").stdout)


HEAVY = ("asyncio", "fastapi", "httpx", "pydantic", "router.config", "router.core", "uvicorn", "yaml")
"""What takes most of the time that `serve` needs to start."""


@pytest.mark.parametrize("flags", [["--version"], ["--help"], ["sreve"]])
def test_nothing_heavy_is_imported_before_a_command_is_called(flags: list[str]) -> None:
    """The version, the list of commands and a mistyped command come at once."""
    program = f"""
import sys
from contextlib import suppress
from router.cli.main import main
with suppress(SystemExit):
    main({flags})
print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout or "did you mean" in done.stderr
    assert done.stderr.splitlines()[-1] == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    """The table of commands names modules that there are, and each of them describes its arguments under its name."""
    done = run(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: d2lpm {name} ")


def test_the_line_in_the_readme_works(router: Router) -> None:
    """The greeting shows the README's curl call at the router's own port, and the call is answered completely."""
    shown = next(line for line in README.read_text("utf-8").splitlines() if line.startswith("curl -N"))
    assert router.curl == shown.replace("http://127.0.0.1:8000", router.url)
    _, _, url, _, header, _, body = shlex.split(router.curl)
    name, value = header.split(": ")
    answer = httpx.post(url, headers={name: value}, content=body, timeout=PATIENCE)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_client_in_the_readme_works(router: Router) -> None:
    """The lines of Python that the README shows print an answer."""
    program = README.read_text("utf-8").split("```python\n")[1].split("```")[0]
    command = [sys.executable, "-c", program.replace("http://127.0.0.1:8000", router.url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.strip()
    assert done.stderr == ""


def test_the_flags_in_the_readme_exist() -> None:
    """Every flag in the README's section on settings exists."""
    section = README.read_text("utf-8").split("\n## Settings\n")[1].split("\n## ")[0]
    of_others = {"--weight", "--file", "--api-key", "--seconds", "--workload", "--seed"}
    shown = set(re.findall(r"--[a-z][a-z0-9.-]+", section)) - of_others
    assert shown <= {key.flag for key in keys()} | {"--help", "--help-all"}
    assert len(shown) > 4


@pytest.mark.one_process("the test reads the open files of the process that serves")
def test_the_listening_socket_is_opened_once_per_accept_of_a_turn(router: Router) -> None:
    """The listening socket is open once for each connection that one turn of the loop accepts."""
    opened = Counter[str]()
    for entry in Path(f"/proc/{router.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            opened[os.readlink(entry)] += 1
    assert max(times for name, times in opened.items() if name.startswith("socket:")) == ACCEPTS_PER_TURN


def test_the_greeting_says_that_the_workers_are_emulated(router: Router) -> None:
    """The greeting names the policy and the number of workers, and warns that the workers are emulated."""
    assert "policy least_requests, workers: 2" in router.greeting[0]
    assert "Emulated workers: 2. They run no model" in router.greeting[1]


def test_real_workers_need_not_be_there_at_start(tmp_path: Path) -> None:
    """A router whose workers are down listens, and its greeting shows the list of models, which is still empty."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        worker = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with serving(tmp_path, "--worker", worker) as router:
            models = httpx.get(f"{router.url}/v1/models", timeout=PATIENCE).json()
        assert models["data"] == []
        assert not any("emulated" in line for line in router.greeting)
        assert router.curl == f"curl {router.url}/v1/models"


@pytest.mark.parametrize(("flags", "warned"), [((), True), (("--max-connections", "50"), False)])
def test_too_few_open_files_are_logged_at_the_start(flags: tuple[str, ...], warned: bool, tmp_path: Path) -> None:
    """A warning says how many files the connections may need, and is absent if the limit suffices."""
    with serving(tmp_path, "--worker", "http://127.0.0.1:9", *flags, files=256) as router:
        router.signal(signal.SIGTERM)
        _, log = router.end()
    assert ("256 open files are allowed (ulimit -n), and --max-connections " in log) == warned
    if warned and process_count() == 1:  # a front has its share of the connections
        assert "--max-connections 10000 may need 11092" in log


def test_the_access_log_contains_no_query(tmp_path: Path) -> None:
    """The log omits query strings, which may hold keys, and a path cannot forge a log line."""
    with serving(tmp_path, "--worker", "http://127.0.0.1:9", "--access-log") as router:
        httpx.get(f"{router.url}/health?api_key=sk-secret&x=%C3%A9", timeout=PATIENCE)
        httpx.get(f"{router.url}/no%0Asuch", timeout=PATIENCE)
        httpx.post(f"{router.url}/v1/chat/completions?key=sk-secret", content=b"{}", timeout=PATIENCE)
        router.signal(signal.SIGTERM)
        _, log = router.end()
    lines = re.findall(r"router.access: (.*) (\d+) address=127.0.0.1 outcome=(\w+)", log)
    assert sorted(lines) == [  # each process logs its own calls
        ("GET /health", "200", "finished"),
        ("GET /no%0Asuch", "404", "refused"),
        ("POST /v1/chat/completions", "400", "refused"),
    ]
    assert "sk-secret" not in log


def test_the_router_serves_though_nobody_reads_what_it_prints() -> None:
    """As after `d2lpm serve | head -1`: the greeting is lost, and the router ends only when it is told to."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [
        sys.executable,
        "-m",
        "router",
        "serve",
        "--worker",
        "http://127.0.0.1:9",
        "--port",
        "0",
        *process_flags(),
    ]
    with subprocess.Popen(command, env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True) as process:
        os.close(writing)
        try:
            assert process.stderr is not None
            assert any("router: started" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            log = process.stderr.read()
            code = process.wait(PATIENCE)
        finally:
            process.kill()
    assert (code, "Traceback" in log) == (0, False)


def test_a_json_log_is_all_that_the_router_writes() -> None:
    """Each line is one JSON object, from the start of the router to its end, and nothing else is printed."""
    with emulated_workers(1) as (worker,):
        flags = ["--worker", worker, "--port", "0", "--access-log", "--log-format", "json"]
        command = [sys.executable, "-m", "router", "serve", *flags, *process_flags()]
        pipe = subprocess.PIPE
        with (
            ThreadPoolExecutor() as threads,
            subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True) as process,
        ):
            try:
                assert process.stderr is not None
                assert process.stdout is not None
                lines = []
                for line in process.stderr:
                    lines.append(json.loads(line))
                    if lines[-1]["message"] == "started":
                        break
                rest = threads.submit(list, process.stderr)  # read meanwhile: a full pipe would stop the router
                call = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "my secret"}]}
                url = f"{lines[-1]['url']}/v1/chat/completions"
                while httpx.post(url, json=call, timeout=PATIENCE).status_code == 404:  # the worker has not joined yet
                    pass
                process.send_signal(signal.SIGTERM)
                lines += [json.loads(line) for line in rest.result()]
                assert process.stdout.read() == ""
            finally:
                process.kill()
    assert lines[-1]["message"] == "stopped"
    (call_line,) = [line for line in lines if line["logger"] == "router.access" and line["status"] == 200]
    assert (call_line["outcome"], call_line["output_tokens"], call_line["tries"]) == ("finished", 3, 1)
    assert "secret" not in str(lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_router_and_workers(number: signal.Signals, tmp_path: Path) -> None:
    """SIGINT, SIGTERM and SIGHUP give exit code 0 without a traceback, and the emulated workers stop listening."""
    with serving(tmp_path, "--emulate", "2") as router:
        workers = [worker["url"] for worker in httpx.get(f"{router.url}/workers", timeout=PATIENCE).json()["workers"]]
        router.signal(number)
        code, log = router.end()
    assert code == 0
    assert "Traceback" not in log
    assert len(workers) == 2
    for worker in workers:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((urlsplit(worker).hostname, urlsplit(worker).port), timeout=PATIENCE)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]], ids=["Ctrl-C", "hang-up"])
def test_a_stream_is_finished_before_the_end(signals: list[signal.Signals], tmp_path: Path) -> None:
    """After Ctrl-C, or when its terminal closes, a stream is still completed, also by emulated workers of the same
    terminal.
    """
    call = {"model": "emulated", "stream": True, "max_tokens": 99, "messages": [{"role": "user", "content": "Hello"}]}
    with serving(tmp_path, "--emulate", "1") as router:
        with httpx.stream("POST", f"{router.url}/v1/chat/completions", json=call, timeout=PATIENCE) as answer:
            events = answer.iter_lines()
            assert json.loads(next(events).removeprefix("data: "))["model"] == "emulated"
            for number in signals:
                router.signal(number)
            rest = list(events)
        assert "data: [DONE]" in rest
        assert not any('"error"' in event for event in rest)
        code, log = router.end()
    assert code == 0
    assert "Traceback" not in log


def streamed_call(**more: object) -> dict[str, object]:
    return {"model": "emulated", "stream": True, "messages": [{"role": "user", "content": "Hello"}], **more}


def test_a_router_that_drains_refuses_new_calls_until_the_last_one_has_ended(tmp_path: Path) -> None:
    """A draining router is not ready, answers new calls with 503, and closes their connections."""
    with serving(tmp_path, "--emulate", "1") as router:
        url = f"{router.url}/v1/chat/completions"
        call = streamed_call(max_tokens=500, ignore_eos=True)
        with httpx.Client(timeout=PATIENCE) as http, http.stream("POST", url, json=call) as answer:
            events = answer.iter_lines()
            next(events)
            router.process.send_signal(signal.SIGTERM)
            while http.get(f"{router.url}/ready").status_code == 200:
                next(events)
            refused = http.post(url, json=call)
            rest = list(events)
        code, log = router.end()
    assert refused.status_code == 503
    assert refused.headers["connection"] == "close"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-d2lpm-dropped-reason"] == "rejected-shutting-down"
    assert "data: [DONE]" in rest
    assert not any('"error"' in event for event in rest)
    assert (code, "Traceback" in log) == (0, False)


@pytest.mark.parametrize("again", [True, False])
def test_a_second_signal_and_the_end_of_the_time_cut_calls(again: bool, tmp_path: Path) -> None:
    """The client receives an error in its stream, and the exit code shows that calls were aborted."""
    limit = "3600" if again else "0.2"
    with serving(tmp_path, "--emulate", "1", "--drain-timeout", limit) as router:
        call = streamed_call(max_tokens=5_000, ignore_eos=True)
        with httpx.stream("POST", f"{router.url}/v1/chat/completions", json=call, timeout=PATIENCE) as answer:
            events = answer.iter_lines()
            next(events)
            router.process.send_signal(signal.SIGTERM)
            if again:
                while httpx.get(f"{router.url}/ready", timeout=PATIENCE).status_code == 200:
                    next(events)
                router.process.send_signal(signal.SIGINT)
            rest = list(events)
        code, log = router.end()
    assert any("shutting down" in event for event in rest)
    assert (code, "Traceback" in log) == (130 if again else 0, False)
