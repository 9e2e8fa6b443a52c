"""Unix sockets for httpcore, on asyncio's streams.

httpcore's own, which are anyio's, wait for data beside the loop's transports: if a read is given up in the turn of
uvloop in which its data arrives, an error of theirs is logged.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httpcore


class UnixSockets(httpcore.AsyncNetworkBackend):
    """Connects a pool of httpcore to a Unix socket."""

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore gives it
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        assert not socket_options  # the pool has none
        async with _limited(timeout, httpcore.ConnectTimeout, httpcore.ConnectError):
            return _Stream(*await asyncio.open_unix_connection(path))


class _Stream(httpcore.AsyncNetworkStream):
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore gives it
        async with _limited(timeout, httpcore.ReadTimeout, httpcore.ReadError):
            return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore gives it
        async with _limited(timeout, httpcore.WriteTimeout, httpcore.WriteError):
            self._writer.write(buffer)
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()

    def get_extra_info(self, info: str) -> object:
        """Say whether the other side has closed the connection, which is all that a pool asks of one in use by none."""
        return self._reader.at_eof() if info == "is_readable" else None


@asynccontextmanager
async def _limited(
    seconds: float | None, late: type[httpcore.TimeoutException], broken: type[httpcore.NetworkError]
) -> AsyncIterator[None]:
    """Raise `late` after these seconds, None for no limit, and `broken` for an error of the system."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise broken(str(error)) from error
