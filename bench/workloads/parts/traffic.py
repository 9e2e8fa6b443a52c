"""The traffic of clients: calls at given times, and calls that follow from the end of others."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain, repeat
from typing import Protocol, runtime_checkable

from bench.workloads.parts.prompts import Prompt

BACKOFF_SECONDS = 1.0
"""How long a client of a closed loop waits after a call that was rejected or failed."""


class Outcome(StrEnum):
    """How a call ended."""

    DONE = "done"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """The call had not ended when the simulation did."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a call as its client sees it."""

    outcome: Outcome
    at: float
    answer: tuple[int, ...] = ()
    """Token ids; empty unless the call is done."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client."""

    at: float
    """When the call arrives, in seconds since the beginning; a call in the past arrives at once."""
    prompt: Prompt
    output_tokens: int
    """The length that the answer will have."""
    output_limit: int | None = None
    """The max_tokens that the client sends to the router."""
    streamed: bool = True
    cancel_after: float | None = None
    """Seconds after its arrival at which the client gives up, if the call is not answered by then."""
    leaves_after: int | None = None
    """Output tokens of each answer after which the client gives up, if that is not the whole of it."""
    sample: int = 0
    """Distinguishes the answers to equal prompts."""
    answers: int = 1
    """How many answers it asks for (`n`)."""
    computed_anew: bool = False
    """Whether the engine computes the whole prompt, whatever its cache holds: see `Request.computed_anew_by`."""
    model: str | None = None
    """A model that only some workers serve; None for the one that all serve."""
    program: str | None = None
    """The client's program that the call belongs to; None if it belongs to none."""
    program_calls: int = 1
    """The number of calls of that program if none fails."""
    session: str | None = None
    """The label of the agent session that the call belongs to; None if it has none."""
    ends_turn: bool | None = None
    """Whether its answer ends an agent's turn, and does not ask for a tool; None if it does not say."""
    fresh_tokens: int | None = None
    """Input tokens that the calls before it in its session have not sent or been answered, so that no cache can hold
    them; None if that is not known."""
    then: "Continuation | None" = None
    """Returns the calls that follow from the end of this one."""


Continuation = Callable[[Call, Ending], Iterable[Call]]


@dataclass(frozen=True, slots=True)
class Client:
    """One client and all its traffic."""

    name: str
    calls: Iterable[Call]
    """The calls that do not depend on others, in order of time. They are drawn one by one, so there may be endlessly
    many.
    """
    weight: float = 1.0
    group: str | None = None
    """The group whose weight the client shares, as the router knows it; a group's weight is 1."""


class Workload(Protocol):
    """A family of behaviours with its parameters."""

    def clients(self, seed: int) -> Sequence[Client]:
        """Return new clients; equal seeds give equal clients."""


@runtime_checkable
class Rated(Workload, Protocol):
    """A workload that can run at any rate."""

    def at_rate(self, rate: float) -> Workload:
        """Return a copy in an open loop, with `rate` sessions per second of all clients. Raises ValueError if
        impossible.
        """


Draw = Callable[[float], Sequence[Call]]
"""Generates the first calls of a client's next session, for this time; their `then` makes the session's other calls."""


def open_loop(draw: Draw, times: Iterable[float]) -> Iterator[Call]:
    """Yield the calls of sessions that begin at these times, whether or not earlier ones are over."""
    return chain.from_iterable(draw(at) for at in times)


def closed_loop(
    draw: Draw, concurrency: int, think: Callable[[], float] = lambda: 0.0, sessions: int | None = None
) -> Iterator[Call]:
    """Keep `concurrency` sessions open: when one is over, the next begins `think()` seconds later.

    `sessions`: how many there are in total; None for no end.
    """
    tickets: Iterator[object] = repeat(None) if sessions is None else repeat(None, sessions)
    return chain.from_iterable(Place(draw, think, tickets).begin(0.0) for _ in range(concurrency))


class Place:
    """One slot of a closed loop, in which one session follows another."""

    def __init__(self, draw: Draw, think: Callable[[], float], tickets: Iterator[object]) -> None:
        """`tickets`: one for each session that may still begin, shared by all slots."""
        self._draw = draw
        self._think = think
        self._tickets = tickets
        self._open = 0

    def begin(self, at: float) -> Sequence[Call]:
        """Return the first calls of the next session; none if no session is left."""
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
