"""Takes care of the response that a call creates: remembers its worker, and follows it in the background."""

import asyncio
from typing import Final

from router.api.body.call import Call
from router.auth.admission import AdmissionTicket
from router.channel.client import SchedulerClient
from router.channel.messages import Assignment, FindResponse, ResponseStored
from router.core.model.request import ClientId, RequestId, WorkerId
from router.front.stored.background import BackgroundResponses, BackgroundRun

KNOWN_SECONDS: Final = 10.0
"""Seconds for which an answer waits at most until the scheduler, or its next run, knows of its response."""


class ResponseKeeper:
    """Takes care of one call's response. The relay reports it, and asks at the end who settles the request."""

    def __init__(
        self,
        owner: ClientId,
        call: Call,
        ticket: AdmissionTicket,
        scheduler_client: SchedulerClient,
        background: BackgroundResponses,
    ) -> None:
        """`owner`: the client that owns the response; `ticket`: the call's admission ticket."""
        self._owner = owner
        self._call = call
        self._ticket = ticket
        self._scheduler_client = scheduler_client
        self._background = background
        self._response: str | None = None
        self._assignment: Assignment | None = None
        self._known: asyncio.Future[WorkerId | None] | None = None
        """The answer to a question that the scheduler handles after the report of the response."""
        self._running = False
        self._task: asyncio.Task[object] | None = None
        self.cut = False
        """Whether the stream was ended because the client cancelled the response."""

    @property
    def outlives_client(self) -> bool:
        """Whether the engine goes on computing the response when the client disconnects."""
        return self._call.storage.background

    def set_response(self, response: str, assignment: Assignment) -> None:
        """Record the id of the response and where it is computed. To be called before the client gets the id."""
        if self._response is not None:  # an earlier attempt, at a worker that failed
            self._background.remove_stream(self._response)
        self._response, self._assignment = response, assignment
        if self._call.storage.stored:
            self._scheduler_client.report(ResponseStored(response, self._owner, assignment.worker))
            self._known = self._scheduler_client.ask(FindResponse(response, self._owner))
        if self.outlives_client and self._call.streamed:
            self._task = asyncio.current_task()
            self._background.add_stream(response, self._cut)

    async def until_known(self) -> None:
        """Wait until the scheduler knows of the response, for `KNOWN_SECONDS` at most.

        To be awaited before the client gets the id: it may get or cancel the response at once, through another front.
        """
        known, self._known = self._known, None
        if known is not None and not known.done():
            await asyncio.wait([known], timeout=KNOWN_SECONDS)

    def mark_running(self) -> None:
        """Record that the engine has answered the call and goes on computing the response."""
        self._running = True

    def take_over(self, request: RequestId) -> bool:
        """Follow the response if the engine still computes it. Returns whether that will settle the request."""
        if self._response is None or self._assignment is None:
            return False
        if not self._running:
            self._background.remove_stream(self._response)
            return False
        call, assignment = self._call._replace(body=b""), self._assignment
        run = BackgroundRun(
            self._response, assignment.worker, request, call, self._ticket.transfer(), assignment.timeouts.whole
        )
        self._background.follow(run)
        return True

    def _cut(self) -> None:
        if self._task is not None:
            self.cut = True
            self._task.cancel()
