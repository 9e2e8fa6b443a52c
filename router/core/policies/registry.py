"""The registry of policies.

A policy's name is `PLACEMENT+ORDER`, or the name of a pooled policy. To add one, write its file, its line here and a
scenario test: settings, command line, metric labels and the conformance suite read this table.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from router.core.policies.balance.balance_parameters import Br0Parameters, BrhParameters, DlpmBalanceParameters
from router.core.policies.balance.br0 import Br0
from router.core.policies.balance.brh import Brh
from router.core.policies.balance.dlpm_balance import DlpmBalance
from router.core.policies.base import OrderFactory, PlacementFactory, Policy, PolicyFactory, Properties
from router.core.policies.context import PolicyContext
from router.core.policies.dlpm.d2lpm import D2lpm
from router.core.policies.dlpm.dlpm import Dlpm
from router.core.policies.dlpm.dlpm_home import DlpmHome
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters, DlpmHomeParameters, DlpmParameters, LpmParameters
from router.core.policies.dlpm.lpm import Lpm
from router.core.policies.preble.preble import Preble
from router.core.policies.preble.preble_parameters import PrebleParameters, PriorityGroupsParameters
from router.core.policies.preble.queue import PriorityGroups
from router.core.policies.queued import QueuedPolicy
from router.core.policies.simple.balancers import (
    ClientRoundRobin,
    LeastKv,
    LeastRequests,
    RandomWorker,
    RoundRobin,
    TwoChoices,
    TwoChoicesKv,
)
from router.core.policies.simple.cache_aware import CacheAware
from router.core.policies.simple.consistent_hash import ConsistentHash
from router.core.policies.simple.fcfs import Fcfs, PooledFcfs
from router.core.policies.simple.rpm import Rpm
from router.core.policies.simple.simple_parameters import CacheAwareParameters, ConsistentHashParameters, RpmParameters
from router.core.policies.vtc.vtc import Lcf, Vtc
from router.core.policies.vtc.vtc_parameters import OracleParameters
from router.core.policies.vtc.vtc_predict import MeanPredictionVtc, OracleVtc

PLACEMENTS: Final[Mapping[str, PlacementFactory]] = {
    "d2lpm": D2lpm,
    "rr": RoundRobin,
    "client_rr": ClientRoundRobin,
    "least_requests": LeastRequests,
    "least_kv": LeastKv,
    "two_choices": TwoChoices,
    "two_choices_kv": TwoChoicesKv,
    "random": RandomWorker,
    "consistent_hash": ConsistentHash,
    "cache_aware": CacheAware,
    "preble": Preble,
}
ORDERS: Final[Mapping[str, OrderFactory]] = {
    "dlpm": OrderFactory(Dlpm, Dlpm.gap_quantum),
    "vtc": OrderFactory(Vtc),
    "vtc_predict": OrderFactory(MeanPredictionVtc),
    "vtc_oracle": OrderFactory(OracleVtc),
    "lcf": OrderFactory(Lcf),
    "lpm": OrderFactory(Lpm),
    "priority_groups": OrderFactory(PriorityGroups),
    "fcfs": OrderFactory(Fcfs),
}
POOLED: Final[Mapping[str, PolicyFactory]] = {
    "dlpm_home": DlpmHome,
    "dlpm_balance": DlpmBalance,
    "br0": Br0,
    "brh": Brh,
    "pooled_fcfs": PooledFcfs,
    "rpm": Rpm,
}
ALIASES: Final[Mapping[str, str]] = {
    "d2lpm": "d2lpm+dlpm",
    "vtc": "client_rr+vtc",
    "vtc_predict": "client_rr+vtc_predict",
    "vtc_oracle": "client_rr+vtc_oracle",
    "lcf": "client_rr+lcf",
    "round_robin": "rr+fcfs",
    "least_requests": "least_requests+fcfs",
    "least_kv": "least_kv+fcfs",
    "two_choices": "two_choices+fcfs",
    "two_choices_kv": "two_choices_kv+fcfs",
    "random": "random+fcfs",
    "consistent_hash": "consistent_hash+fcfs",
    "cache_aware": "cache_aware+fcfs",
    "preble": "preble+priority_groups",
}
PARAMETERS: Final[Mapping[str, type]] = {
    "d2lpm": D2lpmParameters,
    "dlpm": DlpmParameters,
    "dlpm_home": DlpmHomeParameters,
    "dlpm_balance": DlpmBalanceParameters,
    "lpm": LpmParameters,
    "consistent_hash": ConsistentHashParameters,
    "cache_aware": CacheAwareParameters,
    "preble": PrebleParameters,
    "priority_groups": PriorityGroupsParameters,
    "vtc_oracle": OracleParameters,
    "br0": Br0Parameters,
    "brh": BrhParameters,
    "rpm": RpmParameters,
}
"""The parameter class of each family that has one, by the name of its group of settings."""


def _joined(placement: PlacementFactory, order: OrderFactory) -> PolicyFactory:
    def build(context: PolicyContext) -> Policy:
        placed = placement(context)
        gap_quantum = None if order.gap_quantum is None else order.gap_quantum(context)
        properties = Properties(gap_quantum, placed.locality, work_conserving=placed.steal_loss is not None)
        return QueuedPolicy(context, placed, partial(order.build, context), properties)

    return build


def _table() -> dict[str, PolicyFactory]:
    joined = {f"{p}+{o}": _joined(PLACEMENTS[p], ORDERS[o]) for p in PLACEMENTS for o in ORDERS}
    named = {alias: joined[name] for alias, name in ALIASES.items()}
    return {**named, **joined, **POOLED}


POLICIES: Final[Mapping[str, PolicyFactory]] = MappingProxyType(_table())
"""Every policy, by each of its names."""
