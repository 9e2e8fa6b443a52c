"""What the scheduler's process does for fronts besides scheduling: counted calls and stored responses."""

from random import Random

import pytest

from router.channel.codec import FRONT_DECODER, encode
from router.channel.host import FrontLink, SchedulerHost
from router.channel.messages import (
    Answered,
    Ask,
    BeginCall,
    CallEnded,
    ResponseChanged,
    ResponseStored,
    SchedulerMessage,
    TicketId,
)
from router.core.clients.rate_limits import ClientLimits, OwnerLimits
from router.core.fleet.stored_responses import StoredResponses
from router.core.model.request import ClientId, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from router.process.services import SchedulerServices
from router.upstream.directory import WorkerDirectory

OWNERS = (OwnerLimits("client ann", ClientLimits(in_flight=2)),)


class ServicesScene:
    """A scheduler's side without workers, and fronts that record what they are sent."""

    def __init__(self) -> None:
        scheduler = Scheduler(POLICIES["rr+fcfs"], SchedulerSettings(), Parameters(), Random(0))
        self.host = SchedulerHost(scheduler, [], lambda: 0.0)
        self.stored = StoredResponses(10)
        self.services = SchedulerServices(self.host, WorkerDirectory(), self.stored, lambda _: None)
        self.host.set_services(self.services)
        self.received: list[SchedulerMessage] = []

    def front(self) -> FrontLink:
        return self.host.connect(self.received.append)

    def begin(self, front: FrontLink, ticket: int) -> bool:
        """Whether a call of this front may begin."""
        front.receive(FRONT_DECODER.decode(encode(Ask(1, BeginCall(TicketId(ticket), OWNERS)))))
        answered = self.received.pop()
        assert isinstance(answered, Answered)
        return answered.answer is None


def test_the_calls_of_a_lost_front_make_room_for_others() -> None:
    """Both fronts may use the same ticket numbers; a call that was refused is not ended."""
    scene = ServicesScene()
    lost, other = scene.front(), scene.front()
    assert scene.begin(lost, 1)
    assert scene.begin(other, 1)
    assert not scene.begin(lost, 2)
    lost.close()
    assert len(scene.services.limits) == 1
    assert scene.begin(other, 2)
    assert not scene.begin(other, 3)
    lost.close()
    assert not scene.begin(other, 3)


def test_a_call_that_has_ended_is_not_ended_again_with_its_front() -> None:
    """What is left counts once."""
    scene = ServicesScene()
    lost, other = scene.front(), scene.front()
    assert scene.begin(lost, 1)
    assert scene.begin(other, 1)
    lost.receive(CallEnded(TicketId(1), 5))
    lost.close()
    assert scene.begin(other, 2)
    assert not scene.begin(other, 3)
    for ticket in (1, 2):
        other.receive(CallEnded(TicketId(ticket), None))
    assert not len(scene.services.limits)
    assert not any(scene.services._calls.values())


@pytest.mark.parametrize("deleted", [False, True])
def test_all_fronts_learn_of_a_change_of_a_stored_response(deleted: bool) -> None:
    """Another front than the one that forwarded the call may stream the response; a deleted one is forgotten."""
    scene, ann = ServicesScene(), ClientId("ann")
    creator, changer = scene.front(), scene.front()
    creator.receive(ResponseStored("resp_1", ann, WorkerId("w")))
    changed = ResponseChanged("resp_1", deleted=deleted)
    changer.receive(changed)
    assert scene.received == [changed, changed]
    assert scene.stored.worker_of("resp_1", ann) == (None if deleted else "w")
