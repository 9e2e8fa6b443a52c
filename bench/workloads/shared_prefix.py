"""Prompts with a beginning that many share and an end of their own, with the lengths that papers publish of data
sets.
"""

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
    """Each call is the common beginning, the prefix of one group and a question of its own; lengths in tokens.

    A stand-in for a data set of which only statistics are known: a tool's instructions, a video, a document or a
    programming problem is a group. Raises ValueError without a group.
    """

    groups: int = 64
    popularity: float = 0.0
    """Zipf exponent of how often each group is used; 0 for equally often."""
    own: bool = False
    """True if each client has groups of its own instead of sharing them with the others."""
    system: int = 0
    """The common beginning of all calls."""
    prefix: Lengths = field(default=Lengths(2048))
    """What a group shares after the common beginning."""
    prefix_times: float = 1.0
    """Factor of every prefix length (S2 of the DLPM paper, table 3)."""
    question: Lengths = field(default=Lengths(128))
    output: Lengths = field(default=Lengths(256))
    limit: int | None = None
    """The max_tokens that clients ask for; None for the exact length of the answer."""
    alone: float = 0.0
    """Share of the calls whose prefix is used only once."""

    def __post_init__(self) -> None:
        RatedWorkload.__post_init__(self)
        if self.groups < 1 or not 0 <= self.alone <= 1 or self.prefix_times <= 0:
            raise ValueError("a workload's groups and prefix_times are positive, and alone is a share")

    def clients(self, seed: int) -> Sequence[Client]:
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
        """Return a random group's prefix, by popularity."""
        return self._texts[random.choices(range(len(self._sizes)), cum_weights=self._upto)[0]]

    def alone(self, random: Random) -> Text:
        """Return a prefix that is used only once."""
        return self._text(random, self._lengths.draw(random))

    def _text(self, random: Random, size: int) -> Text:
        return Text(self._system + random_tokens(random, round(size * self._times)))
