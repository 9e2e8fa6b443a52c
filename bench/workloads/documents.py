"""Questions about documents that many calls share: everybody's, or one client's."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.workloads.parts.pace import RatedWorkload, pause, varied
from bench.workloads.parts.prompts import Prompt, Text, Texts, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw, closed_loop


@dataclass(frozen=True, slots=True)
class SharedDocuments(RatedWorkload):
    """Each call is a random document and a question of its own after it; lengths in tokens."""

    documents: int = 80
    tokens: int = 10_000
    """Length of every document."""
    question: int = 40
    output: int = 64
    spread: float = 0.5
    """Questions and answers may be shorter or longer by up to this share of their length."""

    def clients(self, seed: int) -> Sequence[Client]:
        library = Texts(lambda number: Text(random_tokens(Random(f"{seed} document {number}"), self.tokens)))
        return self.population(seed, lambda random: self._draw(library, random))

    def _draw(self, library: Texts, random: Random) -> Draw:
        def draw(at: float) -> Sequence[Call]:
            question = random_tokens(random, varied(random, self.question, self.spread))
            output = varied(random, self.output, self.spread)
            return [Call(at, Prompt(library[random.randrange(self.documents)], question), output, output, self.stream)]

        return draw


@dataclass(frozen=True, slots=True)
class OwnDocuments:
    """The client `heavy` asks about several documents of its own, `light-1` and so on about one each.

    Lengths are in tokens. Raises ValueError without a light client, a document or a call in flight.
    """

    in_flight: int = 96
    """Calls that the heavy client keeps open."""
    documents: int = 8
    """The heavy client's; each of its calls is about a random one."""
    lights: int = 6
    light_in_flight: int = 2
    """Calls that a light client keeps open."""
    think: float = 0.5
    """Mean seconds between a light client's answer and its next call; exponentially distributed."""
    tokens: int = 6000
    """Mean length of a document."""
    tokens_spread: float = 0.33
    """Documents may be shorter or longer by up to this share of their mean length."""
    question: int = 100
    output: int = 100
    spread: float = 0.5
    """The same for questions and answers."""

    def __post_init__(self) -> None:
        if min(self.in_flight, self.documents, self.lights, self.light_in_flight) < 1:
            raise ValueError("in_flight, documents, lights and light_in_flight must be at least 1")

    def clients(self, seed: int) -> Sequence[Client]:
        heavy = closed_loop(self._draw(Random(f"{seed} heavy"), self.documents), self.in_flight)
        return [Client("heavy", heavy), *(self._light(f"light-{n + 1}", seed) for n in range(self.lights))]

    def _light(self, name: str, seed: int) -> Client:
        random = Random(f"{seed} {name}")
        return Client(name, closed_loop(self._draw(random, 1), self.light_in_flight, lambda: pause(random, self.think)))

    def _draw(self, random: Random, documents: int) -> Draw:
        texts = [Text(random_tokens(random, varied(random, self.tokens, self.tokens_spread))) for _ in range(documents)]

        def draw(at: float) -> Sequence[Call]:
            question = random_tokens(random, varied(random, self.question, self.spread))
            output = varied(random, self.output, self.spread)
            return [Call(at, Prompt(random.choice(texts), question), output, output)]

        return draw
