"""The requests of one front that have another id in the scheduler than in the front.

Clients choose the ids of their requests, so two fronts may have requests with the same id in flight. The later one gets
another id in the scheduler, which its front learns from its assignment.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from router.channel.messages import Ask, Fact, LaterEvent
from router.core.model.events import (
    Cancelled,
    Failed,
    Finished,
    HandoffLost,
    Prefilled,
    Progressed,
    Returned,
    Started,
)
from router.core.model.request import Request, RequestId

LaterMessage = LaterEvent | Fact | Ask
"""All messages of a front but those that open a request and those of its report to a new run."""


class RenamedRequests:
    """Gives requests ids that no other request has, and translates what the front says of them."""

    def __init__(self, front: int) -> None:
        """`front`: its number, which is a part of the ids that are made here."""
        self._front = front
        self.ids: Final[dict[RequestId, RequestId]] = {}
        """By the front's own id of a live request, that in the scheduler, where the two differ. Read only."""

    def renamed(self, own_id: RequestId, request: Request, is_taken: Callable[[RequestId], bool]) -> Request:
        """Return the request, with another id if its id is taken. `own_id`: that in its front."""
        request_id = request.id
        suffix = 0
        while is_taken(request_id):
            suffix += 1
            request_id = RequestId(f"{own_id}.{self._front}.{suffix}")
        if request_id != own_id:
            self.ids[own_id] = request_id
        return request if request_id == request.id else replace(request, id=request_id)

    def forget(self, own_id: RequestId) -> None:
        """Forget a request that has ended, if it is here."""
        self.ids.pop(own_id, None)

    def translated(self, message: LaterMessage) -> LaterMessage:
        """Return a message with the scheduler's ids instead of the front's."""
        match message:
            case Progressed(output_tokens):
                return Progressed({self.ids.get(own_id, own_id): tokens for own_id, tokens in output_tokens.items()})
            case (
                Started(own_id)
                | Finished(own_id)
                | Failed(own_id)
                | Returned(own_id)
                | Prefilled(own_id)
                | HandoffLost(own_id)
                | Cancelled(own_id)
            ) if own_id in self.ids:
                return replace(message, request=self.ids[own_id])
            case _:
                return message
