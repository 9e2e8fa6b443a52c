"""The command `d2lpm serve`: runs the router until a signal arrives."""

import argparse
import asyncio
import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from router.config.settings import Settings, WorkerAddress
from router.config.sources import ABOUT, add_flags, load
from router.errors import ConfigError
from router.front.http.connection import accept_sockets
from router.process.server import DrainingServer, check_files, client_server_config, set_up_process
from router.process.single import build
from router.process.supervision.supervisor import process_count, supervise
from router.runtime.command_line import INTERRUPTED
from router.runtime.emulate import EmulatedWorker, start_emulated_workers
from router.upstream.discovery import read_workers
from router.upstream.ranks.first_look import any_step_together
from router.upstream.ranks.rank_rules import RankRules
from router.upstream.worker_registry import endpoint_of

BALANCING: Final = "dlpm_balance"
"""The default policy where ranks step together."""


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
    if not any((settings.workers(), settings.worker_dns, settings.workers_file, settings.emulate)):
        raise ConfigError("there is no worker: give the URL of each with --worker, or try with --emulate 2")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        suppress(KeyboardInterrupt),
        _listener(settings) as listener,
        start_emulated_workers(settings.emulate) as workers,
    ):
        joined = (*settings.worker, *(WorkerAddress(url=worker.url) for worker in workers))
        settings = with_default_policy(settings.model_copy(update={"worker": joined}))
        greeting = _greeting(listener, settings.policy, len(settings.workers()), workers)
        processes = process_count(settings.processes)
        if processes > 1:
            return supervise(settings, listener, processes - 1, lambda: print(greeting, flush=True))
        set_up_process(settings)
        check_files(settings)
        app = build(settings)
        config = client_server_config(app, app.connections, access_log=settings.access_log, lifespan=True)
        server = DrainingServer(config, app.drain, lambda: print(greeting, flush=True))
        server.run(accept_sockets(listener))
        return 0
    return INTERRUPTED


def with_default_policy(settings: Settings) -> Settings:
    """Return the settings with the policy that balances, if none is set and ranks of workers step together.

    Only what the settings say and workers answer now counts: the scheduler keeps its policy for good.
    """
    if "policy" in settings.model_fields_set:
        return settings
    rules = RankRules(settings.ranks, settings.barrier)
    endpoints = [endpoint_of(worker, settings) for worker in settings.workers()]
    if settings.workers_file is not None:
        endpoints += [endpoint_of(worker, settings) for worker in read_workers(settings.workers_file)]
    if not asyncio.run(any_step_together(endpoints, rules)):
        return settings
    return settings.model_copy(update={"policy": BALANCING})


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
