"""Tree-of-Thoughts: every thought branches into several that continue it, down to a final answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Final

from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.prompts import Prompt, Text, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw, Ending, Outcome

STAGES: Final = 4
"""Plan, execute, reflect, answer: the tree's height in the DLPM paper (6.1)."""


@dataclass(frozen=True, slots=True)
class TreeOfThoughts(RatedWorkload):
    """A session is a tree of b + b² + b³ + b⁴ calls for b branches: 30, 120 or 340 for 2, 3 or 4; lengths in tokens.

    The b calls at a node have the same prompt and different answers; each answer is continued by the next stage's
    instruction as soon as it arrives. A branch ends with a call that is not answered. Raises ValueError without a
    branch.
    """

    branches: int = 2
    template: int = 70
    """The text before every question, the same for all."""
    question: Lengths = field(default=Lengths(63, 25, most=512))
    question_times: float = 1.0
    """Factor of the question's length (S2 of the DLPM paper, table 3: 10)."""
    instruction: int = 52
    """What each further stage adds after the previous answer, the same for all."""
    output: Lengths = field(default=Lengths(130, 60, most=256))
    limit: int = 256
    """The max_tokens that clients ask for."""

    def __post_init__(self) -> None:
        RatedWorkload.__post_init__(self)
        if self.branches < 1 or self.question_times <= 0:
            raise ValueError("a workload's branches and question_times are positive")

    @property
    def calls(self) -> int:
        """The number of calls of a whole tree."""
        return sum(self.branches**depth for depth in range(1, STAGES + 1))

    def clients(self, seed: int) -> Sequence[Client]:
        random = Random(f"{seed} stages")
        template = random_tokens(random, self.template)
        instructions = [random_tokens(random, self.instruction) for _ in range(STAGES - 1)]
        return self.population(seed, lambda random: self._draw(template, instructions, random))

    def _draw(self, template: tuple[int, ...], instructions: Sequence[tuple[int, ...]], random: Random) -> Draw:
        numbers = count(1)

        def draw(at: float) -> Sequence[Call]:
            own = Random(random.getrandbits(64))
            length = round(self.question.draw(own) * self.question_times)
            outputs = [self.output.draw(own) for _ in range(self.calls)]
            question = random_tokens(own, length)
            tree = Tree(self, str(next(numbers)), instructions, outputs)
            return list(tree.fork(at, Prompt(Text(template + question), ()), stage=0, node=0))

        return draw


class Tree:
    """One tree; its lengths are drawn beforehand, so that they do not depend on which answer arrives first."""

    def __init__(
        self, workload: TreeOfThoughts, name: str, instructions: Sequence[tuple[int, ...]], outputs: Sequence[int]
    ) -> None:
        self._workload = workload
        self._name = name
        self._instructions = instructions
        self._outputs = outputs

    def fork(self, at: float, prompt: Prompt, stage: int, node: int) -> Iterable[Call]:
        """Return the calls of this stage below a node; nodes are numbered level by level, the question is 0."""
        branches = self._workload.branches
        return [self._call(at, prompt, stage, branches * node + branch) for branch in range(1, branches + 1)]

    def _call(self, at: float, prompt: Prompt, stage: int, node: int) -> Call:
        def answered(_: Call, ending: Ending) -> Iterable[Call]:
            if stage == STAGES - 1 or ending.outcome is not Outcome.DONE:
                return []
            following = prompt.followed_by(ending.answer + self._instructions[stage])
            return self.fork(ending.at, following, stage + 1, node)

        return Call(
            at,
            prompt,
            self._outputs[node - 1],
            self._workload.limit,
            self._workload.stream,
            sample=node,
            program=self._name,
            program_calls=self._workload.calls,
            then=answered,
        )
