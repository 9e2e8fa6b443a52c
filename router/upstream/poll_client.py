"""How workers are asked about themselves: by a client of its own, with answers of bounded size and time."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final, NamedTuple

import httpx

from router.errors import WorkerBroke

ANSWER_SECONDS: Final = 5.0
"""How long a worker may take over any answer."""
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Of an answer; engines send some hundred kilobytes of metrics."""


def polling_client() -> httpx.AsyncClient:
    """A client that reaches workers as calls do."""
    # Not by way of a proxy that the environment names: calls go to the workers directly, and so must polls.
    trusted = ssl.create_default_context()  # as calls do
    unlimited = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=unlimited, trust_env=False, verify=trusted)


class Reply(NamedTuple):
    """An answer that was read to its end."""

    response: httpx.Response
    body: bytes


async def fetch(client: httpx.AsyncClient, url: str, headers: Mapping[str, str], *, post: bytes | None = None) -> bytes:
    """The body of the answer to a GET, or to a POST of these bytes.

    Raises WorkerBroke for an answer that is too long or takes too long; httpx.HTTPError for none, or another status
    than 200 to 299.
    """
    reply = await fetch_any_status(client, url, headers, post=post)
    reply.response.raise_for_status()
    return reply.body


async def fetch_any_status(
    client: httpx.AsyncClient, url: str, headers: Mapping[str, str], *, post: bytes | None = None
) -> Reply:
    """The same for an answer of any status."""
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
    except TimeoutError:
        raise WorkerBroke(f"{url} did not answer in full within {ANSWER_SECONDS:g} s.") from None
    return Reply(response, b"".join(blocks))
