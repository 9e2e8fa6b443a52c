"""I/O: the task that steps the engines at the pace of the emulated machine and delivers tokens to their calls."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic
from typing import Final, NamedTuple

from workers.engine.barrier import Barrier, StepTotals, dummy_seconds
from workers.engine.engine import Engine
from workers.engine.model import NO_TOKEN, Output, Request
from workers.engine.waiting import QueueMeter

MAX_LAG: Final = 0.05
"""Seconds of delay of this process that later steps may catch up; more is lost time."""


class CallEnded(Exception):
    """The client of this call has disconnected."""


class Mailbox:
    """Tokens on their way from the engine to one call, as (choice, output); a slow reader gets several at once."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.ranks: list[int] = []
        """The rank of each request."""
        self.begun = asyncio.Event()
        """Set by the first token."""
        self.interrupted = asyncio.Event()
        """Set when the call is over before its end: its client has gone, or it was aborted or has failed."""
        self.aborted = False
        self._error: Exception | None = None
        self._deliveries: list[tuple[int, Output]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._gone = False

    def put(self, choice: int, output: Output) -> None:
        self._deliveries.append((choice, output))
        self.begun.set()
        self._wake()

    def disconnect(self) -> None:
        self._gone = True
        self.interrupted.set()
        self._wake()

    def fail(self, error: Exception) -> None:
        """Let the reader's next `take` raise `error`, after what has arrived."""
        self._error = error
        self.interrupted.set()
        self._wake()

    async def take(self) -> list[tuple[int, Output]]:
        """Return everything that has arrived, waiting for at least one token.

        Raises CallEnded after `disconnect`, and the error of `fail`.
        """
        if not self._deliveries and not self._gone and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._gone:
            raise CallEnded
        if self._error is not None and not self._deliveries:
            raise self._error
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class QueueFigures(NamedTuple):
    """The engine's own queue since measuring began; times are seconds of the real clock."""

    seconds: float
    requests_p95: float
    """Waiting requests, weighted by time."""
    tokens_p95: float
    """Uncached tokens of the waiting requests, weighted by time."""
    lost_seconds: float
    """By how much this process was slower than its emulated machine."""


class Receiver(NamedTuple):
    """Where the tokens of a request come from, and where they go."""

    mailbox: Mailbox
    choice: int
    engine: Engine


class EngineLoop:
    """Owns the engines, which step together if there are several: every submit, abort and step goes through here.

    `speed` divides the time that steps take; 0 or infinity means not to sleep at all. `after_step`: called after each
    step, before its tokens are delivered. `measure`: whether to measure the queue of an engine, or the loads of
    several, which costs time.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        speed: float,
        after_step: Sequence[Callable[[], None]] = (),
        *,
        measure: bool = False,
    ) -> None:
        self._engines = engines
        self._barrier = Barrier(engines)
        self._waiting = QueueMeter() if measure and len(engines) == 1 else None
        self.totals: Final = StepTotals() if measure and len(engines) > 1 else None
        """Sums over the steps of several engines, if they are measured."""
        self._dummy_seconds = max(map(dummy_seconds, engines))
        self.measure()
        self._pause_factor = 1 / speed if speed else 0.0
        self._after_step = list(after_step)
        self._receivers: dict[str, Receiver] = {}
        self._work = asyncio.Event()
        self._serial = count()

    def scaled(self, seconds: float) -> float:
        """Convert emulated seconds to seconds of the real clock."""
        return seconds * self._pause_factor

    def call_after_steps(self, function: Callable[[], None]) -> None:
        """Call `function` after each step from now on, before the tokens of the step are delivered."""
        self._after_step.append(function)

    def wake(self) -> None:
        """Step again: memory has been released, or the KV of a prompt has arrived."""
        self._work.set()

    def open(
        self,
        mailbox: Mailbox,
        answers: Sequence[tuple[Sequence[int], int, int]],
        ignore_eos: bool,
        rank: Callable[[], int],
        *,
        hands_off: bool = False,
        pulls: bool = False,
    ) -> None:
        """Submit one request per (prompt, max_tokens, sample), all or none. Raises what `Engine.submit` raises.

        `rank`: returns the engine that serves the next of them.
        """
        try:
            for choice, (prompt, max_tokens, sample) in enumerate(answers):
                request = Request(
                    str(next(self._serial)), prompt, max_tokens, ignore_eos, sample, hands_off=hands_off, pulls=pulls
                )
                number = rank()
                engine = self._engines[number]
                engine.submit(request)
                mailbox.ids.append(request.id)
                mailbox.ranks.append(number)
                self._receivers[request.id] = Receiver(mailbox, choice, engine)
        except BaseException:
            self.close(mailbox)
            raise
        self._observe_queue()
        self._work.set()

    def close(self, mailbox: Mailbox) -> None:
        """Abort the unfinished requests of a call; nothing more is delivered."""
        for request_id in mailbox.ids:
            if (receiver := self._receivers.pop(request_id, None)) is not None:
                receiver.engine.abort(request_id)
                self._observe_queue()
                self._work.set()

    def fail(self, mailbox: Mailbox, error: Exception) -> None:
        """Abort a call whose reader gets `error`."""
        self.close(mailbox)
        mailbox.fail(error)

    def abort(self, mailbox: Mailbox) -> None:
        """Abort a call on request: its reader gets a last output with finish reason "abort"."""
        mailbox.aborted = True
        mailbox.interrupted.set()
        for request_id in mailbox.ids:
            receiver = self._receivers.pop(request_id, None)
            if receiver is not None:
                receiver.engine.abort(request_id)
                self._observe_queue()
                self._work.set()
                mailbox.put(receiver.choice, Output(request_id, NO_TOKEN, "abort", 0))

    async def run(self) -> None:
        """Step until cancelled."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            self._work.clear()
            step = self._barrier.step()
            if step is None or step.stalled:
                for after_step in self._after_step if step is not None else ():
                    after_step()
                await self._work.wait()
                due = clock()
                continue
            self._observe_queue()
            if self.totals is not None:
                self.totals.add(step.seconds, step.loads, self._dummy_seconds)
            now = clock()
            self._lost_seconds += max(0.0, now - MAX_LAG - due)
            due = max(due, now - MAX_LAG) + step.seconds * self._pause_factor
            await asyncio.sleep(max(0.0, due - now))
            for after_step in self._after_step:
                after_step()
            for outputs in step.outputs:
                self._deliver(outputs)

    def measure(self) -> None:
        """Restart the measurement of the queue."""
        self._measured_since, self._lost_seconds = monotonic(), 0.0
        if self._waiting is not None:
            self._waiting.reset(self._measured_since)

    @property
    def queue(self) -> QueueFigures | None:
        """What was measured, or None if nothing is."""
        if self._waiting is None:
            return None
        now, waiting = monotonic(), self._waiting
        return QueueFigures(
            now - self._measured_since,
            waiting.requests.percentile(now, 0.95),
            waiting.tokens.percentile(now, 0.95),
            self._lost_seconds,
        )

    def _observe_queue(self) -> None:
        if self._waiting is not None:
            self._waiting.observe(monotonic(), self._engines[0])

    def _deliver(self, outputs: Sequence[Output]) -> None:
        receivers = self._receivers
        for output in outputs:
            receiver = receivers.get(output.id)
            if receiver is None:
                continue
            if output.finish:
                del receivers[output.id]
            receiver.mailbox.put(receiver.choice, output)
