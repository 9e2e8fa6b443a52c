"""Where bodies are parsed: short ones at once, longer ones in threads, one at a time of each size.

Parsing takes several times a body's length in memory, and holds Python's lock for milliseconds a megabyte: more threads
would make nobody faster. Who waits for a slot waits for those of other owners in turn, not for all that one has sent.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

AT_ONCE: Final = 64 * 1024
"""Bytes of a body that is worked on at once, in a millisecond or less; a longer one is given to a thread."""
LONG: Final = 2**20
"""Bytes of a body from which on it waits for others as long, and the shorter ones do not wait for it."""


class ParseSlots:
    """One slot for bodies of more than `AT_ONCE` bytes, another for those of more than `LONG`."""

    def __init__(self) -> None:
        self._short = Slot()
        self._long = Slot()

    async def run(self, owner: str, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on a body of so many bytes, when it is its owner's turn."""
        if size <= AT_ONCE:
            return work()
        return await (self._short if size <= LONG else self._long).run(owner, work)


class Slot:
    """One thread, for which owners wait in turn."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By owner, in the order of their turns."""
        self._taken = False

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """The result of `work`, which cannot be stopped once it has begun; cancelled before, it is not begun."""
        if self._taken:
            await self._turn(owner)
        self._taken = True
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        running.add_done_callback(lambda _: self._give_next())
        return await running

    async def _turn(self, owner: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_next()
            raise

    def _give_next(self) -> None:
        """Let the next owner have its turn; who does not wait any more is passed over."""
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
