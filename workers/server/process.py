"""I/O: one worker on one listening socket: the HTTP server and the engine's tasks, which start and end together."""

import asyncio
import socket

import uvicorn

from workers.server.app import WorkerApp
from workers.settings import WorkerSettings


class WorkerServer:
    """Serves once `run` is awaited; earlier connections wait in the socket's backlog."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Listen at once. Raises OSError if an address is taken, or is none of this machine."""
        ports = [settings.port, settings.side_port] if settings.disaggregated else [settings.port]
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._listeners = [socket.create_server((settings.host, port), family=family, backlog=2048) for port in ports]
        side_port = self._listeners[1].getsockname()[1] if settings.disaggregated else None
        self._app = WorkerApp(settings, side_port)
        self._server = uvicorn.Server(_config(self._app))
        self._app.die = self.die
        host, port = self._listeners[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        self.url = f"http://{host}:{port}"
        self.side_url = None if side_port is None else f"http://{host}:{side_port}"
        """Where other engines reach this one."""

    def stop(self, *_signal: object) -> None:
        """End `run` soon, cutting open streams. Callable from any thread, and as a signal handler."""
        self._server.should_exit = True

    def die(self) -> None:
        """End `run` like a process that is killed: no connection is answered any more. Called in its event loop."""
        loop = asyncio.get_running_loop()
        for server in self._server.servers:
            for listener in server.sockets:
                loop.remove_reader(listener)
        # What has just been accepted gets its transport first: asyncio loses such a socket once the server is closed.
        loop.call_soon(self._cut)

    def _cut(self) -> None:
        for server in self._server.servers:
            server.close()
        self._close_connections()
        self.stop()

    def _close_connections(self) -> None:
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.close()

    async def run(self) -> None:
        """Serve until `stop` is called. Raises the exception of a task of the engine that failed."""
        tasks = [asyncio.create_task(self._app.loop.run())]
        publisher = self._app.publisher
        if publisher is not None:
            tasks.append(asyncio.create_task(publisher.serve_replay()))
        for task in tasks:
            task.add_done_callback(self.stop)
        await self._server.serve(self._listeners)
        self._close_connections()  # those that came while it ended
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await self._app.close()
        if publisher is not None:
            await asyncio.gather(*tasks, return_exceptions=True)
            publisher.close()


def _config(app: WorkerApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # uvicorn logs every stream that a shutdown cuts as an error
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=0,
    )
