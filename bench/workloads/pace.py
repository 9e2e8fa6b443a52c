"""How many clients there are and how often each calls: what most families have in common."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from bench.traffic import Call, Client, Draw, closed_loop, open_loop, poisson, uniform


@dataclass(frozen=True, slots=True)
class Pace:
    """Equal clients, in an open loop at a rate or in a closed one.

    Raises ValueError where there would be no traffic.
    """

    client_count: int = 8
    weights: tuple[float, ...] = ()
    """Of the clients in turn; 1 without any."""
    rate: float = 0.0
    """Calls a second of all clients together, whether or not they are answered."""
    arrivals: Literal["poisson", "uniform"] = "poisson"
    concurrency: int = 0
    """Instead of a rate: how many calls each client has in flight."""
    think: float = 0.0
    """Mean seconds between an answer and the next call in a closed loop; exponentially distributed."""
    stream: bool = True

    def __post_init__(self) -> None:
        if self.client_count < 1 or any(weight <= 0 for weight in self.weights):
            raise ValueError("a workload needs a client, and weights are positive")
        if (self.rate > 0) == (self.concurrency > 0):
            raise ValueError("a workload has either a rate or a concurrency")

    def population(self, seed: int, draw: Callable[[Random], Draw]) -> Sequence[Client]:
        """The clients, each with a random generator of its own, from which `draw` makes its calls."""
        return [self._client(number, Random(f"{seed} {number}"), draw) for number in range(self.client_count)]

    def _client(self, number: int, random: Random, draw: Callable[[Random], Draw]) -> Client:
        weight = self.weights[number % len(self.weights)] if self.weights else 1.0
        return Client(f"c{number + 1}", self._calls(number, random, draw(random)), weight)

    def _calls(self, number: int, random: Random, draw: Draw) -> Iterator[Call]:
        if self.concurrency:
            return closed_loop(draw, self.concurrency, lambda: pause(random, self.think))
        rate = self.rate / self.client_count
        if self.arrivals == "uniform":
            return open_loop(draw, uniform(rate, phase=number / self.client_count))
        return open_loop(draw, poisson(random, rate))


def pause(random: Random, mean: float) -> float:
    """An exponentially distributed time; none where the mean is 0."""
    return random.expovariate(1 / mean) if mean else 0.0


def varied(random: Random, mean: int, spread: float) -> int:
    """A whole number up to `spread` of the mean below or above it, at least 1."""
    return max(1, round(mean * random.uniform(1 - spread, 1 + spread)))
