"""The policies of BalanceRoute's tables."""

from collections.abc import Mapping
from typing import Final

from bench.lab.frame.conditions import Contender

BASELINES: Final[Mapping[str, Contender]] = {
    name: Contender(name) for name in ("random", "round_robin", "two_choices", "least_requests")
}
"""The paper's baselines (6.1): those of vLLM's router."""
REFERENCE: Final = "least_requests"
"""The paper's JSQ, to which imbalance and throughput are compared."""
OURS: Final[Mapping[str, Contender]] = {"dlpm_home": Contender("dlpm_home")}
"""Policies that share the tier among clients."""
ALL: Final[Mapping[str, Contender]] = {**BASELINES, **OURS}
"""The rows of table 1."""
FEW: Final[Mapping[str, Contender]] = {name: ALL[name] for name in ("least_requests", "dlpm_home")}
"""For the other experiments."""
