"""The calls that wait in the inner policy for the worker at which their session has its place, and for no other."""

from router.core.model.request import Request, RequestId, WorkerId


class BoundCalls:
    """All calls that wait for one worker only."""

    def __init__(self) -> None:
        self._calls: dict[RequestId, tuple[Request, WorkerId]] = {}
        self._counts: dict[WorkerId, int] = {}

    def at(self, worker: WorkerId) -> int:
        """Return how many wait for a worker."""
        return self._counts.get(worker, 0)

    def add(self, request: Request, worker: WorkerId) -> None:
        """Let a call wait for a worker. `request`: the call as it arrived."""
        self._calls[request.id] = request, worker
        self._counts[worker] = self.at(worker) + 1

    def remove(self, request: RequestId) -> Request | None:
        """Note that a call does not wait any more. Returns it as it arrived; None if it was not bound to a worker."""
        if request not in self._calls:
            return None
        call, worker = self._calls.pop(request)
        self._counts[worker] -= 1
        if not self._counts[worker]:
            del self._counts[worker]
        return call

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts contradict the calls."""
        workers = [worker for _, worker in self._calls.values()]
        assert self._counts == {worker: workers.count(worker) for worker in workers}, f"{self._counts} bound calls"
