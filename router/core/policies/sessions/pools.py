"""Which workers share their KV caches among the sessions of which models, and how full these are."""

from collections.abc import Collection, Iterator
from typing import Final

from router.core.model.request import WorkerId, is_model
from router.core.policies.context import FleetView

CAPACITY_SECONDS: Final = 1.0
"""How long the sum of the capacities of a pool counts as known."""


class SessionPool:
    """Workers that serve the same models, directly or through one another, and the hot sessions of these models."""

    __slots__ = ("_as_of", "_capacity", "_view", "hot_tokens", "workers")

    def __init__(self, view: FleetView, workers: Collection[WorkerId]) -> None:
        self._view = view
        self._capacity: int | None = None
        self._as_of: float | None = None
        self.workers = workers
        self.hot_tokens = 0
        """What the hot sessions have reserved, or would if they had a place, in tokens."""

    def capacity(self, now: float) -> int | None:
        """Return the KV capacity of all workers in tokens; None if one of them is unknown, or there is no worker."""
        if self._as_of is None or now - self._as_of >= CAPACITY_SECONDS:
            self._as_of = now
            self._capacity = self._sum()
        return self._capacity

    def _sum(self) -> int | None:
        total = 0
        for worker in self.workers:
            tokens = self._view.kv_tokens(worker)
            if tokens is None:
                return None
            total += tokens
        return total or None


class SessionPools:
    """The pool of each model. They are found again after the workers have changed."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._pools: dict[str, SessionPool] = {}

    def __call__(self, model: str) -> SessionPool:
        """Return the pool of a model. A model that no worker serves has an empty one of its own."""
        pool = self._pools.get(model)
        if pool is None:
            models, workers = self._connected(model)
            pool = SessionPool(self._view, workers)
            for each in models:
                self._pools[each] = pool
        return pool

    def __iter__(self) -> Iterator[SessionPool]:
        """Iterate over the pools that are known."""
        return iter(dict.fromkeys(self._pools.values()))

    def clear(self) -> None:
        """Forget the pools, since the workers have changed; they are found again when they are asked for."""
        self._pools.clear()

    def _connected(self, model: str) -> tuple[dict[str, None], dict[WorkerId, None]]:
        """Return the models and workers that are connected with a model: a worker with its models, a model with the
        workers that serve it.
        """
        models: dict[str, None] = {model: None}
        workers: dict[WorkerId, None] = {}
        to_visit = [model]
        while to_visit:
            for worker in self._view.serving(to_visit.pop()):
                if worker not in workers:
                    workers[worker] = None
                    for other in sorted(self._view.routes(worker)):
                        if other not in models and is_model(other):
                            models[other] = None
                            to_visit.append(other)
        return models, workers
