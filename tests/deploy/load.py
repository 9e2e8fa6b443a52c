"""Keeps a router busy with two heavy clients and a light one until the load is stopped."""

import asyncio
import threading
from types import TracebackType
from typing import Final, Self

import aiohttp

CONCURRENT: Final = {"ann": 40, "bob": 40, "light": 1}
"""Requests that each client keeps in flight."""
SHARED: Final = "Of what was said before, this is a part that each of its requests begins with. " * 50
"""4,000 characters that begin each prompt of a client, after the client's name."""


class Load(threading.Thread):
    """A thread with its own event loop, which sends requests while its context is entered."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self.answered = 0
        """Complete answers so far."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the calls in flight and end the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self.join()

    def run(self) -> None:
        """Send requests until the context ends."""
        self._loop.run_until_complete(self._drive())
        self._loop.close()

    async def _drive(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector) as http, asyncio.TaskGroup() as group:
            clients = [
                group.create_task(self._ask(http, client, number))
                for client, count in CONCURRENT.items()
                for number in range(count)
            ]
            await self._stopped.wait()
            for task in clients:
                task.cancel()

    async def _ask(self, http: aiohttp.ClientSession, client: str, number: int) -> None:
        """Send one request after the other, with a pause of 0.1 s after an error or an incomplete answer."""
        turn = 0
        while True:
            turn += 1
            own = f"{client} asks for the {turn}. time, as number {number}. " * (1 if client == "light" else 100)
            body = {"model": "emulated", "prompt": client + SHARED + own, "max_tokens": 16, "stream": True}
            try:
                async with http.post(
                    "/v1/completions", json=body, headers={"authorization": f"Bearer {client}"}
                ) as answer:
                    received = await answer.read()
            except aiohttp.ClientError:
                continue
            if answer.status == 200 and received.endswith(b"[DONE]\n\n"):
                self.answered += 1
            else:
                await asyncio.sleep(0.1)
