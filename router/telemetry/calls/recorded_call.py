"""The record of one call: who made it, where it went, what it took and how it ended."""

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from router.channel.messages import Assignment
from router.core.model.events import Cancelled, Failed, Finished
from router.core.model.request import Usage, WorkerId
from router.errors import RouterError
from router.front.call_record import CallRecord


class CallOutcome(StrEnum):
    """How a call ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """Its client left."""
    FAILED = "failed"
    """A worker failed it, or the router did."""
    REFUSED = "refused"
    """It was answered with an error before a worker had it."""


GOOD: Final = frozenset({CallOutcome.FINISHED, CallOutcome.CANCELLED})
"""Outcomes that are no errors."""


class RecordedCall(CallRecord):
    """Keeps what is noted of a call. Nothing here is text of a prompt or an answer, and nothing is a key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds and never goes backwards."""
        self.status: int | None = None
        """The status of the answer; None while there is none."""
        self.request: str | None = None
        """The id of the call."""
        self.client: str | None = None
        self.model: str | None = None
        self.worker: WorkerId | None = None
        """The worker that it was last sent to."""
        self.tries = 0
        self.queue_seconds: float | None = None
        """How long it waited until it was sent to a worker for the first time, or was refused."""
        self.first_token_seconds: float | None = None
        """From its arrival. Of several attempts, the first one that streams counts."""
        self.worker_seconds: float | None = None
        """From its arrival until its last worker was done, or until it was refused after it had waited."""
        self.usage: Usage | None = None
        self.error: str | None = None
        """The reason, code or type of the router's error with which it was answered."""
        self._clock = clock
        self._arrived: Final = clock()
        self._queued: float | None = None
        self._ended: float | None = None
        self._outcome: CallOutcome | None = None

    @property
    def outcome(self) -> CallOutcome:
        """How the call ended; of a path that is not for engines, its status decides."""
        failed = self.status is None or self.status >= 400
        return self._outcome or (CallOutcome.REFUSED if failed else CallOutcome.FINISHED)

    @property
    def seconds(self) -> float:
        """From its arrival to its end, or until now."""
        return (self._clock() if self._ended is None else self._ended) - self._arrived

    def end(self) -> None:
        """Called once, when the call has ended."""
        self._ended = self._clock()

    def note_id(self, request: str) -> None:
        self.request = request

    def note_call(self, client: str, model: str) -> None:
        self.client, self.model = client, model

    def note_queued(self) -> None:
        self._queued = self._clock()

    def note_sent(self, assignment: Assignment) -> None:
        self.tries += 1
        self.worker = assignment.worker
        self._leave_queue()

    def note_first_token(self) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = self.seconds

    def note_end(self, ending: Finished | Failed | Cancelled) -> None:
        self._leave_queue()
        self.usage = ending.usage
        self.worker_seconds = self.seconds
        if isinstance(ending, Finished):
            self._outcome = CallOutcome.FINISHED
        elif isinstance(ending, Failed):
            self._outcome = CallOutcome.FAILED

    def note_failure(self) -> None:
        self._outcome = CallOutcome.FAILED

    def note_error(self, error: RouterError) -> None:
        self.error = error.reason or (error.type if error.code is None else str(error.code))
        if self._outcome is None:
            failed = self.tries > 0 or type(error) is RouterError  # which is that of a fault in the router
            self._outcome = CallOutcome.FAILED if failed else CallOutcome.REFUSED

    def note_gone(self) -> None:
        self._outcome = self._outcome or CallOutcome.CANCELLED

    def _leave_queue(self) -> None:
        if self._queued is not None and self.queue_seconds is None:
            self.queue_seconds = self._clock() - self._queued
