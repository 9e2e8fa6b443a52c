"""The HTTP server of each process: uvicorn, with a drain of the router's own."""

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from router.config.settings import Settings
from router.front.drain import Drain
from router.front.http.connection import connection_class
from router.front.http.connection_limits import Connections
from router.runtime import open_files
from router.runtime.gc_tuning import tune_collector
from router.runtime.tls import CHECK_TICKS, Tls
from router.telemetry.logs.log_format import set_up_log

log = logging.getLogger("router")

GRACE_SECONDS: Final = 5
"""Seconds that connections have to close once no call is in flight."""
CONTROL_IDLE_SECONDS: Final = 30
"""Seconds for which the scheduler's process keeps an idle connection of a front: longer than the front does."""
REPEAT_SECONDS: Final = 0.1
"""Within these seconds of a signal, another of its kind is the same one, sent twice: nobody presses Ctrl-C so fast."""
SWITCH_SECONDS: Final = 0.0005
"""Time after which the event loop gets the GIL back from a parsing thread: a tenth of Python's default."""


def set_up_process(settings: Settings, name: str = "") -> None:
    """Set up the log, the garbage collector and the switch interval. `name`: of this process, for the log."""
    set_up_log(settings.log_level, settings.log_format, name)
    if settings.log_level == "info":
        for chatty in ("uvicorn.error", "httpx"):  # httpx logs every poll
            logging.getLogger(chatty).setLevel(logging.WARNING)
    tune_collector()
    sys.setswitchinterval(SWITCH_SECONDS)


def defer_termination() -> None:
    """Keep a SIGTERM that arrives from now on for the `DrainingServer` of this process, which is about to start.

    The server has a handler of its own, and raises the signal again after its end: then nothing is to happen.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def check_files(settings: Settings) -> None:
    """Raise the limit of open files as far as the system allows, and log a warning if it is too low for clients."""
    in_flight = None if settings.window == "off" else settings.max_inflight
    wanted = open_files.needed(settings.max_connections, len(settings.workers()), in_flight)
    limit = open_files.raise_limit()
    if limit < wanted:
        text = "%d open files are allowed (ulimit -n), and --max-connections %d may need %d"
        log.warning(text, limit, settings.max_connections, wanted)


def build_tls(settings: Settings) -> Tls | None:
    """Return the TLS of the settings; None without a certificate. Raises ConfigError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Tls(settings.tls_cert, settings.tls_key)


def client_server_config(app: ASGIApp, connections: Connections, tls: Tls | None, *, lifespan: bool) -> uvicorn.Config:
    """Return the configuration of a server for clients.

    `tls`: its certificate, None for plain HTTP; `lifespan`: whether the application has one.
    """
    config = _server_config(app)
    config.http = connection_class(connections, tls)
    config.lifespan = "on" if lifespan else "off"
    return config


def control_server_config(app: ASGIApp, path: str) -> uvicorn.Config:
    """Return the configuration of a server for fronts at a Unix socket."""
    config = _server_config(app)
    config.uds = path
    config.timeout_keep_alive = CONTROL_IDLE_SECONDS
    config.date_header = False
    return config


def _server_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # any client could forge its address with these
        server_header=False,
    )


class EndSignals:
    """Tells the second signal to end from one that is sent twice.

    Whoever ends a group of processes may send the signal to their leader, too: `timeout` of the GNU coreutils does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[int, float] | None = None

    def is_new(self, number: int) -> bool:
        """Return whether a signal that has arrived now is not the last one once more."""
        now, last = self._clock(), self._last
        self._last = number, now
        return last is None or last[0] != number or now - last[1] > REPEAT_SECONDS


class DrainingServer(uvicorn.Server):
    """Reports that it listens, and keeps accepting connections during a drain, so that calls are refused with an
    answer.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain,
        on_started: Callable[[], None],
        tls: Tls | None = None,
        *,
        drains_early: bool = False,
        supervised: bool = False,
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        """`tls`: reloaded while the server runs; `drains_early`: whether there may be something to drain before the
        server has started; `supervised`: whether a supervisor says when to cut calls, and not a second signal.
        `on_drained`: called once when the drain is over; the server then refuses calls until `let_end`. None: it ends
        then.
        """
        super().__init__(config)
        self._drain = drain
        self._on_started = on_started
        self._tls = tls
        self._drains_early = drains_early
        self._supervised = supervised
        self._signals = EndSignals()
        self._on_drained = on_drained
        self._may_end = on_drained is None

    def end_now(self) -> None:
        """Cut the calls in flight, and end."""
        self.config.timeout_graceful_shutdown = 0
        self.should_exit = True

    def let_end(self) -> None:
        """Have it end as soon as its drain is over."""
        self._may_end = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # `handle_exit` is in place, so the signal that `defer_termination` keeps can come.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def on_tick(self, counter: int) -> bool:
        if self._tls is not None and counter % CHECK_TICKS == 0:
            self._tls.reload_if_changed()
        if self._drain.begun and self._drain.over and not self.should_exit:
            self._end_drain()
        return await super().on_tick(counter)

    def _end_drain(self) -> None:
        if self._on_drained is not None:
            self._on_drained()
            self._on_drained = None
        if self._may_end:
            self.should_exit = True
            self.config.timeout_graceful_shutdown = GRACE_SECONDS if self._drain.idle else 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain at the first signal; exit at once at a second one, or if the server has not started."""
        if not self._signals.is_new(sig) or (self._drain.begun and self._supervised):
            return
        if (self.started or self._drains_early) and not self._drain.begun:
            self._drain.begin()
            return
        self.config.timeout_graceful_shutdown = 0
        super().handle_exit(sig, frame)
