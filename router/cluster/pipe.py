"""Joins two connections: what one sends, the other receives."""

import asyncio
from contextlib import suppress
from typing import Final

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BLOCK_BYTES: Final = 64 * 1024


async def join(one: Connection, other: Connection) -> None:
    """Pass on what comes from either side until either ends, and close both."""
    ways = [asyncio.create_task(_pass_on(one[0], other[1])), asyncio.create_task(_pass_on(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        ends = await asyncio.gather(*ways, return_exceptions=True)
        for _, writer in (one, other):
            writer.close()
    for end in ends:
        if isinstance(end, Exception):
            raise end  # a defect: a side that is gone is none


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # a side that is gone ends the connection
        # With uvloop, writing to a side that has just been closed is a RuntimeError.
        while (block := await source.read(BLOCK_BYTES)) and not target.is_closing():
            target.write(block)
            await target.drain()
