"""Loads of a decode tier whose ranks wait for each other: contexts so long and so unequal that their reading counts.

Prompts share nothing. The rates are 1.2 times what eight ranks could serve if they always had equal loads
(`bench.lab.balance.tiers`), with the slots and step times that stand there: the fleet is saturated, so that
a router has a choice among waiting calls. The project's other load of this kind is the Mooncake trace
(`bench.workloads.recorded.traces`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from random import Random
from typing import Final

from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.prompts import EMPTY, Prompt, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw, Workload

PROMPTS: Final = Lengths(6000, 7460, least=32, most=64_000)
"""The logarithm's standard deviation is 1.1."""
ANSWERS: Final = Lengths(500, 793, most=8192)
"""The logarithm's standard deviation is 1.3."""


@dataclass(frozen=True, slots=True)
class LongContexts(RatedWorkload):
    """Calls with lognormal prompts and answers, independent of each other; lengths in tokens."""

    input: Lengths = PROMPTS
    output: Lengths = ANSWERS

    def clients(self, seed: int) -> Sequence[Client]:
        return self.population(seed, self._draw)

    def sizes(self, random: Random) -> tuple[int, int]:
        """Draw the tokens of a prompt and of its answer."""
        return self.input.draw(random), self.output.draw(random)

    def _draw(self, random: Random) -> Draw:
        def draw(at: float) -> Sequence[Call]:
            return [call(at, *self.sizes(random), random, stream=self.stream)]

        return draw


@dataclass(frozen=True, slots=True)
class BfIo(RatedWorkload):
    """The random requests of "A universal load balancing principle and its application to large language model
    serving": prompts and answers with normal distributions, weakly and negatively correlated; lengths in tokens.

    Pairs with a length below 1 are drawn again.
    """

    input: float = 3200.0
    input_sd: float = 2600.0
    output: float = 1200.0
    output_sd: float = 700.0
    correlation: float = -0.1

    def clients(self, seed: int) -> Sequence[Client]:
        return self.population(seed, self._draw)

    def sizes(self, random: Random) -> tuple[int, int]:
        """Draw the tokens of a prompt and of its answer."""
        while True:
            first, other = random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)
            second = self.correlation * first + sqrt(1 - self.correlation**2) * other
            sizes = round(self.input + self.input_sd * first), round(self.output + self.output_sd * second)
            if min(sizes) >= 1:
                return sizes

    def _draw(self, random: Random) -> Draw:
        def draw(at: float) -> Sequence[Call]:
            return [call(at, *self.sizes(random), random, stream=self.stream)]

        return draw


def call(at: float, prompt: int, answer: int, random: Random, *, stream: bool) -> Call:
    """Return a call with a prompt of its own."""
    return Call(at, Prompt(EMPTY, random_tokens(random, prompt)), answer, answer, stream)


BALANCE: Final[Mapping[str, Workload]] = {
    "long-contexts": LongContexts(rate=4.3),
    "bf-io": BfIo(rate=15.0),
}
"""The loads by name."""
