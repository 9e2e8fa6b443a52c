"""Prompts of a beginning that many share and an end of one's own, with the lengths that papers publish of data sets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from bench.workloads.parts.lengths import Lengths, stratified, zipf
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.prompts import Prompt, Text, Texts, random_tokens
from bench.workloads.parts.traffic import Call, Client, Draw


@dataclass(frozen=True, slots=True)
class SharedPrefix(RatedWorkload):
    """Each call is what all begin with, the prefix of one group and a question of its own; lengths in tokens.

    A stand-in for a data set of which only statistics are known: a tool's instructions, a video, a document, a
    programming problem are groups. Raises ValueError without a group.
    """

    groups: int = 64
    popularity: float = 0.0
    """Zipf's exponent of how often each group is asked for; 0 is equally often."""
    own: bool = False
    """Whether each client has groups of its own, instead of sharing them with the others."""
    system: int = 0
    """What all begin with."""
    prefix: Lengths = field(default=Lengths(2048))
    """What a group shares behind that."""
    prefix_times: float = 1.0
    """By how much longer the prefixes are than that, each of them (S2 of the DLPM paper, table 3)."""
    question: Lengths = field(default=Lengths(128))
    output: Lengths = field(default=Lengths(256))
    limit: int | None = None
    """The answer's length that clients ask for at most; None where they know it."""
    alone: float = 0.0
    """Share of the calls whose prefix nobody else has."""

    def __post_init__(self) -> None:
        RatedWorkload.__post_init__(self)
        if self.groups < 1 or not 0 <= self.alone <= 1 or self.prefix_times <= 0:
            raise ValueError("a workload's groups and prefix_times are positive, and alone is a share")

    def clients(self, seed: int) -> Sequence[Client]:
        """See `Workload`."""
        system = random_tokens(Random(f"{seed} system"), self.system)
        common = None if self.own else Library(self, f"{seed}", system)

        def draw(random: Random) -> Draw:
            return self._draw(common or Library(self, f"{random.getrandbits(64)}", system), random)

        return self.population(seed, draw)

    def _draw(self, library: "Library", random: Random) -> Draw:
        def draw(at: float) -> Sequence[Call]:
            text = library.alone(random) if random.random() < self.alone else library.pick(random)
            output = self.output.draw(random)
            prompt = Prompt(text, random_tokens(random, self.question.draw(random)))
            return [Call(at, prompt, output, self.limit or output, self.stream)]

        return draw


class Library:
    """The groups' prefixes."""

    def __init__(self, workload: SharedPrefix, seed: str, system: tuple[int, ...]) -> None:
        self._lengths = workload.prefix
        self._times = workload.prefix_times
        self._system = system
        shares = zipf(workload.groups, workload.popularity)
        self._upto = list(accumulate(shares))
        self._sizes = stratified(workload.prefix, shares, Random(f"{seed} sizes"))
        self._texts = Texts(lambda group: self._text(Random(f"{seed} {group}"), self._sizes[group]))

    def pick(self, random: Random) -> Text:
        """One of the groups', by their popularity."""
        return self._texts[random.choices(range(len(self._sizes)), cum_weights=self._upto)[0]]

    def alone(self, random: Random) -> Text:
        """One that is asked for once."""
        return self._text(random, self._lengths.draw(random))

    def _text(self, random: Random, size: int) -> Text:
        return Text(self._system + random_tokens(random, round(size * self._times)))
