"""Ten clients that each stream a short answer repeatedly, on a new connection each time."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Final

CLIENTS: Final = 10
TOKENS: Final = 16
PATIENCE: Final = 60.0
"""Seconds after which a call has failed."""
BODY: Final = b'{"model":"m","stream":true,"max_tokens":%d,"messages":[{"role":"user","content":"hello"}]}' % TOKENS


@dataclass(slots=True)
class Polite:
    """The outcomes of the polite clients' calls."""

    firsts: list[float] = field(default_factory=list)
    """Seconds to the first token."""
    wholes: list[float] = field(default_factory=list)
    """Seconds to the end."""
    failures: list[str] = field(default_factory=list)

    async def call(self, host: str, port: int, name: str) -> None:
        """Make one call, and record a failure if it fails."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                first, answer = await _stream(host, port, name)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self.failures.append(f"{type(error).__name__} after {time.monotonic() - began:.1f} s")
            return
        if not answer.startswith(b"HTTP/1.1 200 ") or b"[DONE]" not in answer:
            self.failures.append(answer.partition(b"\r\n")[0].decode() or "no answer")
            return
        self.firsts.append(first - began)
        self.wholes.append(time.monotonic() - began)


async def _stream(host: str, port: int, name: str) -> tuple[float, bytes]:
    """Return the time of the first token, and the whole answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (name.encode(), len(BODY), BODY)
        )
        answer = await reader.readuntil(b"\r\n\r\n")
        if answer.startswith(b"HTTP/1.1 200 "):
            answer += await reader.readuntil(b"\n\n")
        first = time.monotonic()
        answer += await reader.read(-1)
        return first, answer
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def polite_clients(host: str, port: int) -> AsyncIterator[Polite]:
    """Run the polite clients while the context is entered; calls in flight at its end are completed."""
    seen, over = Polite(), False

    async def repeat(name: str) -> None:
        while not over:
            await seen.call(host, port, name)

    tasks = [asyncio.ensure_future(repeat(f"polite-{number}")) for number in range(CLIENTS)]
    yield seen
    over = True
    await asyncio.gather(*tasks)


def p95(seconds: list[float]) -> float:
    """Return the 95th percentile of the times."""
    return quantiles(seconds, n=20)[-1] if len(seconds) > 1 else sum(seconds)
