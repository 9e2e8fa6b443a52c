"""Whom to trust with requests: a breaker for each worker, and a budget of retries for all of them.

A breaker is closed while a worker does its work. When half of its last calls failed, and more than a few, it opens: the
worker gets nothing for a time, which doubles from one such time to the next. Then it is half-open: one request goes
there as a probe, and its first token closes the breaker. From then on, and likewise for a worker that was away and came
back, trust grows as in TCP's slow start: one request more, with each first token, may be on its way there unproven.

Blame is the scheduler's to give. An error that an engine itself answers counts only once another worker has done the
same request, so that a request which no engine survives opens no breaker.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from router.core.model.request import RequestId

OUTCOMES_KEPT: Final = 20
"""Calls on which a breaker looks back."""
LONGEST_COOLDOWN: Final = 12
"""Times the first one."""
FULL_TRUST: Final = 16
"""Unproven requests from which on only the window counts."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 8.0
"""Seconds for which a worker that has no room gets nothing; it doubles while it has none."""
BUDGET_SECONDS: Final = 10.0
"""In which the floor of the retry budget comes again."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a worker is left out, and when a request is tried again."""

    failures: int = 5
    """Of a worker's last 20 calls, how many must have failed, and at least half of them, to open its breaker; 0 for a
    breaker that never opens."""
    cooldown: float = 5.0
    """Seconds for which a breaker stays open the first time."""
    tries: int = 3
    """Workers that a request is sent to at most, while they fail; 1 for no retries."""
    budget: float = 0.1
    """Retries per request, on average."""
    floor: int = 10
    """Retries that are there beyond that in every 10 s."""
    silence: float = 0.0
    """Seconds, at least, in which a worker with anything in flight must say something, if only that it answered a poll;
    0 for no limit, as where nobody polls it."""


DEFAULT_RULES: Final = HealthRules()


class Condition(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Health:
    """One worker's breaker, and how far it is trusted."""

    __slots__ = ("_cooldown", "_failures", "_first_cooldown", "_outcomes", "_trust", "_unproven", "condition")

    def __init__(self, rules: HealthRules) -> None:
        self.condition = Condition.CLOSED
        self._failures = rules.failures
        self._first_cooldown = self._cooldown = rules.cooldown
        self._outcomes: deque[bool] = deque(maxlen=OUTCOMES_KEPT)
        """Of the calls since the first failure; true for those that went well."""
        self._trust: int | None = None
        """How many requests may be there unproven; None where only the window counts."""
        self._unproven: set[RequestId] = set()
        """Sent while trust was limited, and without a token yet."""

    @property
    def trusted(self) -> bool:
        """Whether one more request may be sent."""
        return self._trust is None or (self.condition is not Condition.OPEN and len(self._unproven) < self._trust)

    def on_dispatch(self, request: RequestId) -> None:
        """A request is on its way there."""
        if self._trust is not None:
            self._unproven.add(request)

    def on_end(self, request: RequestId) -> None:
        """A request proves nothing any more."""
        self._unproven.discard(request)

    def on_success(self, request: RequestId) -> None:
        """A request has its first token, or its whole answer. One from before the breaker opened closes nothing."""
        if self._trust is not None:
            if request in self._unproven:
                self._unproven.remove(request)
                self._grow()
        elif self._outcomes:
            self._outcomes.append(True)

    def on_failure(self, now: float) -> float | None:
        """A call failed by this worker's fault. If that opens the breaker, until when it stays open, in seconds."""
        if not self._failures or self.condition is Condition.OPEN:
            return None
        self._outcomes.append(False)
        failures = self._outcomes.count(False)
        if self.condition is Condition.CLOSED and not (
            failures >= self._failures and 2 * failures >= len(self._outcomes)
        ):
            return None
        until = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, LONGEST_COOLDOWN * self._first_cooldown)
        self._distrust(Condition.OPEN)
        return until

    def half_open(self) -> None:
        """Half-open: after its time open, or because the worker was away and came back."""
        self._distrust(Condition.HALF_OPEN)

    def reset(self) -> None:
        """Closed, with nothing held against the worker."""
        self.condition = Condition.CLOSED
        self._cooldown = self._first_cooldown
        self._trust = None
        self._unproven.clear()
        self._outcomes.clear()

    def _distrust(self, condition: Condition) -> None:
        self.condition = condition
        self._trust = 1
        self._unproven.clear()
        self._outcomes.clear()

    def _grow(self) -> None:
        assert self._trust is not None
        self.condition = Condition.CLOSED
        self._trust += 1
        if self._trust > FULL_TRUST:
            self.reset()


class Backoff:
    """For how long a worker gets nothing that says it has no room for more."""

    __slots__ = ("_next", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self._next = FIRST_BACKOFF

    def begin(self, now: float) -> None:
        """It turned a request away. What it turns away in the meantime was sent before."""
        if now >= self.until:
            self.until = now + self._next
            self._next = min(2 * self._next, LONGEST_BACKOFF)

    def reset(self) -> None:
        """It began to answer one."""
        self._next = FIRST_BACKOFF


class RetryBudget:
    """How many requests may be tried again: a share of all, so that failures are not multiplied, and a few more."""

    def __init__(self, share: float, floor: int) -> None:
        """`share`: retries per request; `floor`: of those that come by themselves, in `BUDGET_SECONDS`."""
        self._share = share
        self._floor = floor
        self._left = float(floor)
        self._most = 10.0 * max(floor, 1)
        self._since = 0.0

    def add_request(self) -> None:
        """A request came."""
        self._left = min(self._left + self._share, self._most)

    def take(self, now: float) -> bool:
        """Use one, if one is left."""
        if self._left < self._floor:
            self._left = min(self._floor, self._left + (now - self._since) * self._floor / BUDGET_SECONDS)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass(frozen=True, slots=True)
class SilenceRules:
    """How long a worker may say nothing."""

    first_token: float = 120.0
    """Seconds to the first token, at least; 0 for no limit."""
    between_tokens: float = 30.0
    """Seconds between two tokens, at least; 0 for no limit."""


DEFAULT_SILENCE_RULES: Final = SilenceRules()


class SilenceTimeout:
    """How long a worker may say nothing, by what it has shown of itself: some times its own slowest of late."""

    __slots__ = ("_first", "_gap", "_rules")

    FACTOR: Final = 10.0
    """Times the slowest first token of late, and times the slowest stream's mean time between tokens, squared."""
    MEMORY: Final = 0.98
    """What is left of the slowest, with each one after it."""

    def __init__(self, rules: SilenceRules) -> None:
        self._rules = rules
        self._first = self._gap = 0.0

    def on_first_token(self, seconds: float) -> None:
        """A first token took so long."""
        self._first = max(seconds, self._first * self.MEMORY)

    def on_tokens(self, seconds: float, tokens: int) -> None:
        """So many tokens more took so long."""
        if tokens > 0:
            self._gap = max(seconds / tokens, self._gap * self.MEMORY)

    @property
    def first_token(self) -> float | None:
        """Seconds after which a request without a first token is given up; None for never."""
        return max(self._rules.first_token, self.FACTOR * self._first) if self._rules.first_token else None

    @property
    def between_tokens(self) -> float | None:
        """Seconds of silence after which a stream is given up; None for never."""
        least = self._rules.between_tokens
        return max(least, self.FACTOR**2 * self._gap) if least else None

    def whole(self, output_limit: int | None) -> float | None:
        """Seconds after which an answer that does not stream is given up; None where its length is not bounded."""
        first, between = self.first_token, self.between_tokens
        if first is None or between is None or output_limit is None:
            return None
        return first + between + self.FACTOR * self._gap * output_limit
