"""The settings of the scheduler, apart from the policy and its parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field

from router.core.cache.engine_rules import TRACK_ALL, Tracking
from router.core.clients.debtors import DEBTOR_LIMIT
from router.core.clients.queue_limits import WaitingLimits
from router.core.clients.usage_days import KEPT_DAYS
from router.core.fleet.health import HealthRules
from router.core.fleet.window import LearnedWindow, Window
from router.core.fleet.worker_fleet import DEPARTED_LIMIT
from router.core.model.cost import LinearCost
from router.core.model.request import ClientId


def no_name(client: ClientId) -> bool:  # noqa: ARG001 - a function of the module, so that settings can be pickled
    """Return False: any caller can choose any name."""
    return False


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """All that can be set in the core, apart from the policy's own parameters."""

    cost: LinearCost = field(default_factory=LinearCost)
    waiting: WaitingLimits = field(default_factory=WaitingLimits)
    window: Window = field(default_factory=LearnedWindow)
    """The limit of each worker; every worker has its own copy."""
    health: HealthRules = field(default_factory=HealthRules)
    prefix_limit: int = 4_000_000
    """Chunks kept in the prefix tree over all workers; also the limit on the blocks known by KV events."""
    match_minimum: int = 64
    """Shortest prefix match that counts, in tokens."""
    kv_tokens: int = 400_000
    """KV cache capacity assumed of a worker that does not report its own, in tokens."""
    tracking: Tracking = TRACK_ALL
    """How closely the workers' prefix caches are followed."""
    client_limit: int = 10_000
    """Clients without a live request that are remembered; of the clients beyond them, only the debts are."""
    debtor_limit: int = DEBTOR_LIMIT
    """Debts of forgotten clients that each queue keeps; beyond this, the smallest are dropped."""
    named: Callable[[ClientId], bool] = no_name
    """Whether a client has a name that callers cannot choose freely; its usage is never added to that of others."""
    usage_days: int = KEPT_DAYS
    """Days of usage that are kept, the present one included."""
    departed_limit: int = DEPARTED_LIMIT
    """Workers remembered after they left."""
    handoff_seconds: float = 20.0
    """The greatest age, in seconds, of a prefilled prompt that is sent to a decode worker."""
    decode_alone: bool = True
    """Whether decode workers serve whole requests while a model has no prefill worker in use."""
    cached_in_flight: int = 1_000_000
    """Tokens predicted to be cached that one client may have in flight without being charged for them."""
