"""Clients whose max_tokens are exact or approximate, and one whose max_tokens are far beyond its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from bench.workloads.parts.pace import varied
from bench.workloads.parts.prompts import EMPTY, Prompt, random_tokens
from bench.workloads.parts.traffic import Call, Client, closed_loop


@dataclass(frozen=True, slots=True)
class Liars:
    """Honest clients `honest-1` and so on, and `liar`, each with a constant number of open calls; lengths in tokens.

    Raises ValueError without an honest client, or if one has no call open.
    """

    honest: int = 6
    in_flight: int = 64
    """Open calls of each honest client."""
    input: int = 500
    output: int = 150
    spread: float = 0.5
    """Inputs and answers may be shorter or longer by up to this share of their length."""
    long_share: float = 0.1
    """Share of the honest answers that have the length `long_output`."""
    long_output: int = 2000
    limit: int | None = None
    """The max_tokens of every honest call; None for the exact length of its answer."""
    grows: float = inf
    """Seconds after which honest answers have the length `later_output`."""
    later_output: int = 1500
    lying: int = 16
    """Open calls of the liar; 0 for no liar."""
    lying_from: float = 0.0
    """Seconds after which the liar begins."""
    lie: int | None = 128_000
    """The liar's max_tokens; None for the exact length of its answer."""
    liar_input: int = 500
    liar_output: int = 2000

    def __post_init__(self) -> None:
        if self.honest < 1 or self.in_flight < 1:
            raise ValueError("honest and in_flight must be at least 1")

    def clients(self, seed: int) -> Sequence[Client]:
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
