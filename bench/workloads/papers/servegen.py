"""A production mix of very unequal clients, after ServeGen: one calls in bursts and makes half of the load.

ServeGen ("Workload Characterization and Generation of Large Language Model Serving in Production", arXiv 2505.09999)
publishes each client's rates and lengths. These are the 14 largest clients in 600 s drawn from its mix `m-mid`; a
stand-in for the trace itself, which `bench.workloads.recorded.traces` reads.
"""

from typing import Final, NamedTuple

from bench.workloads.papers.vtc import Sender, Stretch, Suite
from bench.workloads.parts.lengths import Lengths


class Sent(NamedTuple):
    """What a client sent in 600 s; lengths in tokens."""

    calls: int
    input: float
    input_sd: float
    output: float
    output_sd: float
    window: float | None = None
    """Seconds of a burst, and of the pause between two; None if the client calls all the time."""


MID: Final = (
    Sent(13_097, 383, 315, 51, 18, window=15.0),
    Sent(11_210, 186, 86, 53, 53),
    Sent(841, 1076, 1296, 12, 13),
    Sent(312, 381, 49, 491, 69),
    Sent(488, 805, 60, 13, 5),
    Sent(289, 381, 43, 488, 60),
    Sent(264, 388, 48, 491, 63),
    Sent(250, 851, 85, 67, 17),
    Sent(90, 2651, 380, 32, 15),
    Sent(775, 237, 65, 15, 26),
    Sent(9, 18_645, 6000, 136, 143),
    Sent(327, 269, 28, 62, 16),
    Sent(10, 3421, 2710, 1115, 850),
    Sent(41, 906, 519, 53, 72),
)
"""In order of the load. The length of a burst is chosen here: the trace has three in 600 s, of up to 8,344 calls."""
SECONDS: Final = 600.0


def _sender(sent: Sent) -> Sender:
    rate = sent.calls / SECONDS
    stretch = Stretch(rate) if sent.window is None else Stretch(2 * rate, window=sent.window)
    return Sender((stretch,), Lengths(sent.input, sent.input_sd), Lengths(sent.output, sent.output_sd))


SERVEGEN_MID: Final = Suite(tuple(map(_sender, MID)), arrivals="poisson")
"""About 22,000 cost units per second on average, and twice as much in a burst."""
