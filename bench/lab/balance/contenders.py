"""The policies of BalanceRoute's tables; a new one is a line here."""

from collections.abc import Mapping
from typing import Final

from bench.lab.frame.conditions import Contender
from router.core.policies.balance.balance_parameters import Br0Parameters, BrhParameters

BASELINES: Final[Mapping[str, Contender]] = {
    name: Contender(name) for name in ("random", "round_robin", "two_choices", "least_requests")
}
"""The paper's baselines (6.1): those of vLLM's router."""
REFERENCE: Final = "least_requests"
"""The paper's JSQ, to which imbalance and throughput are compared."""
ALL: Final[Mapping[str, Contender]] = {
    **BASELINES,
    "two_choices_kv": Contender("two_choices_kv"),
    "least_kv": Contender("least_kv"),
    "br0": Contender("br0"),
    "br0 beta G": Contender("br0", Br0Parameters(beta=0.0)),
    "br0 largest first": Contender("br0", Br0Parameters(beta=0.0, fill_candidates=0)),
    "br0 bypass": Contender("br0", Br0Parameters(bypass=True)),
    "brh survival": Contender("brh", BrhParameters(predictor="survival")),
    "brh oracle": Contender("brh", BrhParameters(predictor="oracle")),
    "dlpm_home": Contender("dlpm_home"),
    "dlpm_balance": Contender("dlpm_balance"),
}
"""The rows of table 1. Those with `kv` compare tokens of context instead of requests.

`br0` and `br0 bypass` have a penalty of 48, as `brh` has. The paper prints the number of ranks for BR-0, and its stage
1 admits the largest request that fits; by default, `br0` chooses among the oldest ones.
"""
FEW: Final[Mapping[str, Contender]] = {
    name: ALL[name] for name in ("least_requests", "br0", "brh oracle", "dlpm_home", "dlpm_balance")
}
"""For the number of ranks, and for fairness."""
