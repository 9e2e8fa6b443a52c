"""The processor time of one awaitable, without that of the tasks that run while it waits."""

import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Metered(Generic[T]):
    """Await a coroutine, and measure for how long it keeps the event loop busy."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: returns the processor time of this thread, in seconds."""
        self._coroutine = coroutine
        self._clock = clock
        self.seconds = 0.0
        """Processor time so far."""

    def __await__(self) -> Generator[Any, Any, T]:
        step, sent = self._coroutine.__await__(), None
        while True:
            began = self._clock()
            try:
                waits_for = step.send(sent)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self.seconds += self._clock() - began
            sent = yield waits_for
