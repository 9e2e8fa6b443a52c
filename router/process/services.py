"""What the scheduler's process does for the fronts besides scheduling."""

from collections import defaultdict
from collections.abc import Callable
from typing import assert_never

from router.channel.host import FrontLink, FrontServices, SchedulerHost
from router.channel.messages import (
    AdmitNewClient,
    AnswerValue,
    AnyQuestion,
    BeginCall,
    CallEnded,
    Fact,
    FieldsRefused,
    FindResponse,
    FrontMeasured,
    IsOfAnother,
    ResponseChanged,
    ResponseStored,
    Superseded,
    TakeInput,
    TicketId,
    UnreachableWorker,
)
from router.core.clients.rate_limits import RateLimits
from router.core.fleet.stored_responses import StoredResponse, StoredResponses
from router.core.model.request import WorkerId
from router.telemetry.metrics.front_metrics import FrontMeasurements
from router.upstream.directory import WorkerDirectory


class SchedulerServices(FrontServices):
    """Keeps the clients' limits and the stored responses, and notes what fronts report about workers."""

    def __init__(
        self,
        host: SchedulerHost,
        directory: WorkerDirectory,
        stored: StoredResponses,
        mark_unreachable: Callable[[WorkerId], None],
    ) -> None:
        """`mark_unreachable`: reports that a worker refused a connection."""
        self.limits = RateLimits()
        self.measurements = FrontMeasurements()
        self._calls: defaultdict[FrontLink, set[TicketId]] = defaultdict(set)
        """The counted calls of each front."""
        self._host = host
        self._directory = directory
        self._stored = stored
        self._mark_unreachable = mark_unreachable
        self._clock: Callable[[], float] = host.clock
        self.on_superseded: Callable[[int], None] = lambda _: None
        """Called with the epoch of another replica's scheduler, which a front obeys from now on."""

    def take(self, front: FrontLink, fact: Fact) -> None:
        match fact:
            case CallEnded(ticket, tokens):
                self._calls[front].discard(ticket)
                self.limits.end_call((front, ticket), tokens, self._clock())
            case UnreachableWorker(worker):
                # Move the requests that wait for this worker, before each fails to connect too.
                self._mark_unreachable(worker)
            case FieldsRefused(worker, path, fields):
                self._directory.refuse_fields(worker, path, fields)
            case ResponseStored(response, client, worker):
                self._stored.remember(StoredResponse(response, client, worker))
            case ResponseChanged(response, deleted):
                if deleted:
                    self._stored.forget(response)
                self._host.tell_fronts(fact)
            case FrontMeasured():
                self.measurements.take(front.name, fact)
            case Superseded(epoch):
                self.on_superseded(epoch)
            case _:
                assert_never(fact)

    def answer(self, front: FrontLink, question: AnyQuestion) -> AnswerValue:
        now = self._clock()
        match question:
            case BeginCall(ticket, owners):
                shortage = self.limits.begin_call((front, ticket), owners, now)
                if shortage is None:
                    self._calls[front].add(ticket)
                return shortage
            case TakeInput(ticket, tokens):
                return self.limits.take_input((front, ticket), tokens, now)
            case AdmitNewClient(client, address, per_minute):
                known = client in self._host.scheduler.weights
                return known or self.limits.admit_new_client(address, per_minute, now)
            case FindResponse(response, client):
                return self._in_service(self._stored.worker_of(response, client))
            case IsOfAnother(response, client):
                return self._stored.is_of_another(response, client)
            case _:
                assert_never(question)

    def count_again(self, front: FrontLink, question: AnyQuestion) -> None:
        match question:
            case BeginCall(ticket, owners):
                self.limits.count_again((front, ticket), owners, self._clock())
                self._calls[front].add(ticket)
            case TakeInput(ticket, tokens):
                self.limits.set_estimate((front, ticket), tokens)

    def front_closed(self, front: FrontLink) -> None:
        for ticket in self._calls.pop(front, ()):
            self.limits.end_call((front, ticket), None, self._clock())
        self.measurements.front_closed(front.name)

    def _in_service(self, worker: WorkerId | None) -> WorkerId | None:
        fleet = self._host.scheduler.fleet
        return worker if worker is not None and worker in fleet and not fleet[worker].left else None
