"""The HTTP client for polls, whose answers are bounded in size and time."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final, NamedTuple

import httpx

from router.errors import WorkerBroke

ANSWER_SECONDS: Final = 5.0
"""Time within which any answer must be complete."""
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Largest accepted answer; engines send a few hundred kilobytes of metrics."""


def polling_client() -> httpx.AsyncClient:
    """Return a client that reaches workers the same way as calls do: no proxy of the environment, same trusted CAs."""
    trusted = ssl.create_default_context()
    unlimited = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=unlimited, trust_env=False, verify=trusted)


REFUSED: Final = "All connection attempts failed"
"""What httpx says where no server listens, or a network does not let through."""


def unconnected(error: httpx.ConnectError) -> str:
    """Return why there is no connection: nothing listens, or the URL has a wrong name, or TLS fails."""
    return "it refuses connections" if str(error) in ("", REFUSED) else f"no connection ({error})"


class AnswerLate(WorkerBroke):
    """An answer was not complete in time."""


class Reply(NamedTuple):
    """A complete answer."""

    response: httpx.Response
    body: bytes


async def fetch(client: httpx.AsyncClient, url: str, headers: Mapping[str, str], *, post: bytes | None = None) -> bytes:
    """Send a GET, or a POST of these bytes, and return the body of the answer.

    Raises WorkerBroke if the answer is too long, AnswerLate if it takes too long, and httpx.HTTPError if there is none
    or its status is not 2xx.
    """
    reply = await fetch_any_status(client, url, headers, post=post)
    if not reply.response.is_success:  # in words of our own: those of httpx lead to a page about the status
        message = f"{reply.response.url.path} was answered with status {reply.response.status_code}"
        raise httpx.HTTPStatusError(message, request=reply.response.request, response=reply.response)
    return reply.body


async def fetch_any_status(
    client: httpx.AsyncClient, url: str, headers: Mapping[str, str], *, post: bytes | None = None
) -> Reply:
    """Do the same as `fetch`, but accept any status."""
    method, blocks, size = "GET" if post is None else "POST", [], 0
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            client.stream(method, url, headers=headers, content=post) as response,
        ):
            async for block in response.aiter_bytes():
                blocks.append(block)
                size += len(block)
                if size > MAX_ANSWER_BYTES:
                    raise WorkerBroke(f"{response.url.path} is longer than {MAX_ANSWER_BYTES} bytes.")
    except (TimeoutError, httpx.TimeoutException):
        raise AnswerLate(f"{url} did not answer in full within {ANSWER_SECONDS:g} s.") from None
    return Reply(response, b"".join(blocks))
