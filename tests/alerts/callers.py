"""Clients of the router, in a thread with its own event loop."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

import aiohttp

from tests.engine.wire import COMPLETIONS

Body = Mapping[str, object]
PAUSE_SECONDS: Final = 0.2
"""A caller's pause after a refusal or an error."""


def completion(prompt: str, max_tokens: int = 8, **more: object) -> Body:
    """Return the body of a streamed completion with exactly this many output tokens."""
    return {
        "model": "emulated",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


class Callers(threading.Thread):
    """Callers that send one call after the other until the context ends; their answers are read to the end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.answered: dict[str, int] = {}
        """Complete answers so far, by client."""

    def __enter__(self) -> Self:
        self.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the calls in flight and end the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self.join()

    def run(self) -> None:
        """Run the callers until the context ends."""
        self._loop.run_until_complete(self._drive())
        self._loop.close()

    def keep(
        self, url: str, client: str, count: int, body: Callable[[int, int], Body], address: str | None = None
    ) -> "Callers":
        """Keep `count` calls of a client in flight at a server.

        `body`: makes a call from the number of its caller and of its turn, both from 0. `address`: the local address to
        call from. Returns the callers.
        """
        for number in range(count):
            asyncio.run_coroutine_threadsafe(self._ask(url, client, number, body, address), self._loop)
        return self

    async def _drive(self) -> None:
        self._started.set()
        await self._stopped.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(
        self, url: str, client: str, number: int, body: Callable[[int, int], Body], address: str | None
    ) -> None:
        local = (address, 0) if address else None
        turn = 0
        headers = {"authorization": f"Bearer {client}"}
        connector = aiohttp.TCPConnector(local_addr=local)
        async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:
            while True:
                whole = False
                try:
                    async with http.post(COMPLETIONS, json=body(number, turn), headers=headers) as answer:
                        whole = (await answer.read()).endswith(b"[DONE]\n\n")
                except aiohttp.ClientError:
                    pass
                turn += 1
                if whole:
                    self.answered[client] = self.answered.get(client, 0) + 1
                else:
                    await asyncio.sleep(PAUSE_SECONDS)
