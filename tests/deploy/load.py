"""Clients that keep a router busy until they are told to stop: two heavy ones and a light one."""

import asyncio
import threading
from types import TracebackType
from typing import Final, Self

import aiohttp

CONCURRENT: Final = {"ann": 40, "bob": 40, "light": 1}
"""Requests that each client keeps on their way."""
SHARED: Final = "Of what was said before, this is a part that each of its requests begins with. " * 50
"""4,000 characters."""


class Load(threading.Thread):
    """A thread with an event loop of its own, as long as it is entered."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self.answered = 0
        """Whole answers so far."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cut what is under way."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self.join()

    def run(self) -> None:
        """Until the end of the context."""
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
        """One request after the other; after a refusal a little later."""
        turn = 0
        while True:
            turn += 1
            own = f"{client} asks for the {turn}. time, as number {number}. " * (1 if client == "light" else 100)
            body = {"model": "emulated", "prompt": client + SHARED + own, "max_tokens": 16, "stream": True}
            try:
                async with http.post(
                    "/v1/completions", json=body, headers={"authorization": f"Bearer {client}"}
                ) as answer:
                    told = await answer.read()
            except aiohttp.ClientError:
                continue
            if answer.status == 200 and told.endswith(b"[DONE]\n\n"):
                self.answered += 1
            else:
                await asyncio.sleep(0.1)
