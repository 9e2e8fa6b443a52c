"""A pytest plugin for vLLM's tests: their `RemoteOpenAIServer` asks for a URL instead of starting a server.

It runs in vLLM's environment, on vLLM's files, which it leaves as they are. `COMPAT_DESK` names the URL that starts
servers, `COMPAT_RESULTS` the file to which the result of each test is appended as a line of JSON.
"""

import inspect
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

NAMES = ("server", "client")
"""What a fixture's name contains if it calls a server."""


def ask(desk: str, question: dict[str, object]) -> str:
    """Return the URL of a server, which may take minutes to start. Raises RuntimeError if it does not."""
    request = urllib.request.Request(desk, json.dumps(question).encode())
    try:
        with urllib.request.urlopen(request, timeout=900) as answer:
            return str(json.load(answer)["url"])
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from None


def server_class(original: Any) -> Any:
    """Return the class that takes the place of vLLM's: the same questions to a server, and another way to get one."""

    def init(self: Any, model: str, args: list[str], **options: Any) -> None:
        changed = options.get("env_dict") or {}
        environment = {key: value for key, value in changed.items() if os.environ.get(key) != value}
        if (seed := options.get("seed", 0)) is not None:
            args = [*args, "--seed", str(seed)]
        question: dict[str, object] = {"model": model, "args": args, "environment": environment}
        root = ask(os.environ["COMPAT_DESK"], question)
        self.uds = None
        self.host, _, port = root.removeprefix("http://").partition(":")
        self.port = int(port)
        self.show_hidden_metrics = False

    def leave(*_: object) -> None:
        """The desk stops its servers."""

    return type("RemoteOpenAIServer", (original,), {"__init__": init, "__exit__": leave})


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Put the class in place before any file of vLLM's takes the name."""
    from tests import utils  # type: ignore[attr-defined, unused-ignore] # noqa: PLC0415

    utils.RemoteOpenAIServer = server_class(utils.RemoteOpenAIServer)  # type: ignore[attr-defined, unused-ignore]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that call no server."""
    others = [item for item in items if not calls_a_server(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if calls_a_server(item)]
    for item in items:
        item.add_marker("skip_global_cleanup")  # it frees a GPU's memory, and fails without a GPU


def calls_a_server(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    takes = any(part in fixture for fixture in item.fixturenames for part in NAMES)
    return takes or "RemoteOpenAIServer(" in inspect.getsource(item.function)


class Results:
    """Appends a line for each phase of a test that decides its result, and a last one with the number of tests."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write({"test": report.nodeid, "outcome": report.outcome, "text": report.longreprtext})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._write({"ran": session.testscollected})

    def _write(self, line: dict[str, object]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Results(Path(os.environ["COMPAT_RESULTS"])))
