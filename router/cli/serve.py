"""The command `d2lpm serve`: runs the router until a signal arrives."""

import argparse
import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec

from router.cli.compiled import is_compiled
from router.cluster.handshake import read_secret
from router.cluster.tls import cluster_tls
from router.config.addresses import WorkerAddress
from router.config.policy_names import BALANCING
from router.config.settings import Settings
from router.config.sources import ABOUT, add_flags, load
from router.config.template import unread
from router.errors import ConfigError
from router.front.http.connection import accept_sockets
from router.process.server import DrainingServer, build_tls, check_files, client_server_config, set_up_process
from router.process.single import build
from router.process.supervision.supervisor import process_count, supervise
from router.runtime.command_line import INTERRUPTED
from router.runtime.emulate import EmulatedWorker, start_emulated_workers
from router.telemetry.logs.log_format import FIELDS
from router.upstream.discovery.sources import read_workers
from router.upstream.ranks.first_look import any_step_together
from router.upstream.ranks.rank_rules import RankRules
from router.upstream.worker_registry import endpoint_of

log = logging.getLogger("router")


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
    named = (settings.workers(), settings.worker_dns, settings.worker_kubernetes, settings.workers_file)
    if not any((*named, settings.emulate)):
        raise ConfigError("there is no worker: give the URL of each with --worker, or try with --emulate 2")
    if settings.cluster is not None and find_spec("redis") is None:
        raise ConfigError("cluster: this needs the package redis: pip install 'd2lpm-router[cluster]'")
    if settings.cluster_secret_file is not None:
        read_secret(settings.cluster_secret_file)
    cluster_tls(settings)  # so that files which cannot be used end the start here
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, _hang_up)
    with (
        suppress(KeyboardInterrupt),
        _listening(settings) as listeners,
        start_emulated_workers(settings.emulate) as workers,
    ):
        joined = (*settings.worker, *(WorkerAddress(url=worker.url) for worker in workers))
        settings = with_default_policy(settings.model_copy(update={"worker": joined}))
        set_up_process(settings)
        for name in unread(settings, settings.policy):
            log.warning("%s has no effect: the policy %s does not read it", name, settings.policy)
        if settings.admin_port is not None:
            settings = settings.model_copy(update={"admin_port": listeners[1].getsockname()[1]})
        with _announced(settings, listeners, workers) as on_ready:
            return _run(settings, listeners, on_ready)
    return INTERRUPTED


def _hang_up(*_: object) -> None:
    """End as after SIGTERM when the terminal is closed. A shell and the kernel may both say so, and a second SIGTERM
    would cut calls, so only the first SIGHUP counts.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def _run(settings: Settings, listeners: Sequence[socket.socket], on_ready: Callable[[], None]) -> int:
    processes, tls = process_count(settings), build_tls(settings)
    if processes > 1:
        return supervise(settings, listeners, processes - 1, on_ready)
    check_files(settings)
    router = build(settings)
    app = router.front.recorded(router, access_log=settings.access_log)
    config = client_server_config(app, router.connections, tls, lifespan=True)
    server = DrainingServer(config, router.drain, on_ready, tls)
    server.run([each for listener in listeners for each in accept_sockets(listener)])
    return 0


@contextmanager
def _announced(
    settings: Settings, listeners: Sequence[socket.socket], emulated: Sequence[EmulatedWorker]
) -> Iterator[Callable[[], None]]:
    """Log the start and the end of the router. Yields what is to be called once it listens.

    Unless the log is JSON, a greeting is printed then: whoever reads JSON wants nothing else.
    """
    began: float | None = None

    def started() -> None:
        nonlocal began
        began = time.monotonic()
        workers = len(settings.workers())
        urls = [_url(listener, "http" if settings.tls_cert is None else "https") for listener in listeners]
        fields = {
            "version": version("d2lpm-router"),
            "compiled": is_compiled(),
            "url": urls[0],
            **({"admin_url": urls[1]} if urls[1:] else {}),
            "policy": settings.policy,
            "workers": workers,
            "processes": process_count(settings),
        }
        log.info("started", extra={FIELDS: fields})
        if settings.log_format == "text":
            _print(_greeting(urls, settings.policy, workers, emulated))

    try:
        yield started
    finally:
        if began is not None:
            log.info("stopped", extra={FIELDS: {"seconds": round(time.monotonic() - began, 3)}})


def _print(text: str) -> None:
    """Print a text, if anybody still reads it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in Python's buffer would raise again when the interpreter ends.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def with_default_policy(settings: Settings) -> Settings:
    """Return the settings with the policy that balances, if none is set and ranks of workers step together.

    Only what the settings say and what workers answer now decides: the scheduler keeps its policy while it runs.
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


@contextmanager
def _listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Listen where clients connect and, if that is another port, where operators do. Raises ConfigError."""
    addresses = [(settings.host, settings.port)]
    if settings.admin_port is not None:
        addresses.append((settings.admin_host or settings.host, settings.admin_port))
    with ExitStack() as stack:
        yield [stack.enter_context(_listener(*address)) for address in addresses]


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # socket.create_server names the address again
        hint = "; stop what listens there, or choose another port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}{hint}") from None


def _url(listener: socket.socket, scheme: str) -> str:
    """Return a URL at which this machine reaches the router."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _greeting(urls: Sequence[str], policy: str, workers: int, emulated: Sequence[EmulatedWorker]) -> str:
    """Return the lines printed once the router listens. `urls`: its own, and that for operators if there is one."""
    url = urls[0]
    lines = [f"d2lpm: listening on {url}, policy {policy}, workers: {workers}"]
    lines += [f"For operators: {each}" for each in urls[1:]]
    if not emulated:
        return "\n".join([*lines, "The models it serves:", f"  curl {url}/v1/models"])
    messages = [{"role": "user", "content": "Hello"}]
    call = {"model": emulated[0].model, "stream": True, "max_tokens": 32, "messages": messages}
    lines += [
        f"Emulated workers: {len(emulated)}. They run no model, and their answers are made-up text.",
        "Try it:",
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(call)}'",
    ]
    return "\n".join(lines)
