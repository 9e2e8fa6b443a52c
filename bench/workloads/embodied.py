"""Embodied agents: steps in an environment, each with all the steps before it in its prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.prompts import Prompt, Text, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw, Ending, Outcome


@dataclass(frozen=True, slots=True)
class Embodied(RatedWorkload):
    """A session is one task, whose steps follow each other; lengths in tokens.

    A stand-in for ALFWorld in Preble's appendix A.2: environments differ from their first token on, and a task ends
    after its steps or with the first that is not answered.
    """

    start: Lengths = field(default=Lengths(1740, 350, most=4096))
    """The environment, the task and a demonstration, different in each session."""
    steps: Lengths = field(default=Lengths(48, 8, most=96))
    observation: Lengths = field(default=Lengths(7))
    """The environment's response to an action."""
    output: Lengths = field(default=Lengths(16, 13, most=128))
    limit: int | None = None
    """The max_tokens that clients ask for per action; None for its exact length."""
    gap: float = 0.03
    """Seconds between an action and the next step."""

    def clients(self, seed: int) -> Sequence[Client]:
        return self.population(seed, self._draw)

    def _draw(self, random: Random) -> Draw:
        numbers = count(1)

        def draw(at: float) -> Sequence[Call]:
            own = Random(random.getrandbits(64))
            start = Prompt(Text(random_tokens(own, self.start.draw(own))), ())
            return [self._step(own, at, start, str(next(numbers)), 1, self.steps.draw(own))]

        return draw

    def _step(self, random: Random, at: float, history: Prompt, task: str, step: int, steps: int) -> Call:
        prompt = history.followed_by(random_tokens(random, self.observation.draw(random)))
        output = self.output.draw(random)

        def answered(_: Call, ending: Ending) -> Iterable[Call]:
            if step == steps or ending.outcome is not Outcome.DONE:
                return []
            known = prompt.followed_by(ending.answer)
            return [self._step(random, ending.at + self.gap, known, task, step + 1, steps)]

        return Call(
            at,
            prompt,
            output,
            self.limit or output,
            self.stream,
            program=task,
            program_calls=steps,
            then=answered,
        )
