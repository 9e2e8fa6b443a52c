"""An event loop that measures the CPU time of each callback."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVarTuple, Unpack

Ts = TypeVarTuple("Ts")


class TimedLoop(asyncio.SelectorEventLoop):
    """Records the CPU time of every callback, which waiting and other processes do not affect."""

    def __init__(self) -> None:
        self.measuring = False
        self.costs: list[tuple[float, str]] = []
        """CPU time in seconds, and the name, of every callback while `measuring`."""
        super().__init__()

    def call_soon(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Any = None) -> asyncio.Handle:
        return super().call_soon(self._timed(callback), *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Any = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._timed(callback), *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Any = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._timed(callback), *args, context=context)

    def _add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> asyncio.Handle:
        handle: asyncio.Handle = super()._add_reader(fd, self._timed(callback), *args)  # type: ignore[misc]
        return handle

    def _add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> asyncio.Handle:
        handle: asyncio.Handle = super()._add_writer(fd, self._timed(callback), *args)  # type: ignore[misc]
        return handle

    def _timed(self, callback: Callable[[Unpack[Ts]], object]) -> Callable[[Unpack[Ts]], None]:
        def run(*args: *Ts) -> None:
            start = time.thread_time()
            try:
                callback(*args)
            finally:
                if self.measuring:
                    self.costs.append((time.thread_time() - start, _name(callback)))

        return run


def _name(callback: Callable[..., Any]) -> str:
    """The name of a callback. Not its `repr`, which fails for objects that are not fully initialised."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", owner.get_name()))
    return str(getattr(callback, "__qualname__", type(callback).__name__))
