"""I/O: the questions that a decode engine asks a prefill engine, over HTTP or within one process."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import httpx

Message = Mapping[str, object]
Answering = Callable[[Message], Awaitable[Message]]

PATH = "/emulated/transfer"
"""Not a path of any real engine: it stands for the transfer protocols. Served at the side port alone."""


class Unreachable(Exception):
    """Nobody answers at this address."""


class Exchange(Protocol):
    """Carries questions to the engine at an address."""

    async def ask(self, address: str, question: Message) -> Message:
        """Return the answer. Raises Unreachable."""

    async def close(self) -> None:
        """Close all connections."""


class HttpExchange:
    """Between processes."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            timeout=30.0, trust_env=False, verify=False
        )  # plain HTTP: no certificates to load

    async def ask(self, address: str, question: Message) -> Message:
        """Return the answer. Raises Unreachable if there is none, or no 200."""
        try:
            response = await self._client.post(address + PATH, json=dict(question))
            response.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unreachable(address) from error
        answer: Message = response.json()
        return answer

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


class LocalExchange:
    """Within one process: `engines` answer at the addresses that are their keys."""

    def __init__(self) -> None:
        self.engines: dict[str, Answering] = {}

    async def ask(self, address: str, question: Message) -> Message:
        """Return the answer. Raises Unreachable if nobody has this address."""
        answering = self.engines.get(address)
        if answering is None:
            raise Unreachable(address)
        return await answering(question)

    async def close(self) -> None:
        """Do nothing: there are no connections."""
