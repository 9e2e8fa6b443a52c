"""One heavy client with long shared prefixes, and light ones that ask one question at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.workloads.parts.pace import pause, varied
from bench.workloads.parts.prompts import EMPTY, Prompt, Text, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw, closed_loop


@dataclass(frozen=True, slots=True)
class HeavyAndLight:
    """The client `heavy` keeps many calls in flight, `light-1` and so on one each; lengths in tokens.

    Raises ValueError without a light client or a call in flight.
    """

    in_flight: int = 96
    prefixes: int = 8
    """Number of the heavy client's prefixes; each call begins with a random one."""
    prefix: int = 4000
    heavy_input: int = 500
    """Length of the input after the prefix."""
    heavy_output: int = 200
    spread: float = 0.5
    """The heavy client's lengths, prefixes included, may be shorter or longer by up to this share."""
    lights: int = 4
    light_input: int = 300
    light_output: int = 50
    think: float = 1.0
    """Mean seconds between a light client's answer and its next call; exponentially distributed."""

    def __post_init__(self) -> None:
        if self.in_flight < 1 or self.prefixes < 1 or self.lights < 1:
            raise ValueError("in_flight, prefixes and lights must be at least 1")

    def clients(self, seed: int) -> Sequence[Client]:
        heavy = closed_loop(self._heavy(Random(f"{seed} heavy")), self.in_flight)
        return [Client("heavy", heavy), *(self._light(f"light-{n + 1}", seed) for n in range(self.lights))]

    def _heavy(self, random: Random) -> Draw:
        prefixes = [Text(random_tokens(random, varied(random, self.prefix, self.spread))) for _ in range(self.prefixes)]

        def draw(at: float) -> Sequence[Call]:
            own = random_tokens(random, varied(random, self.heavy_input, self.spread))
            output = varied(random, self.heavy_output, self.spread)
            return [Call(at, Prompt(random.choice(prefixes), own), output, output)]

        return draw

    def _light(self, name: str, seed: int) -> Client:
        random = Random(f"{seed} {name}")

        def draw(at: float) -> Sequence[Call]:
            prompt = Prompt(EMPTY, random_tokens(random, self.light_input))
            return [Call(at, prompt, self.light_output, self.light_output)]

        return Client(name, closed_loop(draw, 1, lambda: pause(random, self.think)))
