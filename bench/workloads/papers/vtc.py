"""The synthetic suites of the VTC paper (section 5): clients with prescribed rates, and prompts that are all
different.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Final, Literal

from bench.workloads.parts.arrivals import in_turn, on_off, poisson, ramp, uniform
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.prompts import EMPTY, Prompt, random_tokens
from bench.workloads.parts.traffic import Call, Client, open_loop


@dataclass(frozen=True, slots=True)
class Stretch:
    """A client's rate for some time."""

    rate: float
    """Calls per second."""
    seconds: float = inf
    to: float | None = None
    """The rate at the end of the stretch, which it approaches linearly; None if it is constant."""
    window: float | None = None
    """The client calls in every other window of this many seconds, beginning with the first; None for always."""

    def times(self, random: Random, arrivals: Literal["poisson", "uniform"]) -> Iterator[float]:
        """Return arrival times since the beginning of the stretch; uniform ones begin at a random phase."""
        if self.to is not None:
            times = ramp(self.rate, self.to, self.seconds, random.random())
        elif arrivals == "uniform":
            times = uniform(self.rate, random.random())
        else:
            times = poisson(random, self.rate)
        return times if self.window is None else on_off(times, self.window)


@dataclass(frozen=True, slots=True)
class Sender:
    """One client; lengths in tokens."""

    stretches: tuple[Stretch, ...]
    input: Lengths = field(default=Lengths(256))
    output: Lengths = field(default=Lengths(256))


@dataclass(frozen=True, slots=True)
class Suite:
    """Clients named `c1` and so on. Raises ValueError if there is no traffic."""

    senders: tuple[Sender, ...]
    arrivals: Literal["poisson", "uniform"] = "uniform"
    weights: tuple[float, ...] = ()
    """Weights of the clients in turn; 1 if empty."""
    speed: float = 1.0
    """Factor of all rates; the length of the stretches does not change."""

    def __post_init__(self) -> None:
        if not self.senders or self.speed <= 0 or any(weight <= 0 for weight in self.weights):
            raise ValueError("a workload needs a client, and its speed and weights are positive")

    def clients(self, seed: int) -> Sequence[Client]:
        return [self._client(number, sender, seed) for number, sender in enumerate(self.senders)]

    def _client(self, number: int, sender: Sender, seed: int) -> Client:
        random = Random(f"{seed} {number}")

        def draw(at: float) -> Sequence[Call]:
            prompt = Prompt(EMPTY, random_tokens(random, sender.input.draw(random)))
            output = sender.output.draw(random)
            return [Call(at, prompt, output, output)]

        weight = self.weights[number % len(self.weights)] if self.weights else 1.0
        return Client(f"c{number + 1}", open_loop(draw, self._times(sender, random)), weight)

    def _times(self, sender: Sender, random: Random) -> Iterator[float]:
        return in_turn(
            (stretch.seconds, _faster(stretch, self.speed).times(random, self.arrivals)) for stretch in sender.stretches
        )


def steady(*rates: float, input: float = 256, output: float = 256) -> tuple[Sender, ...]:
    """Return clients with these constant rates, in calls per second."""
    return tuple(Sender((Stretch(rate),), Lengths(input), Lengths(output)) for rate in rates)


def _faster(stretch: Stretch, speed: float) -> Stretch:
    to = None if stretch.to is None else stretch.to * speed
    return Stretch(stretch.rate * speed, stretch.seconds, to, stretch.window)


ARENA_COUNTS: Final = (
    296,
    262,
    199,
    120,
    67,
    66,
    56,
    46,
    44,
    43,
    40,
    36,
    31,
    26,
    25,
    23,
    22,
    22,
    19,
    19,
    12,
    11,
    7,
    3,
    2,
    2,
    1,
)
"""Requests, of 1500 in 600 s, of each of the 27 clients of the VTC paper's trace (its section 5.3)."""
ARENA_INPUT: Final = Lengths(136, 206, least=2, most=1021)
ARENA_OUTPUT: Final = Lengths(256, 207, least=2, most=977)

VTC_SUITES: Final[Mapping[str, Suite]] = {
    # Figure 3: 90 and 180 calls a minute.
    "vtc-overload": Suite(steady(1.5, 3.0)),
    # Figure 4: 15, 30 and 90.
    "vtc-proportional": Suite(steady(0.25, 0.5, 1.5)),
    # Figure 5: 30 at times and 120 always.
    "vtc-on-off-less": Suite((Sender((Stretch(0.5, window=60.0),)), *steady(2.0))),
    # Figure 6: 120 at times and 180 always.
    "vtc-on-off-overload": Suite((Sender((Stretch(2.0, window=60.0),)), *steady(3.0))),
    # Figure 7: 480 short ones and 90 long ones.
    "vtc-short-long": Suite(
        (*steady(8.0, input=64, output=64), *steady(1.5, input=256, output=256)), arrivals="poisson"
    ),
    # Figure 8: 480 with long answers and 90 with long prompts.
    "vtc-prefill-decode": Suite(
        (*steady(8.0, input=64, output=512), *steady(1.5, input=512, output=64)), arrivals="poisson"
    ),
    # Figure 9: 30, and one that rises to 120 in ten minutes.
    "vtc-increase": Suite((*steady(0.5), Sender((Stretch(0.2, 600.0, to=2.0), Stretch(2.0))))),
    # Figure 10: three times five minutes; on and off beside an overload, both over their share, one under it.
    "vtc-shift": Suite(
        (
            Sender((Stretch(0.5, 300.0, window=60.0), Stretch(1.0, 300.0), Stretch(0.5))),
            Sender((Stretch(2.0, 300.0), Stretch(1.0, 300.0), Stretch(1.5))),
        )
    ),
    # Figures 11 to 13: a stand-in for the 27 clients of its trace, 150 calls a minute.
    "vtc-27": Suite(
        tuple(Sender((Stretch(count / 600),), ARENA_INPUT, ARENA_OUTPUT) for count in ARENA_COUNTS), arrivals="poisson"
    ),
    # Figure 14: both over their share, calls of other lengths.
    "vtc-512": Suite(steady(1.5, 3.0, input=512, output=512)),
    "vtc-768": Suite(steady(1.5, 3.0, input=768, output=768)),
    # Of its artifact: eight clients over their share; weights.
    "vtc-overload-multi": Suite(steady(0.4, 0.4, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6)),
    "vtc-weighted": Suite(steady(0.8, 0.8, 1.2, 1.6), weights=(1.0, 2.0, 3.0, 4.0)),
}
