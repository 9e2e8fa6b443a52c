"""What the scheduler can be told, apart from the policy and its parameters."""

from dataclasses import dataclass, field

from router.core.cache.engine_rules import TRACK_ALL, Tracking
from router.core.clients.queue_limits import WaitingLimits
from router.core.clients.recent_clients import DEBTOR_LIMIT
from router.core.fleet.cluster import DEPARTED_LIMIT
from router.core.fleet.health import HealthRules
from router.core.fleet.window import LearnedWindow, Window
from router.core.model.cost import LinearCost


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the core can be told, apart from the policy's own parameters."""

    cost: LinearCost = field(default_factory=LinearCost)
    waiting: WaitingLimits = field(default_factory=WaitingLimits)
    window: Window = field(default_factory=LearnedWindow)
    """The limit of each worker, which has one like this of its own."""
    health: HealthRules = field(default_factory=HealthRules)
    prefix_limit: int = 4_000_000
    """Chunks in the prefix tree, over all workers; and as many blocks of those whose events tell what they hold."""
    match_minimum: int = 64
    """Tokens; a shorter match is no match."""
    kv_tokens: int = 400_000
    """Capacity believed of a worker that does not tell its own, in tokens."""
    tracking: Tracking = TRACK_ALL
    """What is followed of the workers' caches."""
    client_limit: int = 10_000
    """Clients remembered that have nothing under way; of others, only what they owe ..."""
    debtor_limit: int = DEBTOR_LIMIT
    """... of so many in each queue, and if more owe anything, not of those that owe least."""
    departed_limit: int = DEPARTED_LIMIT
    """Workers remembered that left."""
    cached_in_flight: int = 1_000_000
    """Predicted-cached tokens that one client may have in flight uncharged."""
