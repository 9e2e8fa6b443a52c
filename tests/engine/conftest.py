"""Starts fleets of real vLLM and SGLang servers with a tiny random model, one after the other, and routers before them.

`make test-engine` runs this folder. A test that takes `engines`, or what depends on it, runs with two vLLM servers and
with two SGLang servers, or with the fleets that its mark names: `@pytest.mark.fleets("vllm", "mixed")`.
"""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from .environment import is_complete
from .fleet import FLEETS, NARROW, ROUTER_START_SECONDS, Engine, Load, Router, make_model, running
from .processes import Server, wait_until

StartRouter = Callable[..., Router]
"""Starts a router, given its name, its engines, and flags."""
HERE = Path(__file__).parent
HEALTHY_SECONDS = 60.0
USUAL_FLEETS = "vllm", "sglang"
SERVERS: pytest.StashKey[list[Server]] = pytest.StashKey()
"""All servers that this session has started."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out unless it is named: its servers need an environment and half a minute of their own."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    asked = any(HERE in (path, *path.parents) for path in named)
    return None if asked or HERE not in collection_path.parents else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests with fleets that they are not for, and sort the others by fleet."""
    left_out = [item for item in items if not is_for_its_fleet(item)]
    config.hook.pytest_deselected(items=left_out)
    order = list(FLEETS)
    items[:] = [item for item in items if item not in set(left_out)]
    items.sort(key=lambda item: order.index(name) if (name := fleet_of(item)) else -1)


def fleet_of(item: pytest.Item) -> str | None:
    """Return the fleet that a test runs with, or None."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return None
    name = item.callspec.params.get("fleet")
    return name if isinstance(name, str) else None


def is_for_its_fleet(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("fleets")
    return fleet_of(item) in (None, *(mark.args if mark else USUAL_FLEETS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of every server's log beside a failure."""
    report = yield
    if report.failed:
        named = {server.name: server for server in item.config.stash.get(SERVERS, [])}
        report.sections += [(f"log of the {name}", server.log_tail()) for name, server in named.items()]
    return report


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> Iterator[list[Server]]:
    """Yield a list of servers. Those in it are stopped at the end of the session, the last one first."""
    started = pytestconfig.stash.setdefault(SERVERS, [])
    try:
        yield started
    finally:
        for server in reversed(started):
            server.stop()


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def model() -> Path:
    """Return the folder of the model, which is made again if its source has changed."""
    if not is_complete():
        pytest.exit("there is no engine environment; `make test-engine` makes it", returncode=1)
    return make_model()


@pytest.fixture(scope="session", params=FLEETS)
def fleet(request: pytest.FixtureRequest) -> str:
    """Return the name in `FLEETS` of the engines that run."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def running_fleet(fleet: str, servers: list[Server], model: Path, logs: Path) -> Iterator[tuple[Engine, ...]]:
    """Start the engines of the fleet, which run until its last test has ended."""
    engines = FLEETS[fleet].engines(fleet, model, logs)
    servers.extend(engines)
    try:
        with running(engines):
            yield engines
    finally:
        for engine in engines:
            servers.remove(engine)


@pytest.fixture(scope="session")
def start_router(servers: list[Server], logs: Path) -> StartRouter:
    """Return a function that starts a router before given engines, with given flags."""

    def start(name: str, engines: tuple[Engine, ...], *flags: str) -> Router:
        router = Router(name, engines, flags, logs / name)
        servers.append(router)
        router.start()
        router.wait_ready("/ready", ROUTER_START_SECONDS)
        return router

    return start


@pytest.fixture
def engines(running_fleet: tuple[Engine, ...]) -> tuple[Engine, ...]:
    """Return all engines of the fleet, and restart those that a test has killed."""
    for engine in running_fleet:
        if not engine.alive:
            engine.start_and_wait()
    return running_fleet


@pytest.fixture(scope="session")
def router_of_all(start_router: StartRouter, fleet: str, running_fleet: tuple[Engine, ...]) -> Iterator[Router]:
    router = start_router(f"router of the {fleet}", running_fleet)
    yield router
    router.stop()


@pytest.fixture
def router(router_of_all: Router, engines: tuple[Engine, ...]) -> Iterator[Router]:
    """Yield a router with default settings before all engines. The test fails if it leaves a request behind."""
    wait_until(
        lambda: all(router_of_all.worker(engine)["healthy"] for engine in engines), HEALTHY_SECONDS, "all are healthy"
    )
    yield router_of_all
    assert_nothing_left(router_of_all, engines)


@pytest.fixture(scope="session")
def narrow_router_of_first(
    start_router: StartRouter, fleet: str, running_fleet: tuple[Engine, ...]
) -> Iterator[Router]:
    router = start_router(f"narrow router of the {fleet}", running_fleet[:1], f"--max-inflight={NARROW}")
    yield router
    router.stop()


@pytest.fixture
def narrow_router(narrow_router_of_first: Router, engines: tuple[Engine, ...]) -> Iterator[Router]:
    """Yield a router that gives the first engine at most `NARROW` requests at a time.

    The test fails if it leaves a request behind.
    """
    yield narrow_router_of_first
    assert_nothing_left(narrow_router_of_first, engines[:1])


@pytest.fixture
def unpolled_router(start_router: StartRouter, engines: tuple[Engine, ...]) -> Iterator[Router]:
    """Start a router that polls all engines once only: it learns of later events by its calls alone."""
    router = start_router("unpolled router", engines, "--poll-interval=3600")
    yield router
    assert_nothing_left(router, engines)
    router.stop()


def assert_nothing_left(router: Router, engines: tuple[Engine, ...]) -> None:
    """Check that soon after the last answer, neither the router nor an engine counts a request."""
    router.wait_settled()
    alive = [engine for engine in engines if engine.alive]
    wait = max([engine.drop_seconds for engine in alive], default=0)
    wait_until(lambda: all(engine.load() == Load(0, 0) for engine in alive), wait, "the engines are idle")
