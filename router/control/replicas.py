"""The paths that show a cluster of replicas, and hand over its lead."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import APIRouter, Depends

from router.cluster.report import ClusterReport
from router.errors import NoReplica


class ClusterOperations(NamedTuple):
    """What the leader's process does for operators."""

    report: Callable[[], ClusterReport]
    hand_over: Callable[[], Awaitable[None]]
    """Has another replica lead. Raises NoReplica."""


def cluster_routes(
    operations: ClusterOperations, check_key: Callable[..., None] | None, responses: dict[int | str, dict[str, Any]]
) -> APIRouter:
    """Build the routes. `check_key`: see `needs_key`; None without the admin API."""
    routes = APIRouter(responses=responses)

    @routes.get("/cluster")
    async def cluster() -> ClusterReport:
        """Which replica leads and since when, its epoch, the fronts of each replica, and the state of the store."""
        return operations.report()

    if check_key is not None:

        @routes.post(
            "/cluster/handover",
            status_code=202,
            dependencies=[Depends(check_key)],
            tags=["operator"],
            responses={NoReplica.status: {"description": "No other replica waits to lead."}},
        )
        async def hand_over() -> dict[str, str]:
            """Have another replica lead. Calls go on; the scheduler pauses while fronts report to the next leader."""
            await operations.hand_over()
            return {"left": operations.report().leader}

    return routes
