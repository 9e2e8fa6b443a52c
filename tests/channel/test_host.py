"""The scheduler host carries out each command once, and leaves no dispatch or timer behind."""

import asyncio
import gc
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest

from router.channel.host import Observer, SchedulerHost
from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command, Dispatch, WakeAt
from router.core.model.events import Arrived, Cancelled, Event, Failed, Finished, Progressed, WorkerJoined
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


class HostScene:
    """A scheduler host with one worker that has room for one request."""

    def __init__(self, waiting: WaitingLimits | None = None, workers: int = 1) -> None:
        self.recorder = Recorder()
        settings = SchedulerSettings(window=FixedWindow(1, 1000), waiting=waiting or WaitingLimits())
        scheduler = Scheduler(POLICIES["rr+fcfs"], settings, Parameters(), Random(0))
        self.scheduler_host = SchedulerHost(scheduler, [self.recorder], asyncio.get_running_loop().time)
        for number in range(workers):
            self.scheduler_host.feed(WorkerJoined(Worker(WorkerId(f"w{number}"), frozenset({"m"}))))

    def submit(self, name: str) -> "asyncio.Future[Dispatch]":
        return self.scheduler_host.submit(Request(RequestId(name), ClientId("ann"), "m", (KEY,)))

    def check_at_rest(self) -> None:
        """Assert that nothing is left in the scheduler or its host."""
        assert self.scheduler_host.scheduler.live == 0
        assert not self.scheduler_host._dispatches
        assert not self.scheduler_host._streams
        assert RequestId("1") not in self.scheduler_host
        self.scheduler_host.scheduler.ledger.check_conservation()


async def test_a_waiting_request_is_dispatched_when_the_one_before_is_settled() -> None:
    """The first request is dispatched at once, because there is room."""
    scene = HostScene()
    first, second = scene.submit("1"), scene.submit("2")
    assert first.done()
    assert not second.done()
    scene.scheduler_host.settle(Finished(RequestId("1"), Usage(5, 1)))
    assert (await second).worker == "w0"
    scene.scheduler_host.settle(Finished(RequestId("2"), Usage(5, 1)))
    scene.check_at_rest()


async def test_refusals_are_raised_as_errors() -> None:
    """Without a worker and with a full queue, the future raises the refusal."""
    with pytest.raises(NoWorker):
        await (empty := HostScene(workers=0)).submit("1")
    empty.scheduler_host.settle(Cancelled(RequestId("1")))
    empty.check_at_rest()
    scene = HostScene(WaitingLimits(requests=1))
    scene.submit("1")
    scene.submit("2")
    with pytest.raises(Refused) as caught:
        await scene.submit("3")
    assert caught.value.reason == "rejected-saturated"
    for name in ("3", "2", "1"):
        scene.scheduler_host.settle(Cancelled(RequestId(name)))
    scene.check_at_rest()


async def test_an_observer_gets_only_the_event_types_it_subscribes_to() -> None:
    """Events come in order with their commands; an observer without a subscription gets all."""
    scene = HostScene()
    ends = EndRecorder()
    scene.scheduler_host.attach(ends)
    scene.submit("1")
    scene.submit("2")
    scene.scheduler_host.settle(Finished(RequestId("1")))
    scene.scheduler_host.settle(Cancelled(RequestId("2")))
    assert [type(event) for event in ends.events] == [Finished, Cancelled]
    assert [type(command) for command in ends.commands if not isinstance(command, WakeAt)] == [Dispatch]
    assert [type(event) for event in scene.recorder.events[1:]] == [Arrived, Arrived, Finished, Cancelled]


async def test_a_refusal_that_nobody_awaits_is_not_logged_as_an_unretrieved_exception() -> None:
    """The client disconnected at that moment; the event loop reports no error."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    scene = HostScene(workers=0)
    assert scene.submit("1").done()
    scene.scheduler_host.settle(Cancelled(RequestId("1")))
    gc.collect()
    assert not errors
    scene.check_at_rest()


async def test_settling_a_waiting_request_cancels_its_dispatch() -> None:
    """The future is cancelled, and the next end dispatches nothing for it."""
    scene = HostScene()
    scene.submit("1")
    dispatch = scene.submit("2")
    scene.scheduler_host.settle(Cancelled(RequestId("2")))
    assert dispatch.cancelled()
    scene.scheduler_host.settle(Finished(RequestId("1")))
    scene.check_at_rest()


async def test_the_timer_refuses_requests_that_wait_too_long() -> None:
    """No other event is needed, and the timer works again for the next request."""
    scene = HostScene(WaitingLimits(time_to_live=0.01))
    scene.submit("1")
    for name in ("2", "3"):
        dispatch = scene.submit(name)
        with pytest.raises(Refused):
            async with asyncio.timeout(TIMEOUT_S):
                await dispatch
        scene.scheduler_host.settle(Cancelled(RequestId(name)))
    scene.scheduler_host.settle(Finished(RequestId("1")))
    scene.check_at_rest()


async def test_running_streams_are_charged_together() -> None:
    """One event charges the new tokens of all streams."""
    scene = HostScene(workers=3)
    for number, tokens in enumerate((3, 5, 0)):
        scene.submit(f"{number}")
        scene.scheduler_host.start_stream(RequestId(f"{number}"), partial(int, tokens))
    await until(lambda: Progressed({RequestId("0"): 3, RequestId("1"): 5}) in scene.recorder.events)
    rounds = sum(isinstance(event, Progressed) for event in scene.recorder.events)
    assert rounds == 1
    for number in range(3):
        scene.scheduler_host.settle(Finished(RequestId(f"{number}")))
    scene.check_at_rest()


@pytest.mark.parametrize(("usage", "charged"), [(None, 7), (Usage(5, 6), 6)])
async def test_the_end_of_a_stream_charges_its_last_tokens(usage: Usage | None, charged: int) -> None:
    """The stream's own count is charged, unless the end brings the engine's usage."""
    scene = HostScene()
    scene.submit("1")
    scene.scheduler_host.start_stream(RequestId("1"), lambda: 7)
    scene.scheduler_host.settle(Failed(RequestId("1"), accepted=True, usage=usage))
    assert scene.scheduler_host.scheduler.ledger.accounts[ClientId("ann")].served.output == charged
    scene.check_at_rest()


async def test_a_dispatch_whose_client_is_gone_is_settled_like_any_other() -> None:
    """Settling it lets the next request be dispatched."""
    scene = HostScene()
    scene.submit("1")
    second, third = scene.submit("2"), scene.submit("3")
    second.cancel()
    scene.scheduler_host.settle(Finished(RequestId("1")))
    assert not third.done()
    scene.scheduler_host.settle(Cancelled(RequestId("2")))
    assert third.done()
    scene.scheduler_host.settle(Finished(RequestId("3")))
    scene.check_at_rest()


async def test_closing_stops_the_timers() -> None:
    """Neither the wake-up timer nor the progress timer fires after that."""
    scene = HostScene()
    scene.submit("1")
    scene.submit("2")
    scene.scheduler_host.start_stream(RequestId("1"), lambda: 1)
    timers = [scene.scheduler_host._wake_timer, scene.scheduler_host._progress_timer]
    scene.scheduler_host.close()
    assert [timer is not None and timer.cancelled() for timer in timers] == [True, True]
