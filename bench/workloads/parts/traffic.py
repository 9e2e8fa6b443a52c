"""What clients do: the calls that come whatever happens, and those that follow from the end of others."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain, repeat
from typing import Protocol, runtime_checkable

from bench.workloads.parts.prompts import Prompt

BACKOFF_SECONDS = 1.0
"""How long a client of a closed loop waits before it calls again after a call that was refused or failed."""


class Outcome(StrEnum):
    """How a call ended."""

    DONE = "done"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """It had not, when the simulation ended."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a call as its client sees it."""

    outcome: Outcome
    at: float
    answer: tuple[int, ...] = ()
    """Token ids; empty unless the call was done."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client."""

    at: float
    """When it arrives, in seconds since the beginning; one in the past arrives at once."""
    prompt: Prompt
    output_tokens: int
    """The length that the answer will have."""
    output_limit: int | None = None
    """The limit that the client states to the router."""
    streamed: bool = True
    cancel_after: float | None = None
    """Seconds after its arrival at which the client leaves, if it is not answered by then."""
    sample: int = 0
    """Tells apart the different answers to one prompt."""
    program: str | None = None
    """Which of its client's programs it belongs to; None where each call is for itself."""
    program_calls: int = 1
    """How many calls that program has if all goes well."""
    then: "Continuation | None" = None
    """What follows from its end."""


Continuation = Callable[[Call, Ending], Iterable[Call]]


@dataclass(frozen=True, slots=True)
class Client:
    """One client and all that it does."""

    name: str
    calls: Iterable[Call]
    """What it calls unasked, in order of time; drawn one by one, so it may be endless."""
    weight: float = 1.0
    group: str | None = None
    """Whose weight it shares, as the router knows it; that of a group is 1."""


class Workload(Protocol):
    """A family of behaviours with its parameters."""

    def clients(self, seed: int) -> Sequence[Client]:
        """Clients that have done nothing yet; the same seed gives the same."""


@runtime_checkable
class Rated(Workload, Protocol):
    """A workload that may run at any rate."""

    def at_rate(self, rate: float) -> Workload:
        """The same in an open loop with so many sessions a second of all clients. Raises ValueError if it cannot."""


Draw = Callable[[float], Sequence[Call]]
"""Makes up the first calls of a client's next session, for this time; their `then` makes the session's other calls."""


def open_loop(draw: Draw, times: Iterable[float]) -> Iterator[Call]:
    """Sessions that begin at these times, whether or not those before them are over."""
    return chain.from_iterable(draw(at) for at in times)


def closed_loop(
    draw: Draw, concurrency: int, think: Callable[[], float] = lambda: 0.0, sessions: int | None = None
) -> Iterator[Call]:
    """So many sessions at a time: when one is over, the next begins `think()` seconds later.

    `sessions`: how many there are in all; None for no end.
    """
    tickets: Iterator[object] = repeat(None) if sessions is None else repeat(None, sessions)
    return chain.from_iterable(Place(draw, think, tickets).begin(0.0) for _ in range(concurrency))


class Place:
    """One place of a closed loop, in which one session follows another."""

    def __init__(self, draw: Draw, think: Callable[[], float], tickets: Iterator[object]) -> None:
        """`tickets`: one for each session that may still begin; all places draw from the same."""
        self._draw = draw
        self._think = think
        self._tickets = tickets
        self._open = 0

    def begin(self, at: float) -> Sequence[Call]:
        """The first calls of the next session; none where there is no other."""
        if next(self._tickets, self) is self:
            return []
        calls = [self._watched(call) for call in self._draw(at)]
        self._open = len(calls)
        return calls

    def _watched(self, call: Call) -> Call:
        return replace(call, then=partial(self._over, call.then))

    def _over(self, then: Continuation | None, call: Call, ending: Ending) -> Iterable[Call]:
        following = [self._watched(each) for each in then(call, ending)] if then is not None else []
        self._open += len(following) - 1
        if self._open:
            return following
        pause = self._think() + (BACKOFF_SECONDS if ending.outcome in (Outcome.REJECTED, Outcome.FAILED) else 0.0)
        return self.begin(ending.at + pause)
