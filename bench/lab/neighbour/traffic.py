"""Noisy neighbours: heavy clients that keep many calls open, and light ones with an occasional short call."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from bench.workloads.parts.arrivals import poisson
from bench.workloads.parts.pace import varied
from bench.workloads.parts.prompts import EMPTY, Prompt, Text, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw, closed_loop, open_loop
from workers.engine.tokenizer import VOCABULARY, decode

HEAVY: Final = "heavy"
LIGHT: Final = "light"
"""What the clients' names begin with."""
_PIECES: Final = [decode([token]) for token in dict.fromkeys(VOCABULARY)]
WORDS: Final = [piece for piece in _PIECES if piece.isascii() and piece.strip().isalpha()]
"""Common English words, each with a leading space: about one token each for any model."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Clients `heavy-1` and so on in a closed loop, `light-1` and so on in an open one; lengths in tokens.

    Raises ValueError if one of the numbers is invalid.
    """

    heavy: int = 2
    light: int = 4
    open: int = 16
    """Open calls of each heavy client."""
    prefix: int = 6000
    """What all calls of a heavy client begin with; each client has its own."""
    heavy_input: int = 200
    """Length of the input after the prefix."""
    heavy_output: int = 150
    spread: float = 0.5
    """These two lengths may be shorter or longer by up to this share."""
    light_input: int = 300
    light_output: int = 50
    rate: float = 0.5
    """Calls per second of each light client, at times of a Poisson process, whether or not earlier ones were
    answered.
    """

    def __post_init__(self) -> None:
        if self.heavy < 0 or self.light < 1 or self.open < 1:
            raise ValueError("there must be a light client, and a heavy one keeps a call open")
        lengths = (self.heavy_input, self.heavy_output, self.light_input, self.light_output)
        if min(lengths) < 1 or self.prefix < 0 or not 0 <= self.spread < 1:
            raise ValueError("lengths must be at least 1, and the spread less than 1")
        if self.rate <= 0:
            raise ValueError("the rate must be positive")

    def clients(self, seed: int) -> Sequence[Client]:
        heavy = [self._heavy(f"{HEAVY}-{n + 1}", seed) for n in range(self.heavy)]
        return [*heavy, *(self._light(f"{LIGHT}-{n + 1}", seed) for n in range(self.light))]

    def _heavy(self, name: str, seed: int) -> Client:
        random = Random(f"{seed} {self.heavy} {name}")
        prefix = Text(random_tokens(random, self.prefix))

        def draw(at: float) -> Sequence[Call]:
            own = random_tokens(random, varied(random, self.heavy_input, self.spread))
            output = varied(random, self.heavy_output, self.spread)
            return [Call(at, Prompt(prefix, own), output, output)]

        return Client(name, closed_loop(draw, self.open))

    def _light(self, name: str, seed: int) -> Client:
        random = Random(f"{seed} {self.heavy} {name}")
        return Client(name, open_loop(self._question(random), poisson(random, self.rate)))

    def _question(self, random: Random) -> Draw:
        def draw(at: float) -> Sequence[Call]:
            prompt = Prompt(EMPTY, random_tokens(random, self.light_input))
            return [Call(at, prompt, self.light_output, self.light_output)]

        return draw


def spoken(prompt: Prompt) -> str:
    """Return the prompt as text, one word per token: not every router accepts token ids."""
    words = WORDS
    return "".join([words[token % len(words)] for token in prompt.tokens])
