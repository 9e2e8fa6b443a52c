"""The names of policies as operators write them, and the nearest one to an unknown name."""

from typing import Final

from router.core.policies.registry import ALIASES, ORDERS, PARAMETERS, PLACEMENTS, POLICIES, POOLED
from router.runtime.mistakes import nearest, unknown

NAMED: Final = (*POOLED, *ALIASES)
"""Policies with a name of their own; the others are PLACEMENT+ORDER."""

BALANCING: Final = "dlpm_balance"
"""The default policy where ranks step together."""


def known_policy(name: str) -> str:
    """Return the name. Raises ValueError, which names the nearest policy and all others, if there is no such policy.

    If only one part of PLACEMENT+ORDER is wrong, the error names those that there are for that part.
    """
    if name not in POLICIES:
        placement, plus, order = name.partition("+")
        if plus and placement in PLACEMENTS:
            raise ValueError(unknown("order", order, ORDERS))
        if plus and order in ORDERS:
            raise ValueError(unknown("placement", placement, PLACEMENTS))
        meant = nearest_policy(name)
        question = f"; did you mean {meant}?" if meant else ""
        pairs = f"PLACEMENT+ORDER with placement {', '.join(PLACEMENTS)} and order {', '.join(ORDERS)}"
        raise ValueError(f"there is no policy {name!r}{question} (there are {', '.join(NAMED)}, and {pairs})")
    return name


def parameter_groups(policy: str) -> frozenset[str]:
    """Return the groups of parameters that a policy reads: that of its own name, or those of its two parts."""
    return frozenset(ALIASES.get(policy, policy).split("+")) & frozenset(PARAMETERS)


def nearest_policy(name: str) -> str | None:
    """Return the policy that a mistyped name resembles most, part by part; None if none is near.

    A placement or an order alone gets the other part of D²LPM.
    """
    placement, plus, order = name.partition("+")
    if plus:
        parts = nearest(placement, PLACEMENTS), nearest(order, ORDERS)
        return f"{parts[0]}+{parts[1]}" if parts[0] and parts[1] else None
    word = name if name in (*PLACEMENTS, *ORDERS) else nearest(name, (*NAMED, *PLACEMENTS, *ORDERS))
    if word is None or word in POLICIES:
        return word
    return f"d2lpm+{word}" if word in ORDERS else f"{word}+dlpm"
