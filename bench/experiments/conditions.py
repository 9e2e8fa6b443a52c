"""Hardware, KV capacity, loads and seeds of all experiments, laid down before the first run and not tuned after.

What the papers do not say is chosen here, with its reason.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from bench.scenario import WorkerSpec
from router.core.policies.d2lpm import D2lpmParameters
from router.core.policies.dlpm import DlpmParameters

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
