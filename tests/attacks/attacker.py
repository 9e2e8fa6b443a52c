"""The hostile address as a process: `python -m tests.attacks.attacker NAME HOST PORT SECONDS`.

Each attack keeps its own pace, whatever it is answered, so that a router and a plain sink are sent the same load.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import count
from typing import Final

import uvloop

from router.runtime.open_files import raise_limit

ADDRESS: Final = "127.0.0.2"
"""The source address of the attack; all other clients are at 127.0.0.1."""
LARGE: Final = 15 * 2**20
"""Bytes of a body just below the router's limit."""
NUMBER: Final = count()


class Caller:
    """Opens one connection after the other to the target of the attack."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection that buffers little of an answer unless it is read."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.bind((ADDRESS, 0))
        raw.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(raw, self._to)
            reader, writer = await asyncio.open_connection(sock=raw)
        except OSError:
            raw.close()
            raise
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def call(self, body: bytes, *, read: bool, seconds: float, key: int | None = None) -> None:
        """Send a call under a new key or under `key`; read its answer, or leave it unread, for at most `seconds`."""
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += b"authorization: Bearer key-%d\r\ncontent-length: %d\r\n\r\n" % (
            next(NUMBER) if key is None else key,
            len(body),
        )
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds), self.connected() as (reader, writer):
                writer.write(head)
                writer.write(body)
                await writer.drain()
                if not read:
                    await asyncio.sleep(seconds)
                await reader.readuntil(b"\r\n\r\n")
                while await reader.read(2**20):
                    pass

    async def begin_body(self, seconds: float) -> None:
        """Send a head and one byte of its body, and wait."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds), self.connected() as (reader, writer):
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
                await reader.read()


def body(start: bytes, filling: bytes = b"") -> bytes:
    """Return a chat of two letters, with `start` before the messages and `filling` after them."""
    return b'{"model":"m",' + start + b'"messages":[{"role":"user","content":"hi"}]' + filling + b"}"


async def paced(seconds: float, call: Awaitable[None]) -> None:
    """Make a call that takes `seconds` in total, even if its answer comes earlier."""
    await asyncio.gather(call, asyncio.sleep(seconds))


async def long_names(caller: Caller, number: int) -> None:
    """Send a new `user`, or a new model name, of 15 MiB."""
    name = b"%d-" % next(NUMBER) + b"%" * LARGE
    sent = body(b'"user":"' + name + b'",') if number % 2 else b'{"model":"' + name + b'","messages":[]}'
    await paced(1.0, caller.call(sent, read=True, seconds=5.0))


async def large_bodies(caller: Caller, number: int) -> None:
    """Ask for a stream with 15 MiB of junk beside a short prompt; every fourth body consists of tiny objects."""
    junk = b"[{}" + b',{"":0}' * (LARGE // 7) + b"]" if number % 4 == 0 else b'"' + b"x" * LARGE + b'"'
    sent = body(b'"stream":true,"max_tokens":300,', b',"junk":' + junk)
    await paced(5.0, caller.call(sent, read=True, seconds=4.0))


async def long_answers(caller: Caller, number: int) -> None:
    """Ask for a whole answer of 50 MB; only every fourth one is read."""
    sent = body(b'"logprobs":true,"max_tokens":3200,')
    await paced(5.0, caller.call(sent, read=number % 4 == 0, seconds=5.0))


async def slow_readers(caller: Caller, number: int) -> None:  # noqa: ARG001 - as all of them
    """Ask for a stream of a megabyte under one key, and do not read it."""
    sent = body(b'"stream":true,"logprobs":true,"max_tokens":64,')
    await paced(10.0, caller.call(sent, read=False, seconds=10.0, key=0))


async def unfinished_bodies(caller: Caller, number: int) -> None:  # noqa: ARG001 - as all of them
    """Begin a body and send no more of it."""
    await paced(5.0, caller.begin_body(5.0))


Attack = Callable[[Caller, int], Awaitable[None]]
ATTACKS: Final[Mapping[str, tuple[int, float, Attack]]] = {
    "long-names": (4, 1.0, long_names),
    "large-bodies": (12, 1.0, large_bodies),
    "long-answers": (8, 1.0, long_answers),
    "slow-readers": (64, 8.0, slow_readers),
    "unfinished-bodies": (1000, 1.0, unfinished_bodies),
}
"""By name: concurrent connections, seconds over which they begin, and the attack that each one repeats."""


async def attack(name: str, host: str, port: int, seconds: float) -> None:
    """Attack for `seconds`, and leave all connections as they are then."""
    at_a_time, begin, one = ATTACKS[name]
    caller = Caller(host, port)

    async def repeat(number: int) -> None:
        await asyncio.sleep(begin * number / at_a_time)
        while True:
            await one(caller, number)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*[repeat(number) for number in range(at_a_time)])


if __name__ == "__main__":
    raise_limit()
    uvloop.run(attack(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
