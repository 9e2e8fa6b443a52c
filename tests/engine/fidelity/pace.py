"""Measures how long the steps of a real engine take on this machine, so that its emulation takes as long."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from .. import prompts
from .load import Call
from .play import Outcome, ask, play

ROUNDS = 8
SHORT, LONG = 32, 480
"""Tokens of the two prompts of the probe, each of which is computed in one step."""
DECODED = 48
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a step that computes nothing, and what each prefilled token and each decoded sequence adds."""

    step: float
    prefilled_token: float
    decoded_sequence: float

    def __str__(self) -> str:
        return f"{self.step:.3f},{self.prefilled_token:.5f},{self.decoded_sequence:.3f}"


def typical(every: Sequence[StepTimes]) -> StepTimes:
    """Return the median of each of the three times."""
    return StepTimes(
        median(each.step for each in every),
        median(each.prefilled_token for each in every),
        median(each.decoded_sequence for each in every),
    )


async def measured(url: str, at_once: int) -> StepTimes:
    """Probe an idle engine with lone prompts of two lengths and with concurrent answers, and fit its step times."""
    names = iter(range(10**6))
    short, long = [], []
    for _ in range(ROUNDS):
        short.append(_first_token(await ask(url, _probe(names, SHORT, 1))))
        long.append(_first_token(await ask(url, _probe(names, LONG, 1))))
    prefilled_token = max(0.0, (median(long) - median(short)) / (LONG - SHORT))
    alone = [await play(url, [_probe(names, SHORT, DECODED)], 1) for _ in range(ROUNDS)]
    together = [await play(url, [_probe(names, SHORT, DECODED) for _ in range(at_once)], at_once) for _ in range(2)]
    one, many = _token_seconds(alone), _token_seconds(together)
    decoded = max(0.0, (many - one) / (at_once - 1))
    return StepTimes(1e3 * max(0.0, one - decoded), 1e3 * prefilled_token, 1e3 * decoded)


def _probe(names: Iterator[int], length: int, answer: int) -> Call:
    return Call(0, tuple(prompts.tokens(f"probe {next(names)}", length)), answer, None)


def _first_token(outcome: Outcome) -> float:
    return outcome.token_times[0] - outcome.began


def _token_seconds(rounds: Sequence[Sequence[Outcome]]) -> float:
    """Return the mean time from one token to the next, median over all calls; several may be read at once."""
    calls = [outcome.token_times for outcomes in rounds for outcome in outcomes]
    return median((times[-1] - times[0]) / (DECODED - 1) for times in calls)
