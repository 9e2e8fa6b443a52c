"""Questions about documents that many calls share."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.workloads.parts.pace import RatedWorkload, varied
from bench.workloads.parts.prompts import Prompt, Text, Texts, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw


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
