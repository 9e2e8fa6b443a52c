"""`python -m workers`: one emulated worker as a process.

Prints one line on standard output when it accepts connections. SIGTERM and SIGINT end it at once, streams included,
with exit status 0.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from threading import Thread

import uvicorn
import uvloop

from workers.app import WorkerApp
from workers.settings import WorkerSettings, parse_settings


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse_settings(sys.argv[1:] if arguments is None else arguments)
    listener = socket.create_server((settings.host, settings.port), backlog=2048)
    return uvloop.run(serve(settings, listener))


async def serve(settings: WorkerSettings, listener: socket.socket) -> int:
    """Serve on `listener` until a signal, or the parent's end; the process's exit status.

    The status is 1 if the engine's task failed; its exception is printed.
    """
    app = WorkerApp(settings)
    server = uvicorn.Server(_config(app))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    if settings.exit_with_parent:
        Thread(target=_exit_with_parent, args=(server,), daemon=True).start()
    engine = asyncio.create_task(app.loop.run())
    engine.add_done_callback(lambda _: setattr(server, "should_exit", True))
    host, port = listener.getsockname()[:2]
    print(f"workers: {settings.dialect} {settings.model} on http://{host}:{port}", flush=True)
    await server.serve([listener])
    if engine.done():
        engine.result()
    engine.cancel()
    return 0


def _config(app: WorkerApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # it reports every stream that a shutdown cuts as an error
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=0,
    )


def _exit_with_parent(server: uvicorn.Server) -> None:
    """Read standard input to its end: the kernel closes the pipe when the parent dies, however it dies."""
    while os.read(0, 4096):
        pass
    server.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
