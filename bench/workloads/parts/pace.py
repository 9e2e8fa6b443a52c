"""What most families share: how many clients there are and how often each calls."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from random import Random
from typing import Literal, Self

from bench.workloads.parts.arrivals import gamma, in_turn, poisson, uniform
from bench.workloads.parts.traffic import Call, Client, Draw, closed_loop, open_loop


@dataclass(frozen=True, slots=True)
class RatedWorkload(ABC):
    """Equal clients, in an open loop with a rate or in a closed loop.

    The pace is that of sessions: single calls in most families, whole programs or conversations in the others. Raises
    ValueError if there would be no traffic.
    """

    client_count: int = 8
    weights: tuple[float, ...] = ()
    """Weights of the clients in turn; 1 if empty."""
    rate: float = 0.0
    """Sessions per second of all clients together, whether or not earlier ones are over."""
    arrivals: Literal["poisson", "gamma", "uniform"] = "poisson"
    cv: float = 1.0
    """Coefficient of variation of the gaps between Gamma arrivals."""
    changes: float = inf
    """Seconds after which the rate changes."""
    change: float = 1.0
    """Factor of the rate after the change."""
    concurrency: int = 0
    """In place of a rate: open sessions per client."""
    think: float = 0.0
    """Mean seconds between a session and the next in a closed loop; exponentially distributed."""
    times: tuple[float, ...] = ()
    """In place of a rate or concurrency: when sessions begin, ascending; the clients take them in turn."""
    sessions: int | None = None
    """Sessions of each client in total; None for no end."""
    stream: bool = True

    def __post_init__(self) -> None:
        if self.client_count < 1 or any(weight <= 0 for weight in self.weights):
            raise ValueError("a workload needs a client, and weights are positive")
        if (self.rate > 0) + (self.concurrency > 0) + bool(self.times) != 1:
            raise ValueError("a workload has either a rate or a concurrency or times")
        if self.cv <= 0 or self.changes <= 0 or self.change <= 0:
            raise ValueError("a workload's cv, changes and change are positive")

    @abstractmethod
    def clients(self, seed: int) -> Sequence[Client]: ...

    def at_rate(self, rate: float) -> Self:
        """Return a copy in an open loop with this rate."""
        return replace(self, rate=rate, concurrency=0, times=())

    def population(self, seed: int, draw: Callable[[Random], Draw]) -> Sequence[Client]:
        """Return the clients, each with a random generator of its own, from which `draw` makes its calls."""
        return [self._client(number, Random(f"{seed} {number}"), draw) for number in range(self.client_count)]

    def _client(self, number: int, random: Random, draw: Callable[[Random], Draw]) -> Client:
        weight = self.weights[number % len(self.weights)] if self.weights else 1.0
        return Client(f"c{number + 1}", self._calls(number, random, draw(random)), weight)

    def _calls(self, number: int, random: Random, draw: Draw) -> Iterator[Call]:
        if self.concurrency:
            return closed_loop(draw, self.concurrency, lambda: pause(random, self.think), self.sessions)
        return open_loop(draw, islice(self._times(number, random), self.sessions))

    def _times(self, number: int, random: Random) -> Iterator[float]:
        """Return when this client's sessions begin."""
        if self.times:
            return iter(self.times[number :: self.client_count])
        rate = self.rate / self.client_count
        if self.changes == inf:
            return self._steady(number, random, rate)
        later = self._steady(number, random, rate * self.change)
        return in_turn([(self.changes, self._steady(number, random, rate)), (inf, later)])

    def _steady(self, number: int, random: Random, rate: float) -> Iterator[float]:
        if self.arrivals == "uniform":
            return uniform(rate, phase=number / self.client_count)
        if self.arrivals == "gamma":
            return gamma(random, rate, self.cv)
        return poisson(random, rate)


def pause(random: Random, mean: float) -> float:
    """Draw an exponentially distributed time; 0 if the mean is 0."""
    return random.expovariate(1 / mean) if mean else 0.0


def varied(random: Random, mean: int, spread: float) -> int:
    """Draw a whole number within `spread` (a share of the mean) of the mean, at least 1."""
    return max(1, round(mean * random.uniform(1 - spread, 1 + spread)))
