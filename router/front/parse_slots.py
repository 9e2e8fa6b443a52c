"""The turns of what takes long to read: bodies in threads, one at a time of each size, and long answers on the loop.

Parsing takes several times a body's length in memory, and holds Python's lock for milliseconds a megabyte: more threads
would make nobody faster. Who waits for a turn waits for one of each other owner, not for all that one has sent.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

INLINE_BYTES: Final = 64 * 1024
"""Bytes that are worked on at once, on the event loop: a millisecond or less; a longer body is given to a thread."""
LONG_BYTES: Final = 2**20
"""Bytes of a body from which on it waits for others as long, and the shorter ones do not wait for it."""


class ParseSlots:
    """One slot for bodies of more than `INLINE_BYTES` bytes, another for those of more than `LONG_BYTES`, one for long answers."""

    def __init__(self) -> None:
        self._short = ParseThread()
        self._long = ParseThread()
        self._answers = RoundRobinLock()

    async def run(self, owner: str, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on a body of so many bytes, when it is its owner's turn."""
        if size <= INLINE_BYTES:
            return work()
        return await (self._short if size <= LONG_BYTES else self._long).run(owner, work)

    async def read(self, owner: str, block: bytes, read: Callable[[bytes], None]) -> None:
        """Give a block of a long answer to `read` in parts, one of all owners' in each turn of the event loop."""
        for start in range(0, len(block), INLINE_BYTES):
            await self._answers.acquire(owner)
            try:
                read(block[start : start + INLINE_BYTES])
            finally:
                asyncio.get_running_loop().call_soon(self._answers.release)


class ParseThread:
    """One thread, for which owners wait in turn."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")
        self._turns = RoundRobinLock()

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """The result of `work`, which cannot be stopped once it has begun; cancelled before, it is not begun."""
        await self._turns.acquire(owner)
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        running.add_done_callback(lambda _: self._turns.release())
        try:
            return await running
        finally:
            # Its error would hold this frame, which would hold it: a body would stay until the collector comes.
            del running


class RoundRobinLock:
    """What one at a time may have; owners have it in turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By owner, in the order of their turns."""
        self._taken = False

    async def acquire(self, owner: str) -> None:
        """Wait for a turn of this owner; whoever has it must give it on."""
        if not self._taken:
            self._taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Let the next owner have it; who does not wait any more is passed over."""
        self._taken = False
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                self._taken = True
                turn.set_result(None)
                return
