"""Requests without a common prefix: short ones, long ones, many at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.workloads.parts.pace import RatedWorkload, pause, varied
from bench.workloads.parts.prompts import EMPTY, Prompt, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw


@dataclass(frozen=True, slots=True)
class Unrelated(RatedWorkload):
    """Each call has a prompt of its own; lengths in tokens."""

    input: int = 50
    output: int = 8
    spread: float = 0.0
    """Prompts and answers may be shorter or longer by up to this share of their length."""
    patience: float | None = None
    """Mean seconds after which a client cancels a call that is not answered; exponentially distributed."""

    def clients(self, seed: int) -> Sequence[Client]:
        return self.population(seed, self._draw)

    def _draw(self, random: Random) -> Draw:
        def draw(at: float) -> Sequence[Call]:
            prompt = Prompt(EMPTY, random_tokens(random, varied(random, self.input, self.spread)))
            output = varied(random, self.output, self.spread)
            patience = None if self.patience is None else pause(random, self.patience)
            return [Call(at, prompt, output, output, self.stream, cancel_after=patience)]

        return draw
