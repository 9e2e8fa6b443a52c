"""LLM-as-a-judge: an article is judged in several dimensions at once, and the judgements are combined into a score."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from random import Random

from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.prompts import Prompt, Text, random_tokens
from bench.workloads.parts.traffic import Call, Client, Continuation, Draw, Ending, Outcome


@dataclass(frozen=True, slots=True)
class Judge(RatedWorkload):
    """A session is one call per dimension, and one for the score after all are answered; lengths in tokens.

    All calls begin with the system prompt and the article. The last one also contains the judgements, so it is not made
    if one of them is missing. Raises ValueError without a dimension.
    """

    dimensions: int = 2
    system: int = 60
    """The system prompt, the same for all."""
    extra: int = 0
    """What a client adds before each article, always the same (S2 of the DLPM paper, table 3: 600)."""
    article: Lengths = field(default=Lengths(2400, 600, most=8192))
    question: int = 75
    """The description of a dimension, the same for all."""
    output: Lengths = field(default=Lengths(256))
    limit: int = 256
    """The max_tokens that clients ask for per judgement."""
    score_output: int = 2

    def __post_init__(self) -> None:
        RatedWorkload.__post_init__(self)
        if self.dimensions < 1:
            raise ValueError("a workload's dimensions are positive")

    def clients(self, seed: int) -> Sequence[Client]:
        random = Random(f"{seed} judge")
        system = random_tokens(random, self.system)
        questions = [random_tokens(random, self.question) for _ in range(self.dimensions + 1)]
        return self.population(seed, lambda random: self._draw(system, questions, random))

    def _draw(self, system: tuple[int, ...], questions: Sequence[tuple[int, ...]], random: Random) -> Draw:
        numbers = count(1)
        begin = system + random_tokens(random, self.extra)

        def draw(at: float) -> Sequence[Call]:
            own = Random(random.getrandbits(64))
            text = Text(begin + random_tokens(own, self.article.draw(own)))
            outputs = [self.output.draw(own) for _ in range(self.dimensions)]
            return Judgement(self, str(next(numbers)), text, questions).fork(at, outputs)

        return draw


class Judgement:
    """The judgement of one article."""

    def __init__(self, workload: Judge, name: str, article: Text, questions: Sequence[tuple[int, ...]]) -> None:
        """`questions`: one for each dimension, and the one for the score."""
        self._workload = workload
        self._name = name
        self._article = article
        self._questions = questions
        self._answers: dict[int, tuple[int, ...]] = {}

    def fork(self, at: float, outputs: Sequence[int]) -> Sequence[Call]:
        """Return the call for each dimension."""
        return [self._dimension(at, dimension, output) for dimension, output in enumerate(outputs)]

    def _dimension(self, at: float, dimension: int, output: int) -> Call:
        def answered(_: Call, ending: Ending) -> Iterable[Call]:
            if ending.outcome is Outcome.DONE:
                self._answers[dimension] = ending.answer
            return [self._score(ending.at)] if len(self._answers) == self._workload.dimensions else []

        prompt = Prompt(self._article, self._questions[dimension])
        return self._call(at, prompt, output, self._workload.limit, answered)

    def _score(self, at: float) -> Call:
        judgements = tuple(chain.from_iterable(self._answers[dimension] for dimension in sorted(self._answers)))
        output = self._workload.score_output
        return self._call(at, Prompt(self._article, judgements + self._questions[-1]), output, output, None)

    def _call(self, at: float, prompt: Prompt, output: int, limit: int, then: Continuation | None) -> Call:
        workload = self._workload
        return Call(
            at,
            prompt,
            output,
            limit,
            workload.stream,
            program=self._name,
            program_calls=workload.dimensions + 1,
            then=then,
        )
