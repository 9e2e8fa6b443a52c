"""Conversations: each turn's prompt is the previous prompt, its answer and a new question."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.pace import RatedWorkload, pause
from bench.workloads.parts.prompts import Prompt, Text, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw, Ending, Outcome


@dataclass(frozen=True, slots=True)
class Chat(RatedWorkload):
    """Clients that start conversations at a rate, or keep `concurrency` of them open; lengths in tokens.

    A conversation ends after its turns, or with the first turn that is not answered. Each turn is a call by itself, not
    part of a program: the time between turns is the reader's.
    """

    systems: int = 10
    """Number of different system prompts, one of which a conversation picks."""
    system: int = 1000
    turns: Lengths = field(default=Lengths(6))
    question: Lengths = field(default=Lengths(80, 23))
    output: Lengths = field(default=Lengths(200, 58))
    reading: float = 5.0
    """Mean seconds between an answer and the next question; exponentially distributed."""

    def clients(self, seed: int) -> Sequence[Client]:
        random = Random(f"{seed} systems")
        systems = [Text(random_tokens(random, self.system)) for _ in range(self.systems)]
        return self.population(seed, lambda random: self._draw(systems, random))

    def _draw(self, systems: Sequence[Text], random: Random) -> Draw:
        def draw(at: float) -> Sequence[Call]:
            # A generator of its own, so that the traffic does not depend on the order of answers.
            own = Random(random.getrandbits(64))
            return [self._turn(own, at, Prompt(own.choice(systems), ()), self.turns.draw(own))]

        return draw

    def _turn(self, random: Random, at: float, history: Prompt, turns: int) -> Call:
        """Return the next call of a conversation with `turns` turns left."""
        prompt = history.followed_by(random_tokens(random, self.question.draw(random)))
        output = self.output.draw(random)

        def answered(_: Call, ending: Ending) -> Iterable[Call]:
            if turns <= 1 or ending.outcome is not Outcome.DONE:
                return []
            at = ending.at + pause(random, self.reading)
            return [self._turn(random, at, prompt.followed_by(ending.answer), turns - 1)]

        return Call(at, prompt, output, output, self.stream, then=answered)
