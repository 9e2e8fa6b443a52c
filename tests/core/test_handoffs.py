"""Prefill and decode at different workers: one request, two attempts, and a hand-off that does not keep."""

from collections import defaultdict
from typing import ClassVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.health import HealthRules
from router.core.fleet.window import FixedWindow, NoWindow
from router.core.model.commands import Deficit, Refusal
from router.core.model.cost import Charge, LinearCost
from router.core.model.events import (
    Cancelled,
    Failed,
    Fault,
    Finished,
    FrontAway,
    FrontBack,
    HandoffLost,
    Held,
    Prefilled,
    Released,
    Resumed,
    Returned,
    WorkerAnswered,
    WorkerJoined,
)
from router.core.model.request import (
    BarrierId,
    ClientId,
    Connector,
    Leg,
    Request,
    RequestId,
    Role,
    Usage,
    Worker,
    WorkerId,
)
from router.core.model.saved import DailyUsage
from router.core.policies.base import Policy
from router.core.policies.context import PolicyContext
from router.core.policies.registry import POLICIES
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, MODEL, ONE_AT_A_TIME, Scene

OPEN = SchedulerSettings(window=NoWindow())
"""Nothing waits for room."""
NAMES = sorted({factory: name for name, factory in POLICIES.items()}.values())


def pair(
    policy: str = "dlpm_home",
    *,
    prefill: tuple[str, ...] = ("p1",),
    decode: tuple[str, ...] = ("d1",),
    settings: SchedulerSettings = OPEN,
) -> Scene:
    """A fleet of prefill and decode workers."""
    scene = Scene(policy, workers=(), settings=settings)
    for worker in prefill:
        scene.join(worker, role=Role.PREFILL)
    for worker in decode:
        scene.join(worker, role=Role.DECODE)
    return scene


def at(scene: Scene, request: RequestId) -> tuple[str, Leg]:
    """Return where a request was sent last, and for which part of it."""
    command = scene.dispatched[request]
    return command.worker, command.leg


def lose(scene: Scene, request: RequestId) -> None:
    scene.feed(HandoffLost(request))


def give_back(scene: Scene, request: RequestId, fault: Fault = Fault.BROKEN, *, accepted: bool = True) -> None:
    scene.feed(Returned(request, accepted, fault))


# The way of a request


def test_a_request_is_prefilled_and_then_decoded() -> None:
    """The prefill worker gets it first, the decode worker once it is prefilled, and then it ends."""
    scene = pair()
    request = scene.arrive("ada", "document")
    assert at(scene, request) == ("p1", Leg.PREFILL)
    scene.prefill(request)
    assert at(scene, request) == ("d1", Leg.DECODE)
    scene.start(request)
    scene.finish(request, output=7)
    assert scene.scheduler.live == 0
    assert [state.load.requests for state in scene.scheduler.fleet] == [0, 0]


def test_input_is_charged_at_the_prefill_and_output_at_the_decode() -> None:
    """Both go to one counter; the prefill's own token, and the input that the decode worker reports, cost nothing."""
    scene = pair()
    request = scene.arrive("ada", "document", limit=50)
    assert scene.charged("ada") == 8 * CHUNK_TOKENS
    scene.prefill(request, cached=3 * CHUNK_TOKENS)
    assert scene.charged("ada") == 5 * CHUNK_TOKENS
    scene.progress(request, 10)
    assert scene.charged("ada") == 5 * CHUNK_TOKENS + 2 * 10
    scene.finish(request, output=12, cached=0)
    assert scene.charged("ada") == 5 * CHUNK_TOKENS + 2 * 12


def test_both_attempts_are_one_call_of_usage() -> None:
    """Also if the prompt is prefilled a second time: its input counts once, as the first prefill worker said."""
    scene = pair()
    request = scene.arrive("ada", "document", limit=50)
    scene.prefill(request, cached=3 * CHUNK_TOKENS)
    lose(scene, request)
    scene.prefill(request, cached=8 * CHUNK_TOKENS)
    scene.finish(request, output=12, cached=0)
    ((_, rows),) = scene.scheduler.ledger.usage.days()
    assert rows == [DailyUsage(0, ClientId("ada"), MODEL, 1, 8 * CHUNK_TOKENS, 3 * CHUNK_TOKENS, 12)]


def test_a_prompt_goes_to_the_prefill_worker_that_holds_it() -> None:
    """The caches of prefill workers attract requests, those of decode workers do not."""
    scene = pair(prefill=("p1", "p2"), decode=("d1", "d2"))
    first, other = scene.arrive("ada", "document1"), scene.arrive("ada", "something")
    for request in (first, other):
        scene.prefill(request)
    again = scene.arrive("ada", "document2")
    assert scene.worker_of(again) == "p1"
    assert scene.dispatched[again].cached_tokens == 8 * CHUNK_TOKENS
    scene.finish(first)
    scene.prefill(again)
    assert at(scene, again) == ("d1", Leg.DECODE), "the lighter one, though both requests began alike"


def test_a_decode_worker_counts_the_whole_context_and_computes_none_of_it() -> None:
    """What is fetched takes room in its cache and is read at each step, but nobody waits for its prefill."""
    scene = pair()
    request = scene.arrive("ada", "document")
    scene.prefill(request)
    worker = scene.scheduler.fleet[WorkerId("d1")]
    assert worker.context_tokens == 8 * CHUNK_TOKENS
    assert worker.load.unstarted_tokens == 1
    scene.start(request)
    assert worker.load.kv_peak >= 8 * CHUNK_TOKENS


def test_what_one_engine_must_compute_goes_to_a_decode_worker() -> None:
    """Such a request is never prefilled elsewhere, and waits in the same queue."""
    scene = pair()
    request = scene.arrive("ada", "document", whole=True)
    assert at(scene, request) == ("d1", Leg.WHOLE)


def test_a_worker_with_both_roles_serves_whole_requests() -> None:
    """Beside prefill workers it takes requests from their queue, and decodes nothing that they hand over."""
    scene = pair(settings=ONE_AT_A_TIME)
    scene.join("b1", role=Role.BOTH)
    requests = [scene.arrive("ada", f"{n}ocument") for n in range(2)]
    assert {at(scene, request) for request in requests} == {("p1", Leg.PREFILL), ("b1", Leg.WHOLE)}


# The pool


def test_a_prefilled_request_waits_for_room_to_decode() -> None:
    """It goes before everything else once a decode worker has room."""
    scene = pair(settings=SchedulerSettings(window=FixedWindow(requests=2)))
    requests = [scene.arrive("ada", f"{n}ocument") for n in range(3)]
    for request in requests[:2]:
        scene.prefill(request)
    third = requests[2]
    assert third not in scene.dispatched, "both places of the decode worker are taken"
    scene.finish(requests[0])
    assert at(scene, third) == ("p1", Leg.PREFILL)
    scene.prefill(third)
    assert at(scene, third) == ("d1", Leg.DECODE)


def test_a_prefill_begins_only_if_its_prompt_is_soon_decoded() -> None:
    """Prompts under way and in the pool are at most as many as the decode worker has room for."""
    scene = pair(prefill=("p1", "p2"), settings=SchedulerSettings(window=FixedWindow(requests=3)))
    requests = [scene.arrive("ada", f"{n}ocument") for n in range(5)]
    assert scene.order == requests[:3]
    scene.cancel(requests[0])
    assert scene.order == requests[:4]


def test_a_hand_off_that_is_too_old_is_prefilled_again_and_free() -> None:
    """Nothing older than the limit is ever decoded, and its client pays for the prompt once."""
    window = FixedWindow(requests=1)
    scene = pair(settings=SchedulerSettings(window=window, handoff_seconds=20.0))
    request = scene.arrive("ada", "document")
    other = scene.arrive("bob", "something", whole=True)
    scene.prefill(request)
    assert at(scene, request) == ("p1", Leg.PREFILL), "the decode worker is busy"
    charged = scene.charged("ada")
    assert len(scene.scheduler.handoffs) == 1
    scene.wait(20.0)
    assert len(scene.scheduler.handoffs) == 0
    scene.finish(other)
    assert at(scene, request) == ("p1", Leg.PREFILL)
    scene.prefill(request)
    assert at(scene, request) == ("d1", Leg.DECODE)
    scene.finish(request, output=5)
    assert scene.charged("ada") == charged + 2 * 5


def test_the_hand_offs_of_a_prefill_worker_that_left_are_lost() -> None:
    """They are prefilled by another one."""
    scene = pair(prefill=("p1", "p2"), settings=ONE_AT_A_TIME)
    request = scene.arrive("ada", "document")
    first = scene.worker_of(request)
    other = scene.arrive("bob", "anything", whole=True)
    scene.prefill(request)
    assert len(scene.scheduler.handoffs) == 1
    scene.leave(first)
    scene.finish(other)
    assert at(scene, request) == ({"p1": "p2", "p2": "p1"}[first], Leg.PREFILL)


def test_a_client_may_leave_at_any_time() -> None:
    """During the prefill, in the pool and while decoding: nothing is left, and what was computed is paid for."""
    for where in ("prefill", "pool", "decode"):
        scene = pair(settings=ONE_AT_A_TIME)
        request = scene.arrive("ada", "document")
        if where == "pool":
            scene.arrive("bob", "something", whole=True)
        if where != "prefill":
            scene.prefill(request)
        assert len(scene.scheduler.handoffs) == (where == "pool")
        scene.cancel(request)
        assert len(scene.scheduler.handoffs) == 0
        assert scene.scheduler.live == (where == "pool"), "bob's"
        assert scene.charged("ada") == 8 * CHUNK_TOKENS


# What goes wrong


def test_a_prefill_worker_that_breaks_off_is_replaced() -> None:
    """Another one prefills the request."""
    scene = pair(prefill=("p1", "p2"))
    request = scene.arrive("ada", "document")
    first = scene.worker_of(request)
    give_back(scene, request)
    assert at(scene, request) == ({"p1": "p2", "p2": "p1"}[first], Leg.PREFILL)


def test_a_decode_worker_decodes_alone_if_every_prefill_worker_failed_the_request() -> None:
    """Then one engine computes all of it."""
    scene = pair()
    request = scene.arrive("ada", "document")
    give_back(scene, request)
    assert at(scene, request) == ("d1", Leg.WHOLE)


@pytest.mark.parametrize("policy", NAMES)
def test_a_conversation_that_its_worker_failed_goes_to_no_other(policy: str) -> None:
    """Only that worker stores what the request continues, so a decode worker cannot compute it alone."""
    scene = pair(policy)
    request = scene.arrive("ada", "document", only="d1")
    scene.join("d2", role=Role.DECODE)
    give_back(scene, request)
    assert scene.refusals == {request: Refusal.NO_RETRY}
    assert at(scene, request) == ("d1", Leg.WHOLE)
    assert scene.scheduler.live == 0


def test_what_a_decode_worker_returns_is_prefilled_again() -> None:
    """A refused hand-off is no longer at its prefill worker, and one that was accepted cannot be read twice."""
    scene = pair(decode=("d1", "d2"))
    request = scene.arrive("ada", "document", limit=50)
    scene.prefill(request)
    scene.progress(request, 4)
    charged = scene.charged("ada")
    scene.feed(Returned(request, accepted=True, fault=Fault.BROKEN, begun=True))
    assert at(scene, request) == ("p1", Leg.PREFILL)
    assert scene.charged("ada") == charged
    scene.prefill(request)
    assert at(scene, request) == ("d2", Leg.DECODE)
    scene.finish(request, output=9)
    assert scene.charged("ada") == charged + 2 * 5


@pytest.mark.parametrize(
    ("fault", "accepted", "prefill", "second"),
    [
        (Fault.ERROR, True, ("p1", "p2"), "p2"),
        (Fault.ERROR, False, ("p1", "p2"), "p1"),
        (Fault.BROKEN, True, ("p1", "p2"), "p1"),
        (Fault.ERROR, True, ("p1",), "p1"),
    ],
)
def test_a_prompt_that_a_decode_worker_may_not_have_found_is_prefilled_elsewhere(
    fault: Fault, *, accepted: bool, prefill: tuple[str, ...], second: str
) -> None:
    """A decode worker's error may mean that the prefill worker died with the prompt. So the next prefill is elsewhere,
    if it can be, though the prefix is there. After a broken connection it is where the prefix is, and if the decode
    worker refused the router, as with a wrong key, since then it has looked for no prompt.
    """
    scene = pair(prefill=prefill, decode=("d1", "d2"))
    request = scene.arrive("ada", "document")
    assert at(scene, request) == ("p1", Leg.PREFILL)
    scene.prefill(request)
    give_back(scene, request, fault, accepted=accepted)
    assert at(scene, request) == (second, Leg.PREFILL)


def test_a_hand_off_that_its_front_found_too_old_is_prefilled_again() -> None:
    """Nobody is blamed, and nothing is charged."""
    scene = pair()
    request = scene.arrive("ada", "document")
    scene.prefill(request)
    charged = scene.charged("ada")
    lose(scene, request)
    assert at(scene, request) == ("p1", Leg.PREFILL)
    scene.prefill(request)
    assert at(scene, request) == ("d1", Leg.DECODE)
    assert scene.charged("ada") == charged


def test_a_request_that_every_decode_worker_failed_is_refused() -> None:
    """It is not prefilled in vain."""
    scene = pair()
    request = scene.arrive("ada", "document")
    scene.prefill(request)
    give_back(scene, request)
    assert at(scene, request) == ("d1", Leg.DECODE), "not sent again"
    assert scene.refusals == {request: Refusal.NO_RETRY}
    assert scene.scheduler.live == 0


def test_a_request_is_not_prefilled_again_for_a_silent_decode_worker() -> None:
    """Nobody knows whether that one will ever answer, and all others have failed the request."""
    settings = SchedulerSettings(window=NoWindow(), health=HealthRules(silence=5.0))
    scene = pair(decode=("d1", "d2"), settings=settings)
    for other in [scene.arrive("bob", text) for text in ("one", "two")]:
        scene.prefill(other)
    for _ in range(8):
        scene.wait(1.0)
        for worker in ("p1", "d1"):
            scene.feed(WorkerAnswered(WorkerId(worker)))
    assert set(scene.scheduler.fleet.ejected) == {"d2"}
    request = scene.arrive("ada", "document")
    scene.prefill(request)
    give_back(scene, request)
    assert at(scene, request) == ("d1", Leg.DECODE), "not sent again"
    assert scene.refusals == {request: Refusal.NO_RETRY}


BREAKING = HealthRules(failures=1, cooldown=10.0, tries=9)
"""A failure opens a breaker for 10 s."""


def pair_with_one_ejected() -> Scene:
    """A prefill worker, a decode worker `d1`, and one, `d2`, whose breaker is open."""
    scene = pair(decode=("d1", "d2"), settings=SchedulerSettings(window=NoWindow(), health=BREAKING))
    for other in [scene.arrive("bob", text) for text in ("one", "two")]:
        scene.prefill(other)
        if at(scene, other)[0] == "d2":
            scene.feed(Failed(other, accepted=True, fault=Fault.BROKEN))
    assert set(scene.scheduler.fleet.ejected) == {"d2"}
    return scene


def test_a_request_waits_for_an_ejected_decode_worker_before_it_is_prefilled_again() -> None:
    """A prompt does not keep until then."""
    scene = pair_with_one_ejected()
    request = scene.arrive("ada", "document")
    scene.prefill(request)
    give_back(scene, request)
    assert at(scene, request) == ("d1", Leg.DECODE), "not sent again yet"
    assert not scene.refusals
    scene.wait(10.0)
    assert at(scene, request) == ("p1", Leg.PREFILL)
    scene.prefill(request)
    assert at(scene, request) == ("d2", Leg.DECODE)


def pooled_for_an_ejected_worker(calls: int) -> tuple[Scene, list[RequestId]]:
    """A decode worker, `d1`, that failed so many calls, and one, `d2`, whose breaker opened while they were prefilled
    for it again. Hand-offs keep for 12 s.
    """
    settings = SchedulerSettings(window=FixedWindow(requests=calls), health=BREAKING, handoff_seconds=12.0)
    scene = pair(decode=("d1", "d2"), settings=settings)
    sent = [scene.arrive("ada", f"{number}ocument") for number in range(2 * calls)]
    for request in sent:
        scene.prefill(request)
    failed, others = ([request for request in sent if scene.worker_of(request) == worker] for worker in ("d1", "d2"))
    for request in failed:
        give_back(scene, request, Fault.ERROR)
    for request in others:
        scene.feed(Failed(request, accepted=True, fault=Fault.BROKEN))
    for request in failed:
        scene.prefill(request)
    assert set(scene.scheduler.fleet.ejected) == {"d2"}
    assert len(scene.scheduler.handoffs) == len(failed) == calls
    return scene, failed


def test_a_prompt_that_keeps_for_long_enough_waits_for_an_ejected_decode_worker() -> None:
    """All others have failed its request meanwhile."""
    scene, (request,) = pooled_for_an_ejected_worker(calls=1)
    assert not scene.refusals
    scene.wait(10.0)
    assert at(scene, request) == ("d2", Leg.DECODE)


def test_prompts_that_wait_for_an_ejected_decode_worker_take_no_room_of_others() -> None:
    """They pause no prefill worker while the other decode worker has room."""
    scene, pooled = pooled_for_an_ejected_worker(calls=2)
    scene.wait(7.0)
    requests = [scene.arrive("bob", text) for text in ("one", "two", "three")]
    assert [request for request in requests if request in scene.dispatched] == requests[:2], "as many as have room"
    assert len(scene.scheduler.handoffs) == len(pooled)
    scene.prefill(requests[0])
    assert at(scene, requests[0]) == ("d1", Leg.DECODE)


def test_a_request_that_every_prefill_worker_failed_waits_for_an_ejected_decode_worker() -> None:
    """Which then computes all of it, as the other one should have."""
    scene = pair_with_one_ejected()
    request = scene.arrive("ada", "document")
    for _ in range(2):
        give_back(scene, request, Fault.ERROR)
    assert at(scene, request) == ("d1", Leg.WHOLE)
    assert "p1" not in scene.scheduler.fleet.ejected
    assert not scene.refusals
    scene.wait(10.0)
    assert at(scene, request) == ("d2", Leg.WHOLE)


def test_a_request_that_no_decode_worker_may_compute_alone_waits_for_an_ejected_prefill_worker() -> None:
    """All others have failed it."""
    settings = SchedulerSettings(window=NoWindow(), health=BREAKING, decode_alone=False)
    scene = pair(prefill=("p1", "p2"), settings=settings)
    other = scene.arrive("bob", "document")
    ejected = scene.worker_of(other)
    scene.feed(Failed(other, accepted=True, fault=Fault.BROKEN))
    request = scene.arrive("ada", "document")
    failed = scene.worker_of(request)
    give_back(scene, request)
    assert not scene.refusals
    scene.wait(10.0)
    assert at(scene, request) == (ejected, Leg.PREFILL)
    assert failed != ejected


@pytest.mark.parametrize("policy", NAMES)
def test_without_a_living_prefill_worker_decode_workers_serve_alone(policy: str) -> None:
    """Requests that wait go there at once, and when a prefill worker is back, to it."""
    scene = pair(policy, settings=ONE_AT_A_TIME)
    first, second = scene.arrive("ada", "document"), scene.arrive("ada", "another")
    scene.leave("p1")
    assert at(scene, second) == ("d1", Leg.WHOLE)
    third = scene.arrive("ada", "the third")
    scene.fail(first)
    scene.finish(second)
    assert at(scene, third) == ("d1", Leg.WHOLE)
    fourth = scene.arrive("ada", "the fourth")
    scene.finish(third)
    scene.finish(fourth)
    scene.join("p1", role=Role.PREFILL)
    fifth = scene.arrive("ada", "the fifth")
    assert at(scene, fifth) == ("p1", Leg.PREFILL)


@pytest.mark.parametrize("policy", NAMES)
def test_waiting_requests_are_prefilled_once_a_prefill_worker_joins(policy: str) -> None:
    """They do not stay in the queues of the decode workers."""
    scene = pair(policy, prefill=(), settings=ONE_AT_A_TIME)
    running = scene.arrive("ada", "document")
    waiting = scene.arrive("ada", "another")
    scene.join("p1", role=Role.PREFILL)
    scene.finish(running)
    assert at(scene, waiting) == ("p1", Leg.PREFILL)


@pytest.mark.parametrize("policy", NAMES)
def test_what_waits_where_its_prefix_is_stays_known_once_a_prefill_worker_joins(policy: str) -> None:
    """A decode worker is told anew what waits for it, and a client that leaves then takes its request along."""
    scene = pair(policy, prefill=(), decode=("d1", "d2"), settings=ONE_AT_A_TIME)
    scene.serve(scene.arrive("ada", "long document", whole=True), output=1)
    for letter in "xy":
        scene.arrive("ada", letter, whole=True)
    left, stayed = (scene.arrive(client, "long document", whole=True) for client in ("ada", "bob"))
    scene.join("p1", role=Role.PREFILL)
    scene.cancel(left)
    scene.serve_all()
    assert at(scene, stayed)[1] is Leg.WHOLE
    assert scene.scheduler.live == 0


def test_nothing_is_decoded_alone_if_that_is_not_allowed() -> None:
    """Without a prefill worker a request is refused at once."""
    scene = pair(prefill=(), settings=SchedulerSettings(decode_alone=False))
    request = scene.arrive("ada", "document")
    assert scene.refusals == {request: Refusal.NO_WORKER}


def test_the_last_decode_worker_is_not_ejected() -> None:
    """However often it fails, the prefill workers can do nothing without it."""
    scene = pair(prefill=("p1", "p2"), settings=SchedulerSettings(window=NoWindow(), health=HealthRules(failures=1)))
    request = scene.arrive("ada", "document")
    scene.prefill(request)
    scene.feed(Failed(request, accepted=True, fault=Fault.BROKEN))
    assert "d1" not in scene.scheduler.fleet.ejected


# When another run of the scheduler takes over


@pytest.mark.parametrize("gone", [False, True])
def test_a_hand_off_survives_the_scheduler(gone: bool) -> None:
    """The next run is told of both attempts, and charges each once, even if the workers are gone by then."""
    first = pair()
    request = first.arrive("ada", "document", limit=50)
    prefilled = Prefilled(request, Usage(8 * CHUNK_TOKENS, 1, 0))
    first.feed(prefilled)
    second = Scene("dlpm_home", workers=(), settings=OPEN)
    second.requests = dict(first.requests)
    second.feed(Held())
    for worker, role in () if gone else (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        second.join(worker, role=role)
    second.feed(Resumed(first.requests[request], WorkerId("p1"), 0, saved=False, leg=Leg.PREFILL))
    second.feed(prefilled)
    assert len(second.scheduler.handoffs) == 1
    assert not second.dispatched, "it is held"
    second.feed(Resumed(first.requests[request], WorkerId("d1"), 0, saved=False, leg=Leg.DECODE))
    assert len(second.scheduler.handoffs) == 0
    second.feed(Released())
    for scene in (first, second):
        scene.progress(request, 5)
        scene.feed(Finished(request, Usage(8 * CHUNK_TOKENS, 7, 0)))
        assert scene.scheduler.live == 0
        assert scene.charged("ada") == 8 * CHUNK_TOKENS + 2 * 7


def test_a_pooled_request_goes_on_after_a_takeover() -> None:
    """It is decoded as soon as the scheduler may send anything."""
    first = pair(settings=ONE_AT_A_TIME)
    request = first.arrive("ada", "document")
    second = Scene("dlpm_home", workers=(), settings=OPEN)
    second.requests = dict(first.requests)
    second.feed(Held())
    second.join("p1", role=Role.PREFILL)
    second.join("d1", role=Role.DECODE)
    second.feed(Resumed(first.requests[request], WorkerId("p1"), 0, saved=False, leg=Leg.PREFILL))
    second.feed(Prefilled(request, Usage(8 * CHUNK_TOKENS, 1, 0)))
    second.feed(Released())
    assert at(second, request) == ("d1", Leg.DECODE)


# Whatever happens

TIGHT = SchedulerSettings(
    waiting=WaitingLimits(requests=8, time_to_live=30.0),
    window=FixedWindow(requests=2, unstarted_tokens=10 * CHUNK_TOKENS),
    prefix_limit=24,
    match_minimum=CHUNK_TOKENS,
    kv_tokens=12 * CHUNK_TOKENS,
    health=HealthRules(failures=2, cooldown=3.0, tries=3, budget=0.5, floor=2),
    handoff_seconds=6.0,
)
ROLES = {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE, "b1": Role.BOTH}


class Counted:
    """A policy, and the sum of the charges that it was told of."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.charged: defaultdict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)

    def request_sent(self, request: Request, charge: Charge, uncached: int, output: float) -> Deficit:
        self.charged[charge.client] += charge.cost
        return self._policy.request_sent(request, charge, uncached, output)

    def request_charged(self, charge: Charge) -> None:
        self.charged[charge.client] += charge.cost
        self._policy.request_charged(charge)


class SplitFleet(RuleBasedStateMachine):
    """Clients, prefill workers and decode workers that do anything, in any order."""

    policy: ClassVar[str]

    @initialize(both=st.booleans(), barrier=st.booleans(), connector=st.sampled_from(Connector))
    def begin(self, *, both: bool, barrier: bool, connector: Connector) -> None:
        self.connector = connector
        self.counted: list[Counted] = []

        def build(context: PolicyContext) -> Policy:
            self.counted.append(Counted(POLICIES[self.policy](context)))
            return cast("Policy", self.counted[0])

        self.scene = Scene(build, workers=(), settings=TIGHT)
        self.prefilled: dict[RequestId, float] = {}
        """When each request was prefilled last."""
        self.barrier = BarrierId("rack") if barrier else None
        for worker, role in ROLES.items():
            if both or role is not Role.BOTH:
                self.join(worker)

    def running(self) -> list[RequestId]:
        return list(self.scene.scheduler.attempts)

    def of_leg(self, *legs: Leg) -> list[RequestId]:
        scheduler = self.scene.scheduler
        attempts = [*scheduler.attempts.items(), *scheduler.prefills.items()]
        return [request for request, attempt in attempts if attempt.leg in legs]

    @rule(worker=st.sampled_from(sorted(ROLES)))
    def join(self, worker: str) -> None:
        group = self.barrier if ROLES[worker] is Role.DECODE else None
        self.join_as(worker, ROLES[worker], group)

    def join_as(self, worker: str, role: Role, group: BarrierId | None = None) -> None:
        models = frozenset({MODEL})
        joined = Worker(WorkerId(worker), models, role=role, barrier=group, connector=self.connector)
        self.scene.feed(WorkerJoined(joined))

    @rule(worker=st.sampled_from(sorted(ROLES)))
    def leave(self, worker: str) -> None:
        self.scene.leave(worker)

    @rule(worker=st.sampled_from(["p1", "d1"]), role=st.sampled_from(list(Role)))
    def change_role(self, worker: str, role: Role) -> None:
        self.join_as(worker, role)

    @rule(
        client=st.sampled_from(["ada", "bob"]),
        prompt=st.text("xy", max_size=12),
        whole=st.booleans(),
        streamed=st.booleans(),
        only=st.sampled_from([None, None, *ROLES]),
    )
    def arrive(self, client: str, prompt: str, *, whole: bool, streamed: bool, only: str | None) -> None:
        """`only`: the worker that stores the conversation that the request continues."""
        self.scene.arrive(client, prompt, limit=20, whole=whole, streamed=streamed, only=only)

    @rule()
    def fill_and_prefill(self) -> None:
        """Leave the decode workers no room before prompts are prefilled, so that these wait in the pool."""
        self.scene.arrive("ada", "yx", limit=20)
        for _ in range(4):
            self.scene.arrive("bob", "x", limit=20, whole=True)
        for request in self.of_leg(Leg.PREFILL):
            self.prefilled[request] = self.scene.now
            self.scene.feed(Prefilled(request, Usage(CHUNK_TOKENS, 1)))

    @precondition(lambda self: self.of_leg(Leg.PREFILL))
    @rule(data=st.data(), cached=st.booleans())
    def prefill(self, data: st.DataObject, *, cached: bool) -> None:
        request = data.draw(st.sampled_from(self.of_leg(Leg.PREFILL)))
        self.prefilled[request] = self.scene.now
        self.scene.feed(Prefilled(request, Usage(CHUNK_TOKENS, 1, CHUNK_TOKENS if cached else None)))

    @precondition(lambda self: self.of_leg(Leg.DECODE, Leg.WHOLE))
    @rule(data=st.data(), output=st.integers(0, 20))
    def progress(self, data: st.DataObject, output: int) -> None:
        self.scene.progress(data.draw(st.sampled_from(self.of_leg(Leg.DECODE, Leg.WHOLE))), output)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), how=st.sampled_from(["finish", "fail", "cancel", "refuse"]))
    def end(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.running()))
        usage = Usage(CHUNK_TOKENS, 20)
        match how:
            case "finish":
                self.scene.feed(Finished(request, usage))
            case "fail":
                self.scene.feed(Failed(request, accepted=True, fault=Fault.ERROR))
            case "refuse":
                self.scene.feed(Failed(request, accepted=False))
            case "cancel":
                self.scene.feed(Cancelled(request, usage))

    @precondition(lambda self: self.running())
    @rule(
        data=st.data(),
        fault=st.sampled_from([Fault.FULL, Fault.ERROR, Fault.BROKEN]),
        accepted=st.booleans(),
        leg=st.sampled_from([Leg.PREFILL, Leg.DECODE]),
    )
    def give_back(self, data: st.DataObject, fault: Fault, leg: Leg, *, accepted: bool) -> None:
        request = data.draw(st.sampled_from(self.running()))
        self.scene.feed(Returned(request, accepted and fault is not Fault.FULL, fault, leg=leg))

    @precondition(lambda self: self.of_leg(Leg.DECODE) and not self.connector.at_once)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.scene.feed(HandoffLost(data.draw(st.sampled_from(self.of_leg(Leg.DECODE)))))

    @rule(away=st.booleans())
    def lose_or_find_front(self, *, away: bool) -> None:
        self.scene.feed((FrontAway if away else FrontBack)(tuple(self.running())))

    @precondition(lambda self: self.scene.scheduler.live)
    @rule(data=st.data())
    def cancel_any(self, data: st.DataObject) -> None:
        self.scene.feed(Cancelled(data.draw(st.sampled_from(sorted(self.scene.requests)))))

    @rule(seconds=st.sampled_from([0.5, 3.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.scene.wait(seconds)

    @invariant()
    def legs_fit_roles(self) -> None:
        for request, attempt in self.scene.scheduler.attempts.items() if hasattr(self, "scene") else ():
            if attempt.leg is Leg.DECODE and not self.connector.at_once:
                assert request in self.prefilled
            if attempt.leg is Leg.PREFILL:
                assert not self.scene.requests[request].whole

    @invariant()
    def nothing_is_prefilled_for_nobody(self) -> None:
        """A prompt is computed beside a decode worker's attempt only, and with connectors that need that."""
        for request, prefill in self.scene.scheduler.prefills.items() if hasattr(self, "scene") else ():
            assert self.connector.at_once
            assert prefill.leg is Leg.PREFILL
            assert self.scene.scheduler.attempts[request].leg is Leg.DECODE

    @invariant()
    def nothing_in_the_pool_is_too_old(self) -> None:
        if hasattr(self, "scene"):
            oldest = self.scene.now - TIGHT.handoff_seconds
            assert all(self.prefilled[state.request.id] > oldest for state in self.scene.scheduler.handoffs)

    @invariant()
    def every_live_request_is_in_one_place(self) -> None:
        if hasattr(self, "scene"):
            scheduler = self.scene.scheduler
            assert scheduler.live == len(scheduler.attempts) + scheduler.waiting

    @invariant()
    def a_counter_and_an_account_agree(self) -> None:
        if hasattr(self, "scene"):
            for client, account in self.scene.scheduler.ledger.accounts.items():
                assert self.counted[0].charged[client] == LinearCost()(account.charged)

    def teardown(self) -> None:
        """End everything: no place, bill, pool entry or allowance is left, and what was owed is what was charged."""
        scene = self.scene
        for request in list(scene.requests):
            scene.feed(Cancelled(request))
        scheduler = scene.scheduler
        assert scheduler.live == scheduler.waiting == len(scheduler.handoffs) == 0
        assert not list(scheduler.ledger.bills)
        for worker in scheduler.fleet:
            assert worker.load.requests == worker.context_tokens == worker.load.unstarted_tokens == 0
        scheduler.prefixes.check_integrity()


def examples(policy: str) -> int:
    """Return how many histories to try: few for each pair of placement and order, as these hardly interact."""
    return 40 if "+" not in policy else 4


@pytest.mark.parametrize("policy", NAMES)
def test_everything_ends_once_whatever_happens(policy: str) -> None:
    """No request is lost or decoded from a prompt that is too old, and in the end nothing is left in any count."""

    class Case(SplitFleet):
        pass

    Case.policy = policy
    run_state_machine_as_test(Case, settings=settings(max_examples=examples(policy), stateful_step_count=40))
