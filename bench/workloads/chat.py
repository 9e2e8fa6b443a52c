"""Conversations: each turn's prompt is the one before it, its answer and a new question."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from bench.prompts import Prompt, Text, random_tokens
from bench.traffic import Call, Client, Draw, Ending, Outcome
from bench.workloads.pace import Pace, pause, varied


@dataclass(frozen=True, slots=True)
class Chat(Pace):
    """A new conversation is what a client starts at its rate, or keeps `concurrency` of; lengths in tokens.

    A conversation ends after its turns, or with the first that is not answered.
    """

    systems: int = 10
    """Different system prompts, of which a conversation picks one."""
    system: int = 1000
    turns: int = 6
    question: int = 80
    output: int = 200
    spread: float = 0.5
    """By how much of themselves questions and answers may be shorter or longer."""
    reading: float = 5.0
    """Mean seconds between an answer and the next question; exponentially distributed."""

    def clients(self, seed: int) -> Sequence[Client]:
        """See `Workload`."""
        random = Random(f"{seed} systems")
        systems = [Text(random_tokens(random, self.system)) for _ in range(self.systems)]
        return self.population(seed, lambda random: self._draw(systems, random))

    def _draw(self, systems: Sequence[Text], random: Random) -> Draw:
        def draw(at: float) -> Call:
            return self._turn(random, at, Prompt(random.choice(systems), ()), self.turns)

        return draw

    def _turn(self, random: Random, at: float, history: Prompt, turns: int) -> Call:
        """The next of so many turns that are left."""
        prompt = history.followed_by(random_tokens(random, varied(random, self.question, self.spread)))
        output = varied(random, self.output, self.spread)

        def answered(_: Call, ending: Ending) -> Iterable[Call]:
            if turns == 1 or ending.outcome is not Outcome.DONE:
                return []
            at = ending.at + pause(random, self.reading)
            return [self._turn(random, at, prompt.followed_by(ending.answer), turns - 1)]

        return Call(at, prompt, output, output, self.stream, then=answered)
