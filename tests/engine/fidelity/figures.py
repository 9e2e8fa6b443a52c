"""Measures how two runs of the same load differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from .pace import StepTimes
from .play import Outcome

HIT_RATE = 0.02
EQUAL_CALLS = 0.95
TAU = 0.1
EVICTIONS = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load on one engine."""

    name: str
    outcomes: Sequence[Outcome]
    evicted_tokens: int
    times: StepTimes

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached, over completed calls."""
        completed = [outcome for outcome in self.outcomes if outcome.cached is not None]
        return sum(outcome.cached or 0 for outcome in completed) / sum(outcome.prompt_tokens for outcome in completed)


@dataclass(frozen=True, slots=True)
class Difference:
    """How a run differs from another one, the first."""

    hit_rate: float
    """Absolute difference of the two rates, each from 0 to 1."""
    equal_calls: float
    """Share of calls with the same count of cached tokens."""
    tau: float
    """Kendall's tau of the order of ends, over calls that overlapped in the first run."""
    evictions: float
    """Absolute difference of evicted tokens, as a share of the first run's."""


def difference(first: Run, second: Run) -> Difference:
    """Compare two runs, without the calls that were cancelled in either."""
    pairs = [(a, b) for a, b in zip(first.outcomes, second.outcomes, strict=True) if a.completed and b.completed]
    equal = sum(a.cached == b.cached for a, b in pairs) / len(pairs)
    evictions = abs(second.evicted_tokens - first.evicted_tokens) / max(1, first.evicted_tokens)
    return Difference(abs(second.hit_rate - first.hit_rate), equal, kendall_tau(pairs), evictions)


def kendall_tau(pairs: Sequence[tuple[Outcome, Outcome]]) -> float:
    """Return Kendall's tau of the order of ends, over calls that overlapped in the first run.

    It is 1 if the calls ended in the same order in the second run, and -1 if in the reverse order.
    """
    agreeing = [
        (a.ended < b.ended) == (other_a.ended < other_b.ended)
        for (a, other_a), (b, other_b) in combinations(pairs, 2)
        if a.began < b.ended and b.began < a.ended
    ]
    return 2 * sum(agreeing) / len(agreeing) - 1 if agreeing else 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure, its bound, and whether the bound is kept."""

    what: str
    figure: float
    bound: float
    kept: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.figure:.4f}, bound {self.bound:.4f}: {'kept' if self.kept else 'MISSED'}"


def verdicts(itself: Sequence[Difference], emulation: Difference) -> Iterator[Verdict]:
    """Compare the emulation's difference from the real engine with the largest of the real engine from `itself`."""

    def at_most(what: str, figure: float, bound: float) -> Verdict:
        return Verdict(what, figure, bound, figure <= bound)

    def at_least(what: str, figure: float, bound: float) -> Verdict:
        return Verdict(what, figure, bound, figure >= bound)

    noise = max(each.hit_rate for each in itself)
    yield at_most("difference of hit rates", emulation.hit_rate, noise + HIT_RATE)
    unequal = max(1 - each.equal_calls for each in itself)
    yield at_least("share of calls with equal cached tokens", emulation.equal_calls, EQUAL_CALLS - unequal)
    yield at_least("Kendall's tau of the order of ends", emulation.tau, min(each.tau for each in itself) - TAU)
    noise = max(each.evictions for each in itself)
    yield at_most("difference of evicted tokens, of the real one's", emulation.evictions, noise + EVICTIONS)
