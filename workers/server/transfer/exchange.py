"""I/O: the questions that a decode engine asks a prefill engine over HTTP."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol
from urllib.parse import urlsplit

import orjson

Message = Mapping[str, object]

PATH: Final = "/emulated/transfer"
"""Not a path of any real engine: it stands for the transfer protocols. Served at the side port alone."""

ANSWERED_WITHIN: Final = 30.0
"""Real seconds."""
REQUEST: Final = (
    b"POST " + PATH.encode() + b" HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b"
)


class Unreachable(Exception):
    """Nobody answers at this address."""


class Exchange(Protocol):
    """Carries questions to the engine at an address."""

    async def ask(self, address: str, question: Message) -> Message:
        """Return the answer. Raises Unreachable."""


class HttpExchange:
    """Between processes: a connection for each question, so that nothing is left open when a peer has gone."""

    async def ask(self, address: str, question: Message) -> Message:
        """Return the answer. Raises Unreachable if there is none, or no 200."""
        body = orjson.dumps(question)
        try:
            url = urlsplit(address)
            async with asyncio.timeout(ANSWERED_WITHIN):
                answer = await _exchanged(url.hostname or "", url.port or 80, REQUEST % (len(body), body))
            head, _, content = answer.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise Unreachable(address)
            message: Message = orjson.loads(content)
        except (OSError, ValueError) as error:
            raise Unreachable(address) from error
        return message


async def _exchanged(host: str, port: int, request: bytes) -> bytes:
    """Send a request, and return all that comes until the other side closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
