"""Two real vLLM servers with a tiny random model, then two SGLang servers, and routers before them.

`make test-engine` runs this folder. A test that takes `kind`, or what depends on it, runs once for each engine.
pytest runs all of vLLM's first, and ends those servers before it starts SGLang's.
"""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from .environment import is_complete
from .fleet import ENGINE_START_SECONDS, ENGINES, NARROW, Engine, Load, Router, SglangEngine, VllmEngine, make_model
from .processes import Server, wait_until

StartRouter = Callable[..., Router]
"""Takes a name, the engines, and flags."""
HERE = Path(__file__).parent
ROUTER_START_SECONDS = 20.0
SERVERS: pytest.StashKey[list[Server]] = pytest.StashKey()
"""All that were started in this session."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out unless it is named: its servers need an environment and half a minute of their own."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    asked = any(HERE in (path, *path.parents) for path in named)
    return None if asked or HERE not in collection_path.parents else True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of every server's log beside a failure."""
    report = yield
    if report.failed:
        for server in item.config.stash.get(SERVERS, []):
            report.sections.append((f"log of the {server.name}", server.log_tail()))
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


@pytest.fixture(scope="session", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> type[VllmEngine | SglangEngine]:
    """Which engine."""
    return ENGINES[request.param]


@pytest.fixture(scope="session")
def engine_pair(
    servers: list[Server], kind: type[VllmEngine | SglangEngine], model: Path, logs: Path
) -> Iterator[tuple[Engine, Engine]]:
    """Two of that kind."""
    first, second = (
        kind(f"{which} {kind.dialect}", model, logs / f"{which}-{kind.dialect}") for which in ("first", "second")
    )
    yield from started(servers, first, second)


def started(servers: list[Server], first: Engine, second: Engine) -> Iterator[tuple[Engine, Engine]]:
    """Engines that are ready, for as long as a fixture lasts."""
    engines = first, second
    servers.extend(engines)
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait_ready(engine.ready_path, ENGINE_START_SECONDS)
    yield engines
    for engine in engines:
        engine.stop()


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
def engines(engine_pair: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Both engines, started again where a test has killed one."""
    for engine in engine_pair:
        if not engine.alive:
            engine.start_and_wait()
    return engine_pair


@pytest.fixture(scope="session")
def router_of_both(start_router: StartRouter, engine_pair: tuple[Engine, Engine]) -> Router:
    return start_router("router", engine_pair)


@pytest.fixture
def router(router_of_both: Router, engines: tuple[Engine, Engine]) -> Iterator[Router]:
    """The router with its default settings before both engines. The test fails if it leaves anything behind."""
    wait_until(lambda: all(router_of_both.worker(engine)["healthy"] for engine in engines), 10, "both are healthy")
    yield router_of_both
    assert_nothing_left(router_of_both, engines)


@pytest.fixture(scope="session")
def narrow_router_of_first(start_router: StartRouter, engine_pair: tuple[Engine, Engine]) -> Router:
    return start_router("narrow router", engine_pair[:1], f"--max-inflight={NARROW}")


@pytest.fixture
def narrow_router(narrow_router_of_first: Router, engines: tuple[Engine, Engine]) -> Iterator[Router]:
    """A router that gives the first engine `NARROW` requests at a time. The test fails if it leaves anything behind."""
    yield narrow_router_of_first
    assert_nothing_left(narrow_router_of_first, engines[:1])


@pytest.fixture
def unpolled_router(start_router: StartRouter, engines: tuple[Engine, Engine]) -> Iterator[Router]:
    """A router that has polled both engines once and does not again: what happens later, it sees by its calls alone."""
    router = start_router("unpolled router", engines, "--poll-interval=3600")
    yield router
    assert_nothing_left(router, engines)


def assert_nothing_left(router: Router, engines: tuple[Engine, ...]) -> None:
    """Soon after the last answer, neither the router nor an engine counts a request."""
    wait_until(lambda: router.unfinished() == 0, 5, f"the {router.name} counts nothing as queued or running")
    alive = [engine for engine in engines if engine.alive]
    wait_until(lambda: all(engine.load() == Load(0, 0) for engine in alive), 5, "the engines are idle")
