"""The interpreter of the scheduler's commands: each is carried out once, and no turn or timer is left behind."""

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
from router.core.settings import SchedulerSettings
from router.errors import NoWorker, Refused
from tests.support.running import PATIENCE, until

KEY = PromptHasher(b"0123456789abcdef").prompt(b"Hello").key


class Diary(Observer):
    """All that was observed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.commands: list[Command] = []

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002
        self.events.append(event)
        self.commands += commands


class Ends(Diary):
    """Of these alone."""

    event_types = (Finished, Cancelled)


class Desk:
    """A scheduler host before one worker with room for one request."""

    def __init__(self, waiting: WaitingLimits | None = None, workers: int = 1) -> None:
        self.diary = Diary()
        settings = SchedulerSettings(window=FixedWindow(1, 1000), waiting=waiting or WaitingLimits())
        scheduler = Scheduler(POLICIES["rr+fcfs"], settings, Parameters(), Random(0))
        self.scheduler_host = SchedulerHost(scheduler, [self.diary], asyncio.get_running_loop().time)
        for number in range(workers):
            self.scheduler_host.feed(WorkerJoined(Worker(WorkerId(f"w{number}"), frozenset({"m"}))))

    def submit(self, name: str) -> "asyncio.Future[Dispatch]":
        return self.scheduler_host.submit(Request(RequestId(name), ClientId("ann"), "m", (KEY,)))

    def check_rest(self) -> None:
        """Nothing is left, inside or outside the scheduler."""
        assert self.scheduler_host.scheduler.live == 0
        assert not self.scheduler_host._dispatches
        assert not self.scheduler_host._streams
        assert RequestId("1") not in self.scheduler_host
        self.scheduler_host.scheduler.ledger.check_conservation()


async def test_a_turn_comes_when_the_one_before_is_settled() -> None:
    """At once with room; else with the room that an ending gives."""
    desk = Desk()
    first, second = desk.submit("1"), desk.submit("2")
    assert first.done()
    assert not second.done()
    desk.scheduler_host.settle(Finished(RequestId("1"), Usage(5, 1)))
    assert (await second).worker == "w0"
    desk.scheduler_host.settle(Finished(RequestId("2"), Usage(5, 1)))
    desk.check_rest()


async def test_refusals_come_as_errors() -> None:
    """No worker, and a queue that is full, in place of a turn."""
    with pytest.raises(NoWorker):
        await (alone := Desk(workers=0)).submit("1")
    alone.scheduler_host.settle(Cancelled(RequestId("1")))
    alone.check_rest()
    desk = Desk(WaitingLimits(requests=1))
    desk.submit("1")
    desk.submit("2")
    with pytest.raises(Refused) as caught:
        await desk.submit("3")
    assert caught.value.reason == "rejected-saturated"
    for name in ("3", "2", "1"):
        desk.scheduler_host.settle(Cancelled(RequestId(name)))
    desk.check_rest()


async def test_an_observer_hears_of_the_events_it_wants_alone() -> None:
    """In their order, and with what came of them; one that says nothing hears of all."""
    desk = Desk()
    ends = Ends()
    desk.scheduler_host.attach(ends)
    desk.submit("1")
    desk.submit("2")
    desk.scheduler_host.settle(Finished(RequestId("1")))
    desk.scheduler_host.settle(Cancelled(RequestId("2")))
    assert [type(event) for event in ends.events] == [Finished, Cancelled]
    assert [type(command) for command in ends.commands if not isinstance(command, WakeAt)] == [Dispatch]
    assert [type(event) for event in desk.diary.events[1:]] == [Arrived, Arrived, Finished, Cancelled]


async def test_a_refusal_that_nobody_heard_is_no_forgotten_exception() -> None:
    """Its client left at that very moment; the loop has nothing to complain of."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    desk = Desk(workers=0)
    assert desk.submit("1").done()
    desk.scheduler_host.settle(Cancelled(RequestId("1")))
    gc.collect()
    assert not complaints
    desk.check_rest()


async def test_whoever_still_waits_for_a_turn_that_is_settled_waits_no_more() -> None:
    """The turn is cancelled, and not given to anybody."""
    desk = Desk()
    desk.submit("1")
    turn = desk.submit("2")
    desk.scheduler_host.settle(Cancelled(RequestId("2")))
    assert turn.cancelled()
    desk.scheduler_host.settle(Finished(RequestId("1")))
    desk.check_rest()


async def test_the_alarm_ends_what_waits_too_long() -> None:
    """Without any other event, and again for the next one."""
    desk = Desk(WaitingLimits(time_to_live=0.01))
    desk.submit("1")
    for name in ("2", "3"):
        turn = desk.submit(name)
        with pytest.raises(Refused):
            async with asyncio.timeout(PATIENCE):
                await turn
        desk.scheduler_host.settle(Cancelled(RequestId(name)))
    desk.scheduler_host.settle(Finished(RequestId("1")))
    desk.check_rest()


async def test_running_streams_are_charged_together() -> None:
    """Each is asked how far it is, and only what is new is told, all of it in one event."""
    desk = Desk(workers=3)
    for number, tokens in enumerate((3, 5, 0)):
        desk.submit(f"{number}")
        desk.scheduler_host.start_stream(RequestId(f"{number}"), partial(int, tokens))
    await until(lambda: Progressed({RequestId("0"): 3, RequestId("1"): 5}) in desk.diary.events)
    rounds = sum(isinstance(event, Progressed) for event in desk.diary.events)
    assert rounds == 1
    for number in range(3):
        desk.scheduler_host.settle(Finished(RequestId(f"{number}")))
    desk.check_rest()


@pytest.mark.parametrize(("usage", "charged"), [(None, 7), (Usage(5, 6), 6)])
async def test_an_ending_charges_the_last_tokens(usage: Usage | None, charged: int) -> None:
    """By what the stream itself has counted, unless the engine's own word comes with the ending."""
    desk = Desk()
    desk.submit("1")
    desk.scheduler_host.start_stream(RequestId("1"), lambda: 7)
    desk.scheduler_host.settle(Failed(RequestId("1"), accepted=True, usage=usage))
    assert desk.scheduler_host.scheduler.ledger.accounts[ClientId("ann")].served.output == charged
    desk.check_rest()


async def test_a_turn_that_comes_too_late_is_nobodys() -> None:
    """Its client has just gone: it is settled like any other, and the next one has its turn."""
    desk = Desk()
    desk.submit("1")
    second, third = desk.submit("2"), desk.submit("3")
    second.cancel()
    desk.scheduler_host.settle(Finished(RequestId("1")))
    assert not third.done()
    desk.scheduler_host.settle(Cancelled(RequestId("2")))
    assert third.done()
    desk.scheduler_host.settle(Finished(RequestId("3")))
    desk.check_rest()


async def test_closing_stops_the_timers() -> None:
    """No alarm rings and nothing is charged in a loop that goes down."""
    desk = Desk()
    desk.submit("1")
    desk.submit("2")
    desk.scheduler_host.start_stream(RequestId("1"), lambda: 1)
    timers = [desk.scheduler_host._wake_timer, desk.scheduler_host._progress_timer]
    desk.scheduler_host.close()
    assert [timer is not None and timer.cancelled() for timer in timers] == [True, True]
