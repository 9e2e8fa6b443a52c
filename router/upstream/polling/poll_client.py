"""The HTTP client for polls, whose answers are bounded in size and time.

It is the client of the data path: with a general client library, a poll took more than ten times the CPU, and each
worker is polled several times a second.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Self
from urllib.parse import urlsplit

from router.errors import NoWorker, WorkerBroke, WorkerUnreachable
from router.upstream.http_client import WorkerClient, WorkerResponse

ANSWER_SECONDS: Final = 5.0
"""Time within which any answer must be complete."""
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Largest accepted answer; engines send a few hundred kilobytes of metrics."""
FORGET_SECONDS: Final = 60.0
"""Seconds without a poll after which a server is forgotten, when another one is polled for the first time."""


class AnswerLate(WorkerBroke):
    """An answer was not complete in time."""


class Unconnected(WorkerBroke):
    """There is no connection: nothing listens, or the URL has a wrong name, or TLS fails."""


class OtherStatus(WorkerBroke):
    """An answer has a status that is not 2xx."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__(f"{path} was answered with status {status}")
        self.answered = status
        """The status."""


class Reply(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes


@dataclass(slots=True)
class PolledServer:
    """A server, and the connections to it."""

    client: WorkerClient
    polled_at: float
    """When it was polled last, in seconds of the event loop's clock."""


class PollClient:
    """Sends polls to any number of servers. Idle connections are closed when the context is left.

    It reaches workers the same way as calls do: no proxy of the environment, same trusted CAs.
    """

    def __init__(self, answer_seconds: float = ANSWER_SECONDS, forget_seconds: float = FORGET_SECONDS) -> None:
        """`answer_seconds`: time within which any answer must be complete; `forget_seconds`: as `FORGET_SECONDS`."""
        self._answer_seconds = answer_seconds
        self._forget_seconds = forget_seconds
        self._trusted: ssl.SSLContext | None = None
        """Who signs certificates; None before the first poll with TLS, as it takes tens of milliseconds to read."""
        self._servers: dict[tuple[str, str], PolledServer] = {}
        """By scheme and address."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that carry no poll."""
        for server in self._servers.values():
            server.client.close()

    async def fetch(self, url: str, headers: Mapping[str, str], *, post: bytes | None = None) -> bytes:
        """Send a GET, or a POST of these bytes, and return the body of the answer.

        Raises AnswerLate if the answer takes too long, Unconnected if there is no connection, OtherStatus if the status
        is not 2xx, and WorkerBroke if the answer is too long or breaks off.
        """
        reply = await self.fetch_any_status(url, headers, post=post)
        if reply.status // 100 != 2:
            raise OtherStatus(urlsplit(url).path, reply.status)
        return reply.body

    async def fetch_any_status(self, url: str, headers: Mapping[str, str], *, post: bytes | None = None) -> Reply:
        """Do the same as `fetch`, but accept any status."""
        scheme, address, path, query, _ = urlsplit(url)
        client = self._client(scheme, address)
        method, target = "GET" if post is None else "POST", f"{path}?{query}" if query else path
        try:
            async with asyncio.timeout(self._answer_seconds):
                response = await client.send(method, target, dict(headers), post or b"")
                try:
                    return Reply(response.status, await _body(response, path))
                finally:
                    response.close()
        except TimeoutError:
            raise self._late(url) from None
        except WorkerUnreachable as error:
            raise _without_answer(error) or self._late(url) from None
        except NoWorker as error:  # it says nothing about the worker
            raise AnswerLate(error.message) from None

    def _late(self, url: str) -> AnswerLate:
        return AnswerLate(f"{url} did not answer in full within {self._answer_seconds:g} s.")

    def _client(self, scheme: str, address: str) -> WorkerClient:
        now = asyncio.get_running_loop().time()
        server = self._servers.get((scheme, address))
        if server is None:
            self._forget_before(now - self._forget_seconds)
            if scheme == "https" and self._trusted is None:
                self._trusted = ssl.create_default_context()
            client = WorkerClient(f"{scheme}://{address}", self._answer_seconds, self._trusted)
            server = self._servers[scheme, address] = PolledServer(client, now)
        server.polled_at = now
        return server.client

    def _forget_before(self, time: float) -> None:
        """Forget the servers that have not been polled since: workers come and go."""
        for name in [name for name, server in self._servers.items() if server.polled_at < time]:
            self._servers.pop(name).client.close()


async def _body(response: WorkerResponse, path: str) -> bytes:
    blocks, size = [], 0
    while block := await response.read():
        blocks.append(block)
        size += len(block)
        if size > MAX_ANSWER_BYTES:
            raise WorkerBroke(f"{path} is longer than {MAX_ANSWER_BYTES} bytes.")
    return b"".join(blocks)


def _without_answer(error: WorkerUnreachable) -> WorkerBroke | None:
    """Return why a poll got no answer; None if it took too long to connect."""
    cause = error.unconnected
    if cause is None:
        return WorkerBroke(error.message)
    if isinstance(cause, TimeoutError):
        return None
    named = isinstance(cause, socket.gaierror | ssl.SSLError)
    return Unconnected(f"no connection ({cause})" if named else "it refuses connections")
