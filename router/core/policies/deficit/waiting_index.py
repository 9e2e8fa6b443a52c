"""The clients that wait in a queue or a pool: on which routes, and in which priority class if they are eligible."""

from collections.abc import Collection
from typing import Final

from router.core.model.request import ClientId


class WaitingIndex:
    """Counts waiting clients' requests by route, and eligible clients by priority class and by route."""

    __slots__ = ("_eligible_by_route", "by_class", "classes", "ready", "routes")

    def __init__(self, classes: int) -> None:
        """`classes`: how many priority classes there are."""
        self.routes: Final[dict[ClientId, dict[str, int]]] = {}
        """The number of each waiting client's requests, by route. Read only for others."""
        self.classes: Final[dict[ClientId, int]] = {}
        """The priority class of each waiting client that is eligible. Read only for others."""
        self.ready: Final[dict[ClientId, int]] = {}
        """The same, and that of each client that may go although it is not eligible. Read only for others."""
        self.by_class: Final = [0] * classes
        """The number of eligible clients of each priority class. Read only for others."""
        self._eligible_by_route: dict[str, int] = {}

    def add(self, client: ClientId, route: str) -> bool:
        """Add a request of a client; returns whether it is the client's only one on this route."""
        routes = self.routes.setdefault(client, {})
        if route in routes:
            routes[route] += 1
            return False
        routes[route] = 1
        if client in self.classes:
            self._add_eligible_on(route, 1)
        return True

    def remove(self, client: ClientId, route: str) -> bool:
        """Remove a request of a client; returns whether the client has no other on this route."""
        routes = self.routes[client]
        routes[route] -= 1
        if routes[route]:
            return False
        del routes[route]
        if client in self.classes:
            self._add_eligible_on(route, -1)
            if not routes:
                self.by_class[self.classes[client]] -= 1
                del self.classes[client]
        if not routes:
            del self.routes[client]
            if client in self.ready:
                del self.ready[client]
        return True

    def set_class(self, client: ClientId, priority_class: int | None) -> None:
        """Set a waiting client's priority class, which is another one than before; None if it is not eligible now."""
        was_eligible = client in self.classes
        if was_eligible:
            self.by_class[self.classes[client]] -= 1
        if priority_class is None:
            del self.classes[client], self.ready[client]
        else:
            self.classes[client] = self.ready[client] = priority_class
            self.by_class[priority_class] += 1
        if was_eligible == (priority_class is None):
            for route in self.routes[client]:
                self._add_eligible_on(route, -1 if was_eligible else 1)

    def set_ready(self, client: ClientId, priority_class: int | None) -> None:
        """Let a client go in this priority class although it is not eligible; None ends that."""
        if client not in self.classes:
            if priority_class is not None:
                self.ready[client] = priority_class
            elif client in self.ready:
                del self.ready[client]

    def is_ineligible(self, client: ClientId) -> bool:
        """Return whether a client waits and is not eligible."""
        return client in self.routes and client not in self.classes

    def wait_on(self, client: ClientId, routes: Collection[str] | None) -> bool:
        """Return whether a waiting client has a request on one of these routes; on any route if None."""
        return routes is None or not self.routes[client].keys().isdisjoint(routes)

    def any_eligible(self, routes: Collection[str] | None = None) -> bool:
        """Return whether an eligible client has a request on one of these routes; on any route if None."""
        return bool(self.classes) if routes is None else not self._eligible_by_route.keys().isdisjoint(routes)

    def _add_eligible_on(self, route: str, change: int) -> None:
        count = self._eligible_by_route.get(route, 0) + change
        if count:
            self._eligible_by_route[route] = count
        else:
            del self._eligible_by_route[route]
