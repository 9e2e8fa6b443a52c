"""A scheduler that takes over from an earlier run goes on with its requests, and charges nothing twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.health import HealthRules
from router.core.model.commands import Dispatch
from router.core.model.cost import Tokens
from router.core.model.events import (
    Arrived,
    Cancelled,
    Event,
    Failed,
    Fault,
    Finished,
    FrontAway,
    Held,
    Progressed,
    Released,
    Resumed,
    Returned,
    Started,
)
from router.core.model.request import ClientId, RequestId, Usage, WorkerId
from router.core.model.request import Request as CoreRequest
from router.core.model.saved import LiveRequests
from router.core.policies.registry import POLICIES
from router.core.scheduler_settings import SchedulerSettings
from router.core.snapshot import restore, snapshot
from tests.core.scenario import MODEL, ONE_AT_A_TIME, Scene, key
from tests.core.test_snapshot import CLIENTS, GROUPS, SMALL

W1 = WorkerId("w1")
moves = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "start", "progress", "finish", "return", "cancel"]),
        st.integers(0, 9),
        st.sampled_from(CLIENTS),
        st.text("xy", min_size=1, max_size=6),
    ),
    max_size=30,
)


class Run(Scene):
    """A scene that notes what its front would report to the next run."""

    def __init__(self, policy: str, workers: tuple[str, ...] = ("w1", "w2")) -> None:
        self.log: dict[RequestId, list[Event]] = {}
        """By request, the events of the attempts that have not ended before the state was saved."""
        super().__init__(policy, *SMALL, workers=workers, settings=ONE_AT_A_TIME)

    def feed_noted(self, event: Event, request: RequestId) -> None:
        """Feed an event and note it."""
        self.log.setdefault(request, []).append(event)
        before = dict(self.dispatched)
        self.feed(event)
        self._note_dispatches(before)

    def _note_dispatches(self, before: dict[RequestId, Dispatch]) -> None:
        """Note what was dispatched since as attempts that can be resumed."""
        for sent, dispatch in self.dispatched.items():
            if before.get(sent) is not dispatch:
                kept = [each for each in self.log.get(sent, []) if not isinstance(each, Arrived)]
                resumed = Resumed(self.requests[sent], dispatch.worker, dispatch.cached_tokens)
                self.log[sent] = [*kept, resumed]

    def move(self, kind: str, number: int, client: str, prompt: str) -> None:
        """Let a client arrive, or something happen to one of the requests that workers have."""
        self.now += 1.0
        if kind == "arrive":
            known = dict(self.dispatched)
            request = self.arrive(client, prompt, limit=90, group=GROUPS.get(client))
            self.log[request] = [Arrived(self.requests[request], again=True)]
            self._note_dispatches(known)
            return
        if not (running := list(self.scheduler.attempts)):
            return
        request = running[number % len(running)]
        usage = Usage(32 * len(prompt), 10 * number, min(number, len(prompt)) * 8)
        events: dict[str, Event] = {
            "start": Started(request),
            "progress": Progressed({request: number}),
            "finish": Finished(request, usage),
            "return": Returned(request, accepted=True, fault=Fault.FULL, usage=usage),
            "cancel": Cancelled(request, usage),
        }
        self.feed_noted(events[kind], request)

    def save_point(self) -> None:
        """Forget what the saved state covers: the attempts that have ended."""
        for request in list(self.log):
            attempt = self.scheduler.attempts.get(request)
            resumes = [n for n, event in enumerate(self.log[request]) if isinstance(event, Resumed)]
            if attempt is not None:
                self.log[request] = self.log[request][resumes[-1] :]
            elif request in self.live:
                self.log[request] = [Arrived(self.requests[request], again=True)]
            else:
                del self.log[request]

    @property
    def live(self) -> set[RequestId]:
        return {request for request in self.requests if request in self.scheduler._requests}


def taken_over(policy: str, first: Run, pieces: list[object]) -> Scene:
    """A second run that restores these pieces and is told what the first one's front noted."""
    second = Scene(policy, *SMALL, workers=(), settings=ONE_AT_A_TIME)
    restore(second.scheduler, pieces, 0.0)  # type: ignore[arg-type]
    second.now = 100.0
    rows = [row for piece in pieces if isinstance(piece, LiveRequests) for row in piece.rows]
    second.feed(Held(tuple(rows)))
    for worker in ("w1", "w2"):
        second.join(worker)
    for events in first.log.values():
        for event in events:
            assert not second.dispatched
            second.feed(event)
    return second


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(before=moves, after=moves)
@settings(max_examples=12)
def test_what_was_charged_before_a_takeover_is_charged_once_after_it(
    policy: str, before: list[tuple[str, int, str, str]], after: list[tuple[str, int, str, str]]
) -> None:
    """Whatever happened before and after the state was saved, each client's account is as in the first run."""
    first = Run(policy)
    for move in before:
        first.move(*move)
    pieces: list[object] = list(snapshot(first.scheduler, first.now))
    first.save_point()
    for move in after:
        first.move(*move)
    second = taken_over(policy, first, pieces)
    for request in list(first.scheduler.attempts):
        for run in (first, second):
            run.feed(Finished(request, Usage(100, 7, 10)))
    for client in map(ClientId, CLIENTS):
        accounts = [run.scheduler.ledger.accounts.get(client) for run in (first, second)]
        served = [Tokens() if account is None else account.served for account in accounts]
        assert served[0] == served[1], client


@pytest.mark.parametrize("policy", ["dlpm_home", "d2lpm", "vtc", "lcf", "d2lpm+vtc_predict"])
@given(before=moves)
@settings(max_examples=30)
def test_a_takeover_moves_no_deficit(policy: str, before: list[tuple[str, int, str, str]]) -> None:
    """Where nothing waits, each client's deficit is what it was, once the attempts have been reported as far as they
    are.
    """
    first = Run(policy)
    for move in before:
        first.move(*move)
    for request in first.live - set(first.scheduler.attempts):
        first.cancel(request)
    pieces: list[object] = list(snapshot(first.scheduler, first.now))
    first.save_point()
    second = taken_over(policy, first, pieces)
    for client in {request.client for request in first.requests.values()}:
        for worker in ("w1", "w2"):
            now, then = second.deficit(client, worker), first.deficit(client, worker)
            assert now.placement == pytest.approx(then.placement)
            if "predict" not in policy:  # a prediction is made again, by what the second run knows
                assert now.order == pytest.approx(then.order)


def test_a_held_scheduler_sends_nothing_before_it_is_released() -> None:
    """Waiting requests keep waiting, however much room the workers seem to have."""
    scene = Scene("d2lpm", workers=("w1",))
    scene.feed(Held())
    first, second = scene.arrive("ann", "x"), scene.arrive("bob", "y")
    assert not scene.dispatched
    scene.feed(Released())
    assert scene.order == [first, second]


def test_a_request_resumed_at_a_worker_that_is_gone_ends_as_usual() -> None:
    """The worker is forgotten with its last request."""
    scene = Scene("d2lpm", workers=())
    scene.feed(Held())
    request = RequestId("r")
    scene.requests[request] = asked = CoreRequest(request, ClientId("ann"), MODEL, (key("xx"),))
    scene.feed(Resumed(asked, W1, 32))
    assert W1 in scene.scheduler.fleet
    scene.feed(Released())
    scene.feed(Finished(request, Usage(64, 3, 32)))
    assert W1 not in scene.scheduler.fleet
    assert scene.scheduler.ledger.accounts[ClientId("ann")].served == Tokens(32, 32, 3)


def test_a_request_whose_front_never_learned_of_its_worker_is_not_charged_for_it() -> None:
    """It waits again, and what was reserved for it is free."""
    first = Run("d2lpm", ("w1",))
    request = first.arrive("ann", "xx")
    assert first.worker_of(request) == W1
    pieces: list[object] = list(snapshot(first.scheduler, first.now))
    first.log[request] = [Arrived(first.requests[request], again=True)]
    second = taken_over("d2lpm", first, pieces)
    assert second.scheduler.waiting == 1
    assert second.deficit("ann").order == 70.0
    second.feed(Released())
    second.requests[request] = first.requests[request]
    second.serve(request, 5)
    assert second.scheduler.ledger.accounts[ClientId("ann")].served == first.scheduler.ledger.accounts[
        ClientId("ann")
    ].charged.plus(Tokens(0, 0, 5))


def test_a_worker_that_leaves_while_the_scheduler_is_held_stops_nothing() -> None:
    """A lone request that would not have had to wait is queued like any other."""
    scene = Scene("dlpm_home", workers=("w1", "w2"))
    scene.feed(Held())
    request = scene.arrive("ann", "x")
    scene.leave("w2")
    scene.feed(Released())
    assert scene.worker_of(request) == W1


@pytest.mark.parametrize("policy", ["dlpm_home", "dlpm_balance", "d2lpm", "br0"])
def test_a_request_resumed_at_an_ejected_worker_ends_as_usual(policy: str) -> None:
    """A late front may report it after others have reported that the worker broke off."""
    settings = SchedulerSettings(health=HealthRules(failures=1))
    scene = Scene(policy, workers=("w1", "w2"), settings=settings)
    broken = scene.worker_of(failed := scene.arrive("ann", "xx"))
    scene.feed(Failed(failed, accepted=True, fault=Fault.BROKEN))
    assert broken in scene.scheduler.fleet.ejected
    scene.feed(Held())
    request = RequestId("r")
    scene.requests[request] = asked = CoreRequest(request, ClientId("ann"), MODEL, (key("xx"),))
    scene.feed(Resumed(asked, broken, 32))
    scene.feed(Released())
    scene.feed(Finished(request, Usage(64, 3, 32)))
    assert not scene.scheduler.live
    assert not scene.scheduler.fleet[broken].load.requests


def test_a_request_can_end_while_its_front_is_away_and_the_scheduler_is_held() -> None:
    """It is in no load then, and takes room nowhere."""
    scene = Scene("d2lpm", workers=("w1",), settings=ONE_AT_A_TIME)
    scene.feed(Held())
    asked = CoreRequest(RequestId("r"), ClientId("ann"), MODEL, (key("xx"),))
    scene.feed(Resumed(asked, W1, 32))
    scene.feed(FrontAway((asked.id,)))
    scene.feed(Cancelled(asked.id))
    scene.feed(Released())
    assert scene.worker_of(scene.arrive("bob", "y")) == W1


def test_no_queue_limit_applies_while_the_scheduler_is_held() -> None:
    """The workers may have room for what waits."""
    settings = SchedulerSettings(waiting=WaitingLimits(requests=0))
    scene = Scene("d2lpm", workers=("w1",), settings=settings)
    scene.feed(Held())
    request = scene.arrive("ann", "x")
    assert not scene.refusals
    scene.feed(Released())
    assert scene.worker_of(request) == W1
