"""Starts the services of docker-compose.yml, each by its own command, and puts load on them.

`make test-deploy` runs this folder.
"""

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engine.processes import wait_until
from tests.engine.wire import get

from .environment import program
from .image import Image, build
from .load import Load
from .stack import Service

START_SECONDS = 120.0
TROUBLE_SECONDS = 120.0
QUEUED = 35
"""Requests that one client may have waiting: few enough that heavy clients have some refused."""
SERVICES: pytest.StashKey[list[Service]] = pytest.StashKey()


class Stack(NamedTuple):
    """The running services by name."""

    router: Service
    workers: tuple[Service, Service]
    prometheus: Service


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of every service's log beside a failure."""
    report = yield
    if report.failed:
        for service in item.config.stash.get(SERVICES, []):
            report.sections.append((f"log of {service.name}", service.log_tail() if service.log.exists() else ""))
    return report


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    """Stop the session if Prometheus or promtool is missing, rather than skip tests."""
    if program("prometheus") is None or program("promtool") is None:
        pytest.exit("there is no Prometheus; `make test-deploy` gets it", returncode=1)


@pytest.fixture(scope="session")
def promtool() -> str:
    """Return the path of promtool."""
    return str(program("promtool"))


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return build(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="session")
def stack(image: Image, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Stack]:
    """Start the router, emulated workers and Prometheus, and wait until all are ready.

    Grafana has no command of its own.
    """
    folder = tmp_path_factory.mktemp("stack")
    limited = {"D2LPM_MAX_QUEUED_PER_CLIENT": str(QUEUED), "D2LPM_STATE": str(folder / "state")}
    one, two = Service("worker-1", image, folder), Service("worker-2", image, folder)
    made = Stack(Service("router", image, folder, limited), (one, two), Service("prometheus", image, folder))
    services = pytestconfig.stash.setdefault(SERVICES, [])
    services += [one, two, made.router, made.prometheus]
    with ExitStack() as ending:
        for service in services:
            service.place(services)
            ending.callback(service.stop)
            service.start()
        for service, path in ((one, "/health"), (two, "/health"), (made.prometheus, "/-/ready")):
            service.wait_ready(path, START_SECONDS)
        made.router.wait_ready("/ready", START_SECONDS)
        yield made


@pytest.fixture(scope="session")
def loaded(stack: Stack) -> Iterator[Stack]:
    """Yield the stack with clients waiting, after a worker was killed with calls in flight and started again."""
    two = stack.workers[1]
    with Load(stack.router.url) as load:
        wait_until(lambda: load.answered > 20, START_SECONDS, "calls are answered")
        two.kill()
        wait_until(lambda: lost_tries(stack.router) > 0, TROUBLE_SECONDS, "a call was lost with its worker")
        two.start()
        two.wait_ready("/health", START_SECONDS)
        yield stack


def lost_tries(router: Service) -> float:
    """Return the router's count of lost tries, summed over all kinds of fault."""
    lines = get(router.admin_url + "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("d2lpm_lost_tries_total{"))


@pytest.fixture(scope="session")
def rules() -> Path:
    return Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml"
