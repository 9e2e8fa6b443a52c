"""The interface by which a call is recorded, for the access log and traces.

The parts of a front that serve a call note each step of it. They need not know whether and how it is recorded.
"""

from typing import Final

from router.channel.messages import Assignment
from router.core.model.events import Cancelled, Failed, Finished, HandoffLost, Prefilled, Returned
from router.core.model.request import Usage, WorkerId
from router.errors import RouterError

SCOPE_KEY: Final = "d2lpm.call_record"
"""The member of a call's ASGI scope that holds its record, if there is one."""


class CallRecord:
    """Learns what becomes of a call, if there is one in its scope. Subclasses override what they want to note."""

    __slots__ = ()

    def note_id(self, request: str) -> None:
        """Called with the id of the call; again if another one is taken instead."""

    def note_call(self, client: str, model: str) -> None:
        """Called once the call is parsed and its client is known."""

    def note_queued(self) -> None:
        """Called when the call begins to wait for a worker."""

    def note_sent(self, assignment: Assignment) -> None:
        """Called when the call goes to a worker, or to two at once."""

    def headers_for(self, worker: WorkerId, headers: dict[str, str]) -> dict[str, str]:  # noqa: ARG002
        """Return the headers that a worker gets. `headers`: those of the client that workers may get, by lower-case
        name.
        """
        return headers

    def note_first_token(self) -> None:
        """Called when the answer of a worker begins to stream."""

    def note_prefilled(self, usage: Usage | None) -> None:
        """Called if a worker has computed the prompt for another one that has the call already."""

    def note_waiting(self, event: Returned | Prefilled | HandoffLost) -> None:
        """Called when an attempt has ended, and the call waits for another worker."""

    def note_end(self, ending: Finished | Failed | Cancelled) -> None:
        """Called once with what is reported to the scheduler of the end of the call, if it was queued."""

    def note_failure(self) -> None:
        """Called if the call's last attempt has failed and no worker takes it."""

    def note_error(self, error: RouterError) -> None:
        """Called with the error of the router with which the call is answered."""

    def note_gone(self) -> None:
        """Called if the client left before its answer was complete."""
