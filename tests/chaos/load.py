"""Open-loop load: calls arrive whether or not earlier ones were answered. Records how each call ended."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from .asks import MODEL
from .raw_connection import RawConnection, Reply, post

LONG: Final = "which is long enough to take a worker some time, and which nobody has asked before; "
END_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Called:
    """One call; `late` is the delay of its sending in seconds."""

    light: bool
    late: float
    reply: Reply
    cut: bool = False
    """True if the call was still in flight at the end."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """The clients: equal ones that flood, and light ones that call rarely."""

    flooders: int = 20
    lights: int = 8
    light_rate: float = 0.5
    """Calls per second of each light client, far below an equal share."""
    output_tokens: int = 48
    """Tokens of every answer."""


class Load:
    """Sends calls over as many connections as they need."""

    def __init__(self, address: tuple[str, int], crowd: Crowd, seed: int = 0) -> None:
        self.called: list[Called] = []
        """Calls that have ended."""
        self._address = address
        self._crowd = crowd
        self._random = Random(seed)
        self._idle: list[RawConnection] = []
        self._busy: set[RawConnection] = set()
        self._over = False
        self._tasks: dict[asyncio.Task[None], bool] = {}
        """The calls in flight; True for a light client's."""
        self._number = 0

    async def offer(self, rate: float, seconds: float, show: Callable[[float], None]) -> None:
        """Send calls at a fixed rate per second for a given time, including those of the light clients."""
        crowd, began = self._crowd, time.monotonic()
        lights = crowd.lights * crowd.light_rate
        due = 0.0
        while (due := due + self._random.expovariate(rate)) < seconds:
            if (pause := began + due - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            self._send(self._random.random() < lights / rate, began + due)
            show(due)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    async def keep(self, calls: int, seconds: float, show: Callable[[float], None]) -> None:
        """Keep a fixed number of the flooders' calls under way for a given time."""
        began = time.monotonic()
        while (now := time.monotonic()) - began < seconds:
            while len(self._tasks) < calls:
                self._send(False, now)
            await asyncio.wait(self._tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            show(now - began)

    async def end(self) -> None:
        """Give the light clients' calls some time to end, and cut all others."""
        if lights := [task for task, light in self._tasks.items() if light]:
            await asyncio.wait(lights, timeout=END_SECONDS)
        self._over = True
        for line in (*self._busy, *self._idle):
            line.close()
        await asyncio.gather(*self._tasks)

    def _send(self, light: bool, due: float) -> None:
        self._number += 1
        client = self._random.randrange(self._crowd.lights if light else self._crowd.flooders)
        name = f"light{client}" if light else f"flooder{client}"
        call = post(
            {
                **{"model": MODEL, "user": name, "stream": True, "ignore_eos": True},
                **{"max_tokens": self._crowd.output_tokens, "prompt": f"Question {self._number}, " + 8 * LONG},
            }
        )
        task = asyncio.ensure_future(self._call(call, light, due))
        self._tasks[task] = light
        task.add_done_callback(self._tasks.pop)

    async def _call(self, call: bytes, light: bool, due: float) -> None:
        line = None
        while self._idle and line is None:
            line = self._idle.pop()
            line = None if line.closed else line
        try:
            line = line or await RawConnection.open(self._address)
        except OSError:
            self.called.append(Called(light, 0.0, Reply(due)))
            return
        self._busy.add(line)
        reply = await line.begin(call)
        self._busy.discard(line)
        self.called.append(Called(light, reply.sent - due, reply, cut=self._over))
        if not line.closed:
            self._idle.append(line)
