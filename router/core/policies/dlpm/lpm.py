"""LPM, longest prefix match: the request with the longest prefix in the worker's cache goes next, whoever sent it.

The order of SGLang ("SGLang: Efficient Execution of Structured Language Model Programs", section 3) with its cut-off:
while more requests than that wait, the oldest goes first (`schedule_policy.py`, since November 2024). SGLang then keeps
the order into which its queue was last sorted; here the cut-off means order of arrival alone.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from router.core.model.request import Request, RequestId, WorkerId
from router.core.policies.base import Fits, Order, Turn
from router.core.policies.context import PolicyContext
from router.core.policies.dlpm.dlpm_parameters import LpmParameters
from router.core.policies.dlpm.longest_match import LongestMatchQueue


class Lpm(Order):
    """The longest match in one worker's queue goes first; of equal matches, the oldest."""

    def __init__(self, context: PolicyContext, worker: WorkerId) -> None:
        view = context.view
        self._cut_off = context.parameters.of(LpmParameters).cut_off
        # An OrderedDict, because a plain dict finds its first key by walking past all deleted ones.
        self._waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self._queue = LongestMatchQueue(
            lambda request: view.watch_at(request, worker),
            view.unwatch,
            lambda _client: 0,
            max_passes=0,
        )

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Collection[RequestId]:
        return self._waiting.keys()

    def push(self, request: Request) -> None:
        """The request is not matched before the first choice that compares matches."""
        self._waiting[request.id] = request
        self._queue.push(request)

    def remove(self, request: RequestId) -> Request:
        del self._waiting[request]
        return self._queue.remove(request)

    def select(self, fits: Fits, now: float) -> Turn | None:  # noqa: ARG002 - time does not matter here
        """No request passes the head."""
        if not self._cut_off or len(self._waiting) <= self._cut_off:
            return self._queue.longest(fits)
        head = next(iter(self._waiting.values()))
        return Turn(head) if fits(head) else None

    def match_changed(self, requests: Iterable[RequestId]) -> None:
        self._queue.match_changed(requests)
