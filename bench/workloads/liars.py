"""Clients that state the limits of their answers truly or roughly, and one whose limits are far beyond its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from bench.workloads.parts.pace import varied
from bench.workloads.parts.prompts import EMPTY, Prompt, random_tokens
from bench.workloads.parts.traffic import Call, Client, closed_loop


@dataclass(frozen=True, slots=True)
class Liars:
    """Honest clients `honest-1` and so on, and `liar`, each with as many calls open at any time; lengths in tokens.

    Raises ValueError without an honest client or a call of one.
    """

    honest: int = 6
    in_flight: int = 64
    """Calls that each honest client has open."""
    input: int = 500
    output: int = 150
    spread: float = 0.5
    """By how much of themselves inputs and answers may be shorter or longer."""
    long_share: float = 0.1
    """Of the honest answers, those that are of `long_output` instead."""
    long_output: int = 2000
    limit: int | None = None
    """Of every honest call; None for the length that its answer will have."""
    grows: float = inf
    """Seconds after which honest answers are of `later_output`."""
    later_output: int = 1500
    lying: int = 16
    """Calls that the liar has open; 0 for no liar."""
    lying_from: float = 0.0
    """Seconds after which it begins."""
    lie: int | None = 128_000
    """The limit that it states; None for the length that its answer will have."""
    liar_input: int = 500
    liar_output: int = 2000

    def __post_init__(self) -> None:
        if self.honest < 1 or self.in_flight < 1:
            raise ValueError("honest and in_flight must be at least 1")

    def clients(self, seed: int) -> Sequence[Client]:
        """See `Workload`."""
        honest = [self._honest(f"honest-{number + 1}", seed) for number in range(self.honest)]
        return [*honest, self._liar(seed)] if self.lying else honest

    def _honest(self, name: str, seed: int) -> Client:
        random = Random(f"{seed} {name}")

        def draw(at: float) -> Sequence[Call]:
            output = varied(random, self.later_output if at >= self.grows else self.output, self.spread)
            if random.random() < self.long_share:
                output = self.long_output
            return [self._call(random, at, self.input, output, self.limit)]

        return Client(name, closed_loop(draw, self.in_flight))

    def _liar(self, seed: int) -> Client:
        random = Random(f"{seed} liar")

        def draw(at: float) -> Sequence[Call]:
            output = varied(random, self.liar_output, self.spread)
            return [self._call(random, max(at, self.lying_from), self.liar_input, output, self.lie)]

        return Client("liar", closed_loop(draw, self.lying))

    def _call(self, random: Random, at: float, size: int, output: int, limit: int | None) -> Call:
        prompt = Prompt(EMPTY, random_tokens(random, varied(random, size, self.spread)))
        return Call(at, prompt, output, output if limit is None else limit)
