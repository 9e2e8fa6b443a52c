"""Fleets of real vLLM and SGLang servers with a tiny random model, one fleet after the other, and routers before them.

`make test-engine` runs this folder. A test that takes `engines`, or what depends on it, runs with two vLLM servers and
with two SGLang servers, or with those fleets that its mark names: `@pytest.mark.fleets("vllm", "mixed")`.
"""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from .environment import is_complete
from .fleet import ENGINE_START_SECONDS, FLEETS, NARROW, Engine, Load, Router, make_model
from .processes import Server, wait_until

StartRouter = Callable[..., Router]
"""Takes a name, the engines, and flags."""
HERE = Path(__file__).parent
ROUTER_START_SECONDS = 20.0
USUAL_FLEETS = "vllm", "sglang"
SERVERS: pytest.StashKey[list[Server]] = pytest.StashKey()
"""All that were started in this session."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out unless it is named: its servers need an environment and half a minute of their own."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    asked = any(HERE in (path, *path.parents) for path in named)
    return None if asked or HERE not in collection_path.parents else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests with fleets that they are not for, and put the others in the order of the fleets."""
    left_out = [item for item in items if not is_for_its_fleet(item)]
    config.hook.pytest_deselected(items=left_out)
    order = list(FLEETS)
    items[:] = [item for item in items if item not in set(left_out)]
    items.sort(key=lambda item: order.index(name) if (name := fleet_of(item)) else -1)


def fleet_of(item: pytest.Item) -> str | None:
    """The fleet that a test runs with."""
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
    """What is put here ends with the session, the last one first."""
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
    """The model's folder, made anew when its source has changed."""
    if not is_complete():
        pytest.exit("there is no engine environment; `make test-engine` makes it", returncode=1)
    return make_model()


@pytest.fixture(scope="session", params=FLEETS)
def fleet(request: pytest.FixtureRequest) -> str:
    """Which engines run: a name in `FLEETS`."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def running_fleet(fleet: str, servers: list[Server], model: Path, logs: Path) -> Iterator[tuple[Engine, ...]]:
    """Its engines, as long as tests for this fleet run."""
    engines = FLEETS[fleet].engines(fleet, model, logs)
    servers.extend(engines)
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready(engine.ready_path, ENGINE_START_SECONDS)
        yield engines
    finally:
        for engine in engines:
            engine.kill()  # an SGLang takes longer to end than one may wait for it
            servers.remove(engine)


@pytest.fixture(scope="session")
def start_router(servers: list[Server], logs: Path) -> StartRouter:
    """Start a router before these engines, with these flags."""

    def start(name: str, engines: tuple[Engine, ...], *flags: str) -> Router:
        router = Router(name, engines, flags, logs / name)
        servers.append(router)
        router.start()
        router.wait_ready("/ready", ROUTER_START_SECONDS)
        return router

    return start


@pytest.fixture
def engines(running_fleet: tuple[Engine, ...]) -> tuple[Engine, ...]:
    """All engines of the fleet, started again where a test has killed one."""
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
    """The router with its default settings before all engines. The test fails if it leaves anything behind."""
    wait_until(lambda: all(router_of_all.worker(engine)["healthy"] for engine in engines), 10, "all are healthy")
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
    """A router that gives the first engine `NARROW` requests at a time. The test fails if it leaves anything behind."""
    yield narrow_router_of_first
    assert_nothing_left(narrow_router_of_first, engines[:1])


@pytest.fixture
def unpolled_router(start_router: StartRouter, engines: tuple[Engine, ...]) -> Iterator[Router]:
    """A router that has polled all engines once and does not again: what happens later, it sees by its calls alone."""
    router = start_router("unpolled router", engines, "--poll-interval=3600")
    yield router
    assert_nothing_left(router, engines)
    router.stop()


def assert_nothing_left(router: Router, engines: tuple[Engine, ...]) -> None:
    """Soon after the last answer, neither the router nor an engine counts a request."""
    wait_until(lambda: router.unfinished() == 0, 5, f"the {router.name} counts nothing as queued or running")
    alive = [engine for engine in engines if engine.alive]
    wait = max([engine.drop_seconds for engine in alive], default=0)
    wait_until(lambda: all(engine.load() == Load(0, 0) for engine in alive), wait, "the engines are idle")
