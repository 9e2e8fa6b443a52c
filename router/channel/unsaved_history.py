"""What a front keeps of its requests until a saved state of the scheduler covers it.

If the scheduler dies, its next run starts from the last saved state. The front then reports what that state does not
cover: the attempts that are under way or have ended since, the requests that wait, and the calls that are counted. Each
is reported once, and together with the saved state that makes exactly what the earlier run knew.

A state covers the first n messages of a front, where n counts what the scheduler had handled when it was saved. An
attempt that ended in one of these is in the state and is forgotten here. One that ended later, or has not ended, is
kept whole: the state says what was charged for it, and the next run charges that no second time (`Resumed`).
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from router.channel.messages import (
    REPEATED,
    Answered,
    Ask,
    Assignment,
    BeginCall,
    CallEnded,
    FrontMessage,
    RanBefore,
    ResponseChanged,
    ResponseStored,
    SchedulerMessage,
    TakeInput,
    TicketId,
    WaitedBefore,
)
from router.core.model.events import (
    Arrived,
    Cancelled,
    Failed,
    Finished,
    HandoffLost,
    Prefilled,
    Progressed,
    Resumed,
    Returned,
    Started,
)
from router.core.model.request import Leg, Request, RequestId

AttemptEnd = Returned | Prefilled | HandoffLost | Finished | Failed | Cancelled

log = logging.getLogger(__name__)

MOST_ENDED: Final = 50_000
"""Ended requests that are kept at most: those of some minutes, if no state can be saved."""


@dataclass(slots=True)
class AttemptHistory:
    """One attempt of a request: its time at one worker."""

    assignment: Assignment
    started: bool = False
    output_tokens: int = 0
    """Of the whole answer so far, as last reported."""
    end: AttemptEnd | None = None
    ended_with: int = 0
    """The number of the message that reported the end."""
    prefilled: Prefilled | None = None
    """The end of the prefill beside it."""
    prefilled_with: int = 0
    """The number of the message that reported that."""

    def report(self, own_id: RequestId, request: Request, covered: int, *, saved: bool) -> Iterator[FrontMessage]:
        """Yield what has become of the attempt.

        `own_id`: that of the request in this front; `request`: under the scheduler's id; `covered`: how many messages
        the state covers; `saved`: as in `Resumed`.
        """
        sent, beside = self.assignment, self.assignment.prefill
        partner = None if beside is None else beside.worker
        cached = 0 if beside is not None else sent.cached_tokens
        if self.prefilled is not None and self.prefilled_with <= covered:
            beside = None
        if beside is not None:
            leg = Leg.PREFILL
            yield RanBefore(own_id, Resumed(request, beside.worker, beside.cached_tokens, saved, leg, sent.worker))
        yield RanBefore(own_id, Resumed(request, sent.worker, cached, saved, sent.leg, partner))
        if beside is not None and self.prefilled is not None:
            yield self.prefilled
        if self.started:
            yield Started(own_id)
        if self.output_tokens:
            yield Progressed({own_id: self.output_tokens})
        if self.end is not None:
            yield self.end


@dataclass(slots=True, eq=False)
class RequestHistory:
    """One request since it arrived, without the attempts that a saved state covers."""

    request: Request
    known_as: RequestId
    """The scheduler's id of the request."""
    arrived_with: int
    """The number of the message that reported its arrival."""
    attempts: list[AttemptHistory] = field(default_factory=list)
    end: Finished | Failed | Cancelled | None = None
    """How it ended, other than by the end of an attempt."""
    ended_with: int = 0
    """The number of the message that reported the end; 0 while the request lives."""

    @property
    def attempt(self) -> AttemptHistory | None:
        """The present attempt; None while the request waits."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].end is None else None

    def report(self, covered: int) -> Iterator[FrontMessage]:
        """Yield what has become of the request. `covered`: how many messages the state covers."""
        own_id, request, saved = self.request.id, self.request, self.arrived_with <= covered
        if self.known_as != own_id:
            request = replace(request, id=self.known_as)
        if not self.attempts:
            yield WaitedBefore(own_id, request) if saved else Arrived(request)
        for attempt in self.attempts:
            yield from attempt.report(own_id, request, covered, saved=saved)
        if self.end is not None:
            yield self.end


class UnsavedHistory:
    """Everything that a front would have to report to the next run of the scheduler."""

    def __init__(self, most_ended: int = MOST_ENDED) -> None:
        """`most_ended`: how many ended requests are kept at most; the next run may learn nothing of older ones."""
        self._most_ended = most_ended
        self._covered = 0
        """How many messages the last saved state covers."""
        self._ended: deque[RequestHistory] = deque()
        """The ended requests that are kept, in order of their ends."""
        self.messages = 0
        """How many messages the front has sent, or would have sent while no scheduler ran."""
        self._live: dict[RequestId, RequestHistory] = {}
        self._requests: dict[RequestHistory, None] = {}
        """Live requests, and ended ones that no saved state covers, in order of arrival."""
        self._facts: deque[tuple[int, ResponseStored | ResponseChanged]] = deque()
        """What was stored and changed, each with the number of its message."""
        self._questions: dict[int, Ask] = {}
        """Questions without an answer, by number."""
        self._calls: dict[TicketId, list[BeginCall | TakeInput]] = {}
        """What counted calls have taken from their clients' limits."""

    @property
    def requests(self) -> int:
        """How many requests are kept."""
        return len(self._requests)

    def sent(self, message: FrontMessage) -> None:
        """Note a message of the front, whether a scheduler runs or not."""
        self.messages += 1
        match message:
            case Progressed(output_tokens):
                for request, tokens in output_tokens.items():
                    if (attempt := self._attempt(request)) is not None:
                        attempt.output_tokens = tokens
            case Arrived(request):
                history = self._live[request.id] = RequestHistory(request, request.id, self.messages)
                self._requests[history] = None
            case Started(started):
                if (attempt := self._attempt(started)) is not None:
                    attempt.started = True
            case Returned(returned) | Prefilled(returned) | HandoffLost(returned):
                self._end_attempt(returned, message)
            case Finished() | Failed() | Cancelled():
                self._end(message)
            case ResponseStored() | ResponseChanged():
                self._facts.append((self.messages, message))
            case Ask(number):
                self._questions[number] = message
            case CallEnded(ticket):
                self._end_call(ticket)

    def received(self, message: SchedulerMessage) -> None:
        """Note a message of the scheduler."""
        match message:
            case Assignment(request):
                if (history := self._live.get(request)) is not None and history.attempt is None:
                    history.attempts.append(AttemptHistory(message))
                    history.known_as = message.known_as or request
            case Answered(number, answer):
                asked = self._questions.pop(number, None)
                if asked is not None and answer is None:
                    self._count(asked)

    def saved(self, messages: int) -> None:
        """Forget what a saved state covers: the first `messages` messages of this front."""
        self._covered = messages
        while self._ended and self._ended[0].ended_with <= messages:
            del self._requests[self._ended.popleft()]
        for history in self._requests:
            history.attempts = [each for each in history.attempts if each.end is None or each.ended_with > messages]
        while self._facts and self._facts[0][0] <= messages:
            self._facts.popleft()

    def report(self) -> Iterator[FrontMessage]:
        """Yield the messages that tell the next run what it does not know. Changes nothing."""
        for taken in self._calls.values():
            yield from [Ask(REPEATED, question) for question in taken]
        for history in self._requests:
            yield from history.report(self._covered)
        yield from [fact for _, fact in self._facts]
        yield from self._questions.values()

    def _attempt(self, request: RequestId) -> AttemptHistory | None:
        history = self._live.get(request)
        return None if history is None else history.attempt

    def _end_attempt(self, request: RequestId, end: AttemptEnd) -> bool:
        """End the present attempt of a request, or the prefill beside it. Returns whether there is one."""
        if (attempt := self._attempt(request)) is None:
            return False
        if isinstance(end, Prefilled) and end.decoding:
            attempt.prefilled, attempt.prefilled_with = end, self.messages
            return True
        attempt.end, attempt.ended_with = end, self.messages
        return True

    def _end(self, end: Finished | Failed | Cancelled) -> None:
        ended_attempt = self._end_attempt(end.request, end)
        if (history := self._live.pop(end.request, None)) is not None:
            history.ended_with = self.messages
            history.end = None if ended_attempt else end
            self._ended.append(history)
            if len(self._ended) > self._most_ended:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest half of the ended requests, because no state has been saved for long."""
        log.error("the scheduler saves no state: if it dies now, the usage of %d calls is lost", len(self._ended) // 2)
        for _ in range(len(self._ended) // 2):
            del self._requests[self._ended.popleft()]

    def _end_call(self, ticket: TicketId) -> None:
        """Forget a call, whether its questions have been answered or not: its client may have left meanwhile."""
        self._calls.pop(ticket, None)
        for number, asked in list(self._questions.items()):
            if isinstance(asked.question, BeginCall | TakeInput) and asked.question.ticket == ticket:
                del self._questions[number]

    def _count(self, asked: Ask) -> None:
        """Note that a call was admitted, or that its input was."""
        match asked.question:
            case BeginCall(ticket):
                self._calls[ticket] = [asked.question]
            case TakeInput(ticket):
                if ticket in self._calls:
                    self._calls[ticket].append(asked.question)
