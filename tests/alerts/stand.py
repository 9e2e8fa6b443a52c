"""A router and emulated workers as processes, watched by Prometheus."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Self

from tests.engine.processes import Server, wait_until
from tests.engine.wire import get

from .callers import Callers
from .prometheus import Prometheus

START_SECONDS: Final = 60.0
CALM_SECONDS: Final = 60.0
"""Timeout for an alert not to fire before its fault: another's fault or a busy machine may have set it off."""
FIRING_SECONDS: Final = 120.0
"""Timeout for an alert to fire: the longest window and the longest `for:` are a minute each here."""


class Stand:
    """The processes of one test."""

    def __init__(self, folder: Path, workers: Sequence[Sequence[str]], settings: Sequence[str]) -> None:
        """Prepare the processes. `workers`: the flags of each worker; `settings`: the router's flags."""
        self.workers = [
            Server(f"worker-{number}", _python("workers", *flags), {}, folder / f"worker-{number}.log")
            for number, flags in enumerate(workers)
        ]
        urls = [word for worker in self.workers for word in ("--worker", worker.url)]
        self.router = Server("router", _python("router", "serve", *urls, *settings), {}, folder / "router.log")
        self.prometheus = Prometheus(folder, self.router.url.removeprefix("http://"))
        self.callers = Callers()
        self.fired: set[str] = set()
        """The alerts that were expected and have fired."""
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        """Start everything and wait until Prometheus has scraped the router."""
        with ExitStack() as ending:
            self._start(ending)
            self._ending = ending.pop_all()
        return self

    def _start(self, ending: ExitStack) -> None:
        for server in (*self.workers, self.router, self.prometheus):
            ending.callback(server.stop)
            server.start()
        for worker in self.workers:
            worker.wait_ready("/health", START_SECONDS)
        self.router.wait_ready("/ready", START_SECONDS)
        self.prometheus.wait_ready("/-/ready", START_SECONDS)
        ending.enter_context(self.callers)
        wait_until(self.prometheus.scrapes, START_SECONDS, "Prometheus scrapes the router")

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self._ending.close()

    @property
    def servers(self) -> list[Server]:
        """All processes."""
        return [self.router, *self.workers, self.prometheus]

    @contextmanager
    def fires(self, *alerts: str) -> Iterator[None]:
        """Expect that these alerts do not fire before the block, and that its fault makes each of them fire."""
        seen: list[Any] = []
        firing: set[str] = set()
        wait_until(lambda: self.prometheus.firing().isdisjoint(alerts), CALM_SECONDS, f"{', '.join(alerts)} rest")
        yield

        def fired() -> bool:
            seen.append(self.prometheus.alerts())
            firing.update(self.prometheus.firing())
            return firing.issuperset(alerts)

        wait_until(fired, FIRING_SECONDS, f"{', '.join(alerts)} fire", seen)
        self.fired |= set(alerts)

    def start_another(self, worker: Server, *flags: str) -> None:
        """Start a worker with other flags at the port of one that was killed."""
        other = Server(f"{worker.name}-again", _python("workers", *flags, port=worker.port), {}, worker.log)
        self._ending.callback(other.stop)
        other.start()

    def start_replica(self, *settings: str) -> Server:
        """Start another router in front of the same workers, and wait until it is ready. `settings`: its flags."""
        urls = [word for worker in self.workers for word in ("--worker", worker.url)]
        other = Server("replica", _python("router", "serve", *urls, *settings), {}, self.router.log)
        self._ending.callback(other.stop)
        other.start()
        other.wait_ready("/ready", START_SECONDS)
        return other

    def fairness(self) -> Any:
        """Return the router's report."""
        return get(f"{self.router.url}/fairness").json


def _python(module: str, *words: str, port: int | None = None) -> list[str]:
    return [sys.executable, "-m", module, *words, "--port", "{port}" if port is None else str(port)]
