"""Starts the stack of each test, and shows the logs of one that failed."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from tests.deploy.environment import program

from .stand import Stand

STAND: pytest.StashKey[Stand] = pytest.StashKey()


class Start(Protocol):
    """Starts the processes of a test, until its context ends."""

    def __call__(self, *workers: Sequence[str], settings: Sequence[str] = ()) -> AbstractContextManager[Stand]:
        """`workers`: the flags of each worker; `settings`: the router's flags."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of every process's log beside a failure."""
    report = yield
    if report.failed and STAND in item.stash:
        for server in item.stash[STAND].servers:
            report.sections.append((f"log of {server.name}", server.log_tail() if server.log.exists() else ""))
    return report


@pytest.fixture(scope="session", autouse=True)
def prometheus() -> None:
    """Stop the session if Prometheus is missing, rather than skip tests."""
    if program("prometheus") is None:
        pytest.exit("there is no Prometheus; `make test-alerts` gets it", returncode=1)


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    """Return what starts a router in front of workers, and Prometheus.

    At the end, every alert of the test's mark `fires` must have fired.
    """

    @contextmanager
    def started(*workers: Sequence[str], settings: Sequence[str] = ()) -> Iterator[Stand]:
        with Stand(tmp_path, workers, settings) as stand:
            request.node.stash[STAND] = stand
            yield stand
            promised = {name for mark in request.node.iter_markers("fires") for name in mark.args}
            assert stand.fired == promised

    return started
