"""What is done about the response that one call makes, beside passing it on: it is remembered, or followed."""

import asyncio

from router.api.body.call import Call
from router.auth.admission import AdmissionTicket
from router.core.model.request import ClientId, RequestId, WorkerId
from router.front.stored.background import BackgroundResponses, BackgroundRun
from router.front.stored.owners import StoredResponse, StoredResponses
from router.upstream.directory import WorkerDirectory


class ResponseKeeper:
    """Takes care of one call's response. A journey tells it what it learns, and asks it at the end."""

    def __init__(
        self,
        owner: ClientId,
        call: Call,
        permit: AdmissionTicket,
        stored: StoredResponses,
        background: BackgroundResponses,
        fleet: WorkerDirectory,
    ) -> None:
        """`owner`: to whom the response belongs; `permit`: of the call."""
        self._owner = owner
        self._call = call
        self._permit = permit
        self._stored = stored
        self._background = background
        self._fleet = fleet
        self._response: str | None = None
        self._worker: WorkerId | None = None
        self._runs_on = False
        self._task: asyncio.Task[object] | None = None
        self.cut = False
        """Whether the stream was cut because the client cancelled the response."""

    @property
    def outlives_client(self) -> bool:
        """Whether the engine computes the response although its client leaves."""
        return self._call.storage.background

    def set_response(self, response: str, worker: WorkerId) -> None:
        """A worker makes this response; to be told before the client is."""
        if self._response is not None:  # of a worker that failed
            self._background.remove_stream(self._response)
        self._response, self._worker = response, worker
        if self._call.storage.stored:
            self._stored.remember(StoredResponse(response, self._owner, worker))
        if self.outlives_client and self._call.streamed:
            self._task = asyncio.current_task()
            self._background.add_stream(response, self._cut)

    def mark_running(self) -> None:
        """The answer is here, but the engine has not computed the response yet."""
        self._runs_on = True

    def take_over(self, request: RequestId) -> bool:
        """The journey is over: whether its request is settled later, since the engine computes on."""
        if self._response is None or self._worker is None:
            return False
        if not self._runs_on:
            self._background.remove_stream(self._response)
            return False
        patience = self._fleet.silence_timeout(self._worker).whole(self._call.output_limit)
        call = self._call._replace(body=b"")
        run = BackgroundRun(self._response, self._worker, request, call, self._permit.transfer(), patience)
        self._background.follow(run)
        return True

    def _cut(self) -> None:
        if self._task is not None:
            self.cut = True
            self._task.cancel()
