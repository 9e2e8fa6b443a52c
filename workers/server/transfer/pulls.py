"""I/O: the KV that is on its way to a decode engine, one task for each request."""

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Coroutine, Sequence
from typing import NamedTuple
from zlib import crc32

from workers.engine.engine import Engine
from workers.server.loop import Mailbox


class TransferTimes(NamedTuple):
    """How long the KV of a prompt is under way, in seconds."""

    each: float
    token: float

    def of(self, tokens: int) -> float:
        """Return the seconds for so many tokens."""
        return self.each + self.token * tokens


class Waiting(NamedTuple):
    """A request that waits for the KV of its prompt, at its engine and in its call."""

    engine: Engine
    request_id: str
    mailbox: Mailbox


class Pull(ABC):
    """The way of one request's KV to this engine."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.allocated = asyncio.Event()
        """Set when the engine has memory for the prompt, or will never have."""
        self.gone = False
        """True if the call is over."""
        self.dropped = False
        """True if the call was over before there was memory."""

    @abstractmethod
    async def run(self) -> None:
        """Have the KV of the prompt loaded, or the call fail."""


class Pulls:
    """All that are under way to the engines of one worker."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._pulls: dict[str, Pull] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, pull: Pull) -> None:
        """Start a task for it."""
        self._pulls[pull.waiting.request_id] = pull
        self.start(pull.run())

    def end(self, request_id: str) -> Pull | None:
        """Note that a call is over. Returns the pull of its request if that has got no memory yet."""
        pull = self._pulls.pop(request_id, None)
        if pull is None:
            return None
        pull.gone = True
        if pull.allocated.is_set():
            return None
        pull.dropped = True
        pull.allocated.set()
        return pull

    def note_allocated(self) -> None:
        """Let those go on for which the engines have allocated memory."""
        for engine in self._engines:
            for request_id in engine.take_allocated():
                if request_id in self._pulls:
                    self._pulls[request_id].allocated.set()

    def start(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a task that `close` ends."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def fingerprint(prompt: Sequence[int]) -> int:
    """Return a number that tells prompts apart, in any process."""
    return crc32(array("q", prompt).tobytes())
