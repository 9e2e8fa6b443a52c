"""Preble's wait queue: priority groups by the cached fraction of a prompt, each served in proportion to its rank.

"Preble: Efficient Distributed Prompt Scheduling for LLM Serving", section 3.3, Algorithm 3. In one round the highest of
P groups has P turns, the next P - 1, and so on to 1; within a group the oldest request goes first. So cached prompts go
sooner, as by longest match, and uncached ones are served all the same. The paper fills batches in this way; here
requests go one by one, and the round continues where it was. (The code published with the paper serves one group in
each batch.)
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import Request, RequestId, WorkerId
from router.core.policies.base import Fits, Order, Turn
from router.core.policies.context import PolicyContext
from router.core.policies.preble.preble_parameters import PriorityGroupsParameters


class QueuePosition(NamedTuple):
    """The position of a request in its group."""

    arrival: int
    request: RequestId


@dataclass(slots=True)
class QueuedRequest:
    """A waiting request."""

    request: Request
    position: QueuePosition
    group: int


class PriorityGroups(Order):
    """The groups of one worker's queue."""

    def __init__(self, context: PolicyContext, worker: WorkerId) -> None:
        self._view = context.view
        self._worker = worker
        self._count = context.parameters.of(PriorityGroupsParameters).groups
        self._waiting: dict[RequestId, QueuedRequest] = {}
        self._groups: list[list[QueuePosition]] = [[] for _ in range(self._count)]
        """Heaps. Some positions in them are stale."""
        self._turns = self._new_round()
        self._chosen: QueuedRequest | None = None
        """The last answer. Its group has one turn less when it is dispatched."""
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Collection[RequestId]:
        return self._waiting.keys()

    def push(self, request: Request) -> None:
        self._arrivals += 1
        position = QueuePosition(self._arrivals, request.id)
        waiting = self._waiting[request.id] = QueuedRequest(request, position, self._group_of(request))
        self._push(waiting.group, position)

    def remove(self, request: RequestId) -> Request:
        self._view.unwatch(request)
        return self._waiting.pop(request).request

    def pass_through(self, request: Request, now: float) -> bool:  # noqa: ARG002 - the protocol's signature
        """Takes no group's turn, because no other request waits."""
        return True

    def select(self, fits: Fits, now: float) -> Turn | None:  # noqa: ARG002 - time does not matter here
        """No request passes the head of the group whose turn it is."""
        if not self._waiting:
            return None
        chosen = self._first_with_turns()
        if chosen is None:
            self._turns = self._new_round()
            chosen = self._first_with_turns()
        self._chosen = chosen
        return Turn(chosen.request) if chosen is not None and fits(chosen.request) else None

    def request_dispatched(self, request: Request, now: float) -> None:  # noqa: ARG002 - the protocol's signature
        if self._chosen is not None and self._chosen.position.request == request.id:
            self._turns[self._chosen.group] -= 1
            self._chosen = None

    def match_changed(self, requests: Iterable[RequestId]) -> None:
        for request in requests:
            waiting = self._waiting[request]
            group = self._group_of(waiting.request)
            if group != waiting.group:
                waiting.group = group
                self._push(group, waiting.position)

    def _new_round(self) -> list[int]:
        """Return the turns of each group in a round."""
        return list(range(1, self._count + 1))

    def _group_of(self, request: Request) -> int:
        """Return the group of a request by its current match, whose changes are reported from now on."""
        matched = self._view.watch_at(request, self._worker)
        chunks = sum([len(prompt.hashes) for prompt in request.prompts]) // HASH_BYTES
        return min(self._count * matched // chunks, self._count - 1) if chunks else 0

    def _push(self, group: int, position: QueuePosition) -> None:
        heap = self._groups[group]
        if len(heap) > 2 * len(self._waiting) + 16:
            # Requests that changed group left a stale position in each old group.
            heap[:] = dict.fromkeys(each for each in heap if self._is_current(each, group))
            heapify(heap)
        heappush(heap, position)

    def _first_with_turns(self) -> QueuedRequest | None:
        """Return the head of the highest group that has a waiting request and a turn left."""
        for group in reversed(range(self._count)):
            if self._turns[group] and (head := self._head(group)):
                return head
        return None

    def _head(self, group: int) -> QueuedRequest | None:
        heap = self._groups[group]
        while heap and not self._is_current(heap[0], group):
            heappop(heap)
        return self._waiting[heap[0].request] if heap else None

    def _is_current(self, position: QueuePosition, group: int) -> bool:
        waiting = self._waiting.get(position.request)
        return waiting is not None and waiting.group == group and waiting.position == position
