"""Front and scheduler over the channel: each message arrives, each request is settled once, and nothing is left."""

import asyncio
import gc
from collections.abc import Collection, Sequence
from functools import partial
from random import Random

import pytest

from router.channel.client import SchedulerClient
from router.channel.host import Observer, SchedulerHost
from router.channel.local import connect
from router.channel.messages import (
    AdmitNewClient,
    Assignment,
    UnreachableWorker,
    WorkerCard,
    WorkerChanged,
    WorkerRemoved,
)
from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command, Dispatch, WakeAt
from router.core.model.events import (
    Arrived,
    Cancelled,
    DayBegan,
    Event,
    Failed,
    Finished,
    Progressed,
    Ticked,
    WorkerJoined,
)
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from router.errors import NoWorker, Refused
from tests.support.running import TIMEOUT_S, until

KEY = PromptHasher(b"0123456789abcdef").prompt(b"Hello").key


class Recorder(Observer):
    """Records all events and commands."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.commands: list[Command] = []

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002
        self.events.append(event)
        self.commands += commands


class EndRecorder(Recorder):
    """Subscribes to two event types only."""

    event_types = (Finished, Cancelled)


class ChannelScene:
    """A front and a scheduler over a channel that encodes, with workers that have room for one request each."""

    def __init__(self, waiting: WaitingLimits | None = None, workers: int = 1) -> None:
        self.recorder = Recorder()
        settings = SchedulerSettings(window=FixedWindow(1, 1000), waiting=waiting or WaitingLimits())
        clock = asyncio.get_running_loop().time
        self.host = SchedulerHost(Scheduler(POLICIES["rr+fcfs"], settings, Parameters(), Random(0)), [], clock)
        self.host.attach(self.recorder)
        self.client = self.front()
        for number in range(workers):
            self.host.feed(WorkerJoined(Worker(WorkerId(f"w{number}"), frozenset({"m"}))))

    def front(self) -> SchedulerClient:
        """Connect one more front."""
        client = SchedulerClient(self.host.clock)
        connect(client, self.host, encoded=True)
        return client

    def submit(self, name: str) -> "asyncio.Future[Assignment]":
        return self.client.submit(Request(RequestId(name), ClientId("ann"), "m", (KEY,)))

    def check_at_rest(self) -> None:
        """Assert that nothing is left on either side."""
        assert self.host.scheduler.live == 0
        assert self.host.at_rest
        assert self.client.at_rest
        assert RequestId("1") not in self.client
        self.host.scheduler.ledger.check_conservation()


class WorkerRecorder:
    """Records the changes of the workers that a front receives."""

    def __init__(self) -> None:
        self.changes: list[WorkerChanged | WorkerRemoved] = []

    def apply(self, change: WorkerChanged | WorkerRemoved) -> None:
        self.changes.append(change)


async def test_a_waiting_request_is_placed_when_the_one_before_is_settled() -> None:
    """The first request is placed at once, because there is room."""
    scene = ChannelScene()
    first, second = scene.submit("1"), scene.submit("2")
    assert first.done()
    assert not second.done()
    scene.client.settle(Finished(RequestId("1"), Usage(5, 1)))
    assert (await second).worker == "w0"
    scene.client.settle(Finished(RequestId("2"), Usage(5, 1)))
    scene.check_at_rest()


async def test_the_first_event_of_a_day_comes_after_the_day() -> None:
    """So that usage counts on its day, and a journal replays to the same state."""
    times = iter([1_728_000_000.0, 1_728_086_399.9, 1_728_086_400.0, 1_728_172_799.9])
    recorder = Recorder()
    scheduler = Scheduler(POLICIES["rr+fcfs"], SchedulerSettings(), Parameters(), Random(0))
    host = SchedulerHost(scheduler, [recorder], lambda: 0.0, lambda: next(times))
    for _ in range(4):
        host.feed(Ticked())
    assert recorder.events == [DayBegan(20_000), Ticked(), Ticked(), DayBegan(20_001), Ticked(), Ticked()]
    assert scheduler.ledger.usage.day == 20_001


async def test_refusals_are_raised_as_errors() -> None:
    """Without a worker and with a full queue, the future raises the refusal."""
    with pytest.raises(NoWorker):
        await (empty := ChannelScene(workers=0)).submit("1")
    empty.client.settle(Cancelled(RequestId("1")))
    empty.check_at_rest()
    scene = ChannelScene(WaitingLimits(requests=1))
    scene.submit("1")
    scene.submit("2")
    with pytest.raises(Refused) as caught:
        await scene.submit("3")
    assert caught.value.reason == "rejected-saturated"
    for name in ("3", "2", "1"):
        scene.client.settle(Cancelled(RequestId(name)))
    scene.check_at_rest()


async def test_each_front_gets_the_placements_of_its_own_requests() -> None:
    """A request that ends in one front makes room for one that waits in another."""
    scene = ChannelScene()
    other = scene.front()
    scene.submit("1")
    waiting = other.submit(Request(RequestId("2"), ClientId("bob"), "m", (KEY,)))
    assert not waiting.done()
    scene.client.settle(Finished(RequestId("1")))
    assert (await waiting).worker == "w0"
    assert RequestId("2") not in scene.client
    other.settle(Cancelled(RequestId("2")))
    scene.check_at_rest()


async def test_a_front_learns_of_the_workers_before_and_after_it_connects() -> None:
    """It receives the present workers first, and none that was removed before."""
    scene = ChannelScene()
    cards = [WorkerCard(WorkerId(name), f"http://{name}") for name in ("a", "b", "c")]
    scene.host.announce(WorkerChanged(cards[0]))
    scene.host.announce(WorkerChanged(cards[1]))
    scene.host.announce(WorkerRemoved(WorkerId("b")))
    client, recorder = SchedulerClient(scene.host.clock), WorkerRecorder()
    client.follow_workers(recorder)
    connect(client, scene.host, encoded=True)
    scene.host.announce(WorkerChanged(cards[2]))
    assert recorder.changes == [WorkerChanged(cards[0]), WorkerChanged(cards[2])]


async def test_facts_and_questions_need_services() -> None:
    """A host that only schedules fails loudly when it is asked for more."""
    scene = ChannelScene()
    with pytest.raises(AssertionError):
        scene.client.report(UnreachableWorker(WorkerId("w0")))
    with pytest.raises(AssertionError):
        scene.client.ask(AdmitNewClient(ClientId("ann"), "", 1.0))


async def test_an_observer_gets_only_the_event_types_it_subscribes_to() -> None:
    """Events come in order with their commands; an observer without a subscription gets all."""
    scene = ChannelScene()
    ends = EndRecorder()
    scene.host.attach(ends)
    scene.submit("1")
    scene.submit("2")
    scene.client.settle(Finished(RequestId("1")))
    scene.client.settle(Cancelled(RequestId("2")))
    assert [type(event) for event in ends.events] == [Finished, Cancelled]
    assert [type(command) for command in ends.commands if not isinstance(command, WakeAt)] == [Dispatch]
    assert [type(event) for event in scene.recorder.events[1:]] == [Arrived, Arrived, Finished, Cancelled]


class LateRecorder(Recorder):
    """Records ends from the first new worker on."""

    @property
    def event_types(self) -> Collection[type[Event]]:
        return (WorkerJoined, Finished) if self.events else (WorkerJoined,)


async def test_an_observer_can_want_other_event_types_once_a_worker_joined() -> None:
    """It gets none of them before, and all after."""
    scene = ChannelScene()
    late = LateRecorder()
    scene.host.attach(late)
    for name in ("1", "2"):
        scene.submit(name)
        scene.client.settle(Finished(RequestId(name)))
        if name == "1":
            scene.host.feed(WorkerJoined(Worker(WorkerId("new"), frozenset({"m"}))))
    assert [type(event) for event in late.events] == [WorkerJoined, Finished]


async def test_a_refusal_that_nobody_awaits_is_not_logged_as_an_unretrieved_exception() -> None:
    """The client disconnected at that moment; the event loop reports no error."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    scene = ChannelScene(workers=0)
    assert scene.submit("1").done()
    scene.client.settle(Cancelled(RequestId("1")))
    gc.collect()
    assert not errors
    scene.check_at_rest()


async def test_settling_a_waiting_request_cancels_its_assignment() -> None:
    """The future is cancelled, and the next end places nothing for it."""
    scene = ChannelScene()
    scene.submit("1")
    assignment = scene.submit("2")
    scene.client.settle(Cancelled(RequestId("2")))
    assert assignment.cancelled()
    scene.client.settle(Finished(RequestId("1")))
    scene.check_at_rest()


async def test_the_timer_refuses_requests_that_wait_too_long() -> None:
    """No other event is needed, and the timer works again for the next request."""
    scene = ChannelScene(WaitingLimits(time_to_live=0.01))
    scene.submit("1")
    for name in ("2", "3"):
        assignment = scene.submit(name)
        with pytest.raises(Refused):
            async with asyncio.timeout(TIMEOUT_S):
                await assignment
        scene.client.settle(Cancelled(RequestId(name)))
    scene.client.settle(Finished(RequestId("1")))
    scene.check_at_rest()


async def test_running_streams_are_reported_together() -> None:
    """One event reports the new tokens of all streams."""
    scene = ChannelScene(workers=3)
    for number, tokens in enumerate((3, 5, 0)):
        scene.submit(f"{number}")
        scene.client.start_stream(RequestId(f"{number}"), partial(int, tokens))
    await until(lambda: Progressed({RequestId("0"): 3, RequestId("1"): 5}) in scene.recorder.events)
    rounds = sum(isinstance(event, Progressed) for event in scene.recorder.events)
    assert rounds == 1
    for number in range(3):
        scene.client.settle(Finished(RequestId(f"{number}")))
    scene.check_at_rest()


async def test_a_stream_with_many_new_tokens_is_reported_before_the_others() -> None:
    """A fast stream is never far ahead of what the scheduler knows, however rarely slow ones are reported."""
    scene = ChannelScene(workers=2)
    for number, tokens in enumerate((1000, 5)):
        scene.submit(f"{number}")
        scene.client.start_stream(RequestId(f"{number}"), partial(int, tokens))
    await until(lambda: Progressed({RequestId("1"): 5}) in scene.recorder.events)
    reports = [event for event in scene.recorder.events if isinstance(event, Progressed)]
    assert reports[0] == Progressed({RequestId("0"): 1000})
    for number in range(2):
        scene.client.settle(Finished(RequestId(f"{number}")))
    scene.check_at_rest()


@pytest.mark.parametrize(("usage", "charged"), [(None, 7), (Usage(5, 6), 6)])
async def test_the_end_of_a_stream_charges_its_last_tokens(usage: Usage | None, charged: int) -> None:
    """The stream's own count is charged, unless the end brings the engine's usage."""
    scene = ChannelScene()
    scene.submit("1")
    scene.client.start_stream(RequestId("1"), lambda: 7)
    scene.client.settle(Failed(RequestId("1"), accepted=True, usage=usage))
    assert scene.host.scheduler.ledger.accounts[ClientId("ann")].served.output == charged
    scene.check_at_rest()


async def test_a_placement_whose_client_is_gone_is_settled_like_any_other() -> None:
    """Settling it lets the next request be placed."""
    scene = ChannelScene()
    scene.submit("1")
    second, third = scene.submit("2"), scene.submit("3")
    second.cancel()
    scene.client.settle(Finished(RequestId("1")))
    assert not third.done()
    scene.client.settle(Cancelled(RequestId("2")))
    assert third.done()
    scene.client.settle(Finished(RequestId("3")))
    scene.check_at_rest()


async def test_closing_stops_the_timers() -> None:
    """Neither the wake-up timer nor the report timer fires after that."""
    scene = ChannelScene()
    scene.submit("1")
    scene.submit("2")
    scene.client.start_stream(RequestId("1"), lambda: 1)
    timers = [scene.host._wake_timer, scene.client._report_timer]
    scene.host.close()
    scene.client.close()
    assert [timer is not None and timer.cancelled() for timer in timers] == [True, True]
