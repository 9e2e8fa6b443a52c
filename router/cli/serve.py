"""The command `d2lpm serve`: runs the router until a signal arrives."""

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

import uvicorn

from router.config.settings import Settings, WorkerAddress
from router.config.sources import ABOUT, add_flags, load
from router.errors import ConfigError
from router.front.drain import Drain
from router.front.http.connection import accept_sockets, connection_class
from router.process.single import build
from router.runtime import open_files
from router.runtime.emulate import EmulatedWorker, start_emulated_workers
from router.runtime.gc_tuning import tune_collector
from router.telemetry.access_log import AccessLog

log = logging.getLogger("router")

GRACE_SECONDS: Final = 5
"""Seconds that connections have to close once no call is in flight."""
SWITCH_SECONDS: Final = 0.0005
"""Time after which the event loop gets the GIL back from a parsing thread: a tenth of Python's default."""
INTERRUPTED: Final = 130
"""The exit code that shells use for a command ended by SIGINT."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`: a flag for each setting."""
    parser.usage = "%(prog)s [FLAG ...]"
    parser.epilog = ABOUT
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=24)
    add_flags(parser)
    parser.set_defaults(run=lambda flags: _serve(load(flags, os.environ)))


def _serve(settings: Settings) -> int:
    """Serve until a signal arrives and the calls in flight have ended, with emulated workers if the settings want any.

    Returns 0, or `INTERRUPTED` if a second signal aborted calls.
    """
    if not any((settings.worker, settings.worker_dns, settings.workers_file, settings.emulate)):
        raise ConfigError("there is no worker: give the URL of each with --worker, or try with --emulate 2")
    _log(settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        suppress(KeyboardInterrupt),
        _listener(settings) as listener,
        start_emulated_workers(settings.emulate) as workers,
    ):
        joined = (*settings.worker, *(WorkerAddress(url=worker.url) for worker in workers))
        _check_files(settings, len(joined))
        app = build(settings.model_copy(update={"worker": joined}))
        config = uvicorn.Config(
            AccessLog(app) if settings.access_log else app,
            http=connection_class(app.connections),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # any client could forge its address with these
            server_header=False,
        )
        tune_collector()
        sys.setswitchinterval(SWITCH_SECONDS)
        server = _Server(config, app.drain, _greeting(listener, settings.policy, len(joined), workers))
        server.run(accept_sockets(listener))
        return 0
    return INTERRUPTED


def _check_files(settings: Settings, workers: int) -> None:
    """Raise the limit of open files as far as the system allows, and log a warning if it is too low."""
    in_flight = None if settings.window == "off" else settings.max_inflight
    limit, wanted = open_files.raise_limit(), open_files.needed(settings.max_connections, workers, in_flight)
    if limit < wanted:
        text = "%d open files are allowed (ulimit -n), and --max-connections %d may need %d"
        log.warning(text, limit, settings.max_connections, wanted)


def _log(settings: Settings) -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=settings.log_level.upper(),
        stream=sys.stderr,
    )
    if settings.log_level == "info":
        for chatty in ("uvicorn.error", "httpx"):  # httpx logs every poll
            logging.getLogger(chatty).setLevel(logging.WARNING)


def _listener(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None


def _greeting(listener: socket.socket, policy: str, workers: int, emulated: Sequence[EmulatedWorker]) -> str:
    """Return the lines printed once the router listens."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lines = [f"d2lpm: listening on {url}, policy {policy}, workers: {workers}"]
    if not emulated:
        return "\n".join([*lines, "The models it serves:", f"  curl {url}/v1/models"])
    messages = [{"role": "user", "content": "Hello"}]
    call = {"model": emulated[0].model, "stream": True, "max_tokens": 32, "messages": messages}
    lines += [
        f"{len(emulated)} of the workers are emulated: they run no model, and their answers are made-up text.",
        "Try it:",
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(call)}'",
    ]
    return "\n".join(lines)


class _Server(uvicorn.Server):
    """Prints a greeting once it listens, and keeps accepting connections during a drain, so that calls are refused with
    an answer.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, greeting: str) -> None:
        super().__init__(config)
        self._drain = drain
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._greeting, flush=True)

    async def on_tick(self, counter: int) -> bool:
        if self._drain.over and not self.should_exit:
            self.should_exit = True
            self.config.timeout_graceful_shutdown = GRACE_SECONDS if self._drain.idle else 0
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain at the first signal; exit at once at a second one, or if the server has not started."""
        if self.started and not self._drain.begun:
            self._drain.begin()
            return
        self.config.timeout_graceful_shutdown = 0
        super().handle_exit(sig, frame)
