"""Hardware, KV capacity, loads and seeds of all experiments, laid down before the first run and not tuned after.

What the papers do not say is chosen here, with its reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from bench.scenario import WorkerSpec
from router.core.policies.d2lpm import D2lpmParameters
from router.core.policies.dlpm import DlpmParameters
from router.core.policies.lpm import LpmParameters

SEEDS: Final = (0, 1, 2, 3, 4)
QUICK_SEEDS: Final = (0,)

A100: Final = WorkerSpec(hardware="a100-mistral-7b")
"""As in the DLPM paper's main comparison, with 8 B on A100s, whose KV takes as much a token."""
A10G_3B: Final = WorkerSpec(hardware="a10g-llama-7b", speed=2.2, kv_tokens=130_000)
"""A model of 3 B on an A10G, as in its figures 8, 11 and 12. Weights of 6.4 GB instead of 14 are read 2.2 times faster;
0.9 of 24 GB less those weights holds 130 k tokens of 112 KiB."""

OVERLOAD: Final = 1.5
"""Times the rate that a workload has by itself, which one A100 just serves at the best hit rate; for each worker."""


def fleet(spec: WorkerSpec, workers: int) -> tuple[WorkerSpec, ...]:
    """So many alike."""
    return (replace(spec),) * workers


class Contender:
    """A policy under the name that it has in a table, with the parameters of its families."""

    __slots__ = ("parameters", "policy")

    def __init__(self, policy: str, *parameters: object) -> None:
        self.policy = policy
        self.parameters = parameters


PRINTED: Final = (
    D2lpmParameters(charge_full_input=True, steal_loss=-1, by_service_rate=False),
    DlpmParameters(sparse_first=False),
)
"""D²LPM as the paper prints it: full charge at the placement, no stealing, equal quanta, no client before another."""

CONTENDERS: Final[Mapping[str, Contender]] = {
    "d2lpm printed": Contender("d2lpm", *PRINTED),
    "d2lpm": Contender("d2lpm"),
    "dlpm_home": Contender("dlpm_home"),
    "rr+lpm": Contender("rr+lpm"),
    "preble": Contender("preble"),
    "vtc": Contender("vtc"),
}
"""The policies of the main comparison (figure 7); all else is at its default."""

# Figures 1 and 8 to 12 of the DLPM paper, all on A10G_3B. It says neither their loads nor how long they ran, nor which
# workload figures 1, 10 and 11 show: trees of thoughts here, as in figure 9, which its text sets beside figure 10.
#
# Seconds that one such worker takes for a session, at the best hit rate and in a full batch: 0.097 ms for each token
# that is computed, and 0.0004 ms for each token of context that is read for each token of an answer.
CHAT_SECONDS: Final = 0.035
"""A conversation of 1.26 turns of 56 and 142 tokens, read at 150 of context."""
TREE_SECONDS: Final = 1.46
"""A tree of 2 branches: 1100 tokens extend and 3890 are answers, at 610 of context."""
LONG_TREE_SECONDS: Final = 2.4
"""The same with a question ten times as long: 1700 and 3890, at 1190."""
TREE_3_SECONDS: Final = 5.9
"""A tree of 3 branches: 3100 and 15 570, at 660."""
LONG_TREE_3_SECONDS: Final = 9.5
"""The same with a question ten times as long: 3700 and 15 570, at 1230."""
JUDGE_SECONDS: Final = 0.92
"""An article judged in 2 dimensions: 3200 and 514, at 2700."""


@dataclass(frozen=True, slots=True)
class Span:
    """How long a simulation is, and from when on it is measured; in seconds."""

    seconds: float
    warmup: float = 0.0


ONE_WORKER: Final[Mapping[str, Contender]] = {
    "dlpm": Contender("rr+dlpm"),
    "lpm": Contender("rr+lpm", LpmParameters(cut_off=0)),
    "lpm 128": Contender("rr+lpm"),
    "vtc": Contender("vtc"),
}
"""Where there is nothing to choose but the order: LPM as the DLPM paper describes it, and with SGLang's cut-off."""

FIG1_RATE: Final = OVERLOAD * 3 / (2 * TREE_SECONDS + LONG_TREE_SECONDS)
"""Trees a second of three clients, one of them with long questions: where all are alike, nothing would be unfair."""
FIG1_QUANTA: Final = (2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
FIG1_QUICK_QUANTA: Final = (2_000, 20_000, 200_000)
FIG1_SPAN, FIG1_QUICK_SPAN = Span(180.0, 45.0), Span(90.0, 30.0)

FIG8_RATE: Final = OVERLOAD * 2 / CHAT_SECONDS
"""Conversations a second while two clients misbehave; 0.92 of what the two workers can do when one has reformed."""
FIG8_SPAN, FIG8_QUICK_SPAN = Span(200.0), Span(60.0)
"""Half of it before the one client reforms."""
FIG8_CONTENDERS: Final = {name: CONTENDERS[name] for name in ("d2lpm", "dlpm_home", "rr+lpm", "vtc")}

FIG9_RATE: Final = OVERLOAD * 4 * 3 / (2 * TREE_3_SECONDS + LONG_TREE_3_SECONDS)
"""Trees a second of all three clients; figure 10 has the same."""
FIG9_TREES, FIG9_QUICK_TREES = 28, 8
"""Of each client: they come within 100 seconds, or within 29."""
FIG9_SPAN, FIG9_QUICK_SPAN = Span(2000.0), Span(800.0)
"""Several times what the trees take without a cache; when all have ended, nothing more happens."""

FIG10_RATE: Final = OVERLOAD * 4 / TREE_3_SECONDS
"""Trees a second where nobody misbehaves."""
FIG10_QUANTA: Final = (2_000, 5_000, 10_000, 20_000, 40_000, 100_000, 200_000)
FIG10_QUICK_QUANTA: Final = (2_000, 20_000, 200_000)
FIG10_SPAN, FIG10_QUICK_SPAN = Span(80.0, 20.0), Span(40.0, 10.0)

FIG11_RATE: Final = OVERLOAD / TREE_SECONDS
"""Trees a second of all clients together, however many they are."""
FIG11_CLIENTS, FIG11_QUICK_CLIENTS = (5, 10, 20, 30, 40, 50), (5, 20, 50)
FIG11_SPAN, FIG11_QUICK_SPAN = Span(180.0, 45.0), Span(60.0, 20.0)

FIG12_CHAT_RATE: Final = 0.4 / CHAT_SECONDS
"""Conversations a second of both clients: each asks for 0.2 of the worker, less than its share of a quarter ..."""
FIG12_TREE_RATE, FIG12_JUDGE_RATE = 0.55 / TREE_SECONDS, 0.55 / JUDGE_SECONDS
"""... and the two with programs ask for more than twice theirs each."""
FIG12_ARRIVING, FIG12_QUICK_ARRIVING = 120.0, 30.0
"""Seconds in which sessions come; then what is there is run to its end."""
FIG12_SPAN, FIG12_QUICK_SPAN = Span(1200.0), Span(300.0)
"""Several times as long."""
