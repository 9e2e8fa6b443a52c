"""Limits parsing: long bodies are parsed in threads, one body per size class at a time, long answers on the event loop.

Parsing takes several times a body's length in memory, and holds Python's global lock for milliseconds per megabyte, so
more threads would not be faster. Owners take turns: a call waits for at most one body of each other owner, not for all
bodies that one owner has sent.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

INLINE_BYTES: Final = 64 * 1024
"""Bodies up to this size are parsed on the event loop, in a millisecond or less; longer ones in a thread."""
LONG_BYTES: Final = 2**20
"""Bodies longer than this have a thread of their own, so that shorter ones do not wait for them."""


class ParseSlots:
    """One thread for bodies above `INLINE_BYTES`, one for bodies above `LONG_BYTES`, and turns for long answers."""

    def __init__(self) -> None:
        self._short = ParseThread()
        self._long = ParseThread()
        self._answer_turns = RoundRobinLock()

    async def run(self, owner: str, size: int, work: Callable[[], T]) -> T:
        """Run `work` on a body of `size` bytes when its owner's turn comes, and return the result."""
        if size <= INLINE_BYTES:
            return work()
        return await (self._short if size <= LONG_BYTES else self._long).run(owner, work)

    async def read(self, owner: str, block: bytes, read: Callable[[bytes], None]) -> None:
        """Pass a block of a long answer to `read` in parts. Per turn of the event loop, one owner gets one part."""
        for start in range(0, len(block), INLINE_BYTES):
            await self._answer_turns.acquire(owner)
            try:
                read(block[start : start + INLINE_BYTES])
            finally:
                asyncio.get_running_loop().call_soon(self._answer_turns.release)


class ParseThread:
    """One thread that owners use in turn."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")
        self._turns = RoundRobinLock()

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Run `work` in the thread and return its result. Cancelling stops it only before it has started."""
        await self._turns.acquire(owner)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(lambda _: self._turns.release())
        try:
            return await running
        finally:
            # An error would refer to this frame and the frame to the error: the body in it would stay in memory until
            # the garbage collector runs.
            del running


class RoundRobinLock:
    """A lock that waiting owners get in round-robin order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiters by owner; the order of the owners is the order of their turns."""
        self._taken = False

    async def acquire(self, owner: str) -> None:
        """Wait until it is this owner's turn. The caller must `release` the lock."""
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
        """Pass the lock to the next owner, skipping waiters that were cancelled."""
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
