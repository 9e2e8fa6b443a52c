"""How many clients there are and how often each calls: what most families have in common."""

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
    """Equal clients, in an open loop at a rate or in a closed one.

    What they begin at this pace are sessions: single calls in most families, whole programs or conversations in the
    others. Raises ValueError where there would be no traffic.
    """

    client_count: int = 8
    weights: tuple[float, ...] = ()
    """Of the clients in turn; 1 without any."""
    rate: float = 0.0
    """Sessions a second of all clients together, whether or not those before are over."""
    arrivals: Literal["poisson", "gamma", "uniform"] = "poisson"
    cv: float = 1.0
    """Of Gamma arrivals: the coefficient of variation of the times between them."""
    changes: float = inf
    """Seconds after which the rate is another one."""
    change: float = 1.0
    """By what it is multiplied then."""
    concurrency: int = 0
    """Instead of a rate: how many sessions each client has open."""
    think: float = 0.0
    """Mean seconds between a session and the next in a closed loop; exponentially distributed."""
    times: tuple[float, ...] = ()
    """Instead of either: when sessions begin, in ascending order; the clients take them in turn."""
    sessions: int | None = None
    """How many each client has in all; None for no end."""
    stream: bool = True

    def __post_init__(self) -> None:
        if self.client_count < 1 or any(weight <= 0 for weight in self.weights):
            raise ValueError("a workload needs a client, and weights are positive")
        if (self.rate > 0) + (self.concurrency > 0) + bool(self.times) != 1:
            raise ValueError("a workload has either a rate or a concurrency or times")
        if self.cv <= 0 or self.changes <= 0 or self.change <= 0:
            raise ValueError("a workload's cv, changes and change are positive")

    @abstractmethod
    def clients(self, seed: int) -> Sequence[Client]:
        """See `Workload`."""

    def at_rate(self, rate: float) -> Self:
        """The same in an open loop with this rate."""
        return replace(self, rate=rate, concurrency=0, times=())

    def population(self, seed: int, draw: Callable[[Random], Draw]) -> Sequence[Client]:
        """The clients, each with a random generator of its own, from which `draw` makes its calls."""
        return [self._client(number, Random(f"{seed} {number}"), draw) for number in range(self.client_count)]

    def _client(self, number: int, random: Random, draw: Callable[[Random], Draw]) -> Client:
        weight = self.weights[number % len(self.weights)] if self.weights else 1.0
        return Client(f"c{number + 1}", self._calls(number, random, draw(random)), weight)

    def _calls(self, number: int, random: Random, draw: Draw) -> Iterator[Call]:
        if self.concurrency:
            return closed_loop(draw, self.concurrency, lambda: pause(random, self.think), self.sessions)
        return open_loop(draw, islice(self._times(number, random), self.sessions))

    def _times(self, number: int, random: Random) -> Iterator[float]:
        """When this client's sessions begin."""
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
    """An exponentially distributed time; none where the mean is 0."""
    return random.expovariate(1 / mean) if mean else 0.0


def varied(random: Random, mean: int, spread: float) -> int:
    """A whole number up to `spread` of the mean below or above it, at least 1."""
    return max(1, round(mean * random.uniform(1 - spread, 1 + spread)))
