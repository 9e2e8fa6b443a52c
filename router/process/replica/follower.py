"""The part that only fronts of a cluster have: it follows the leader, wherever that is."""

from contextlib import AsyncExitStack
from pathlib import Path

from router.channel.socket import Route
from router.cluster.leader_route import ControlTunnel, LeaderRoute
from router.cluster.tls import cluster_tls
from router.process.plan import ProcessPlan
from router.process.replica.candidate import cluster_secret, open_leases


async def follow_leader(plan: ProcessPlan, stack: AsyncExitStack) -> tuple[Route, str]:
    """Follow the leader until the stack is left. Returns the route to it, and the path of a socket at which its control
    plane answers.
    """
    route = LeaderRoute(open_leases(plan.settings), cluster_secret(plan.settings), cluster_tls(plan.settings))
    control = str(Path(plan.folder) / f"control-{plan.number}")
    await stack.enter_async_context(route)
    await stack.enter_async_context(ControlTunnel(control, route))
    return route, control
