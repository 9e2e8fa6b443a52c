"""Prefill and decode at different workers that must be called at once: one decision, two attempts beside each other."""

import pytest

from router.core.fleet.health import HealthRules
from router.core.fleet.window import FixedWindow, NoWindow
from router.core.model.commands import Refusal
from router.core.model.events import Arrived, Failed, Fault, Finished, Held, Prefilled, Released, Resumed, Returned
from router.core.model.request import Connector, Leg, Request, RequestId, Role, Usage, WorkerId
from router.core.policies.registry import POLICIES
from router.core.scheduler_settings import SchedulerSettings
from router.core.snapshot import restore, saved_accounts
from tests.core.scenario import CHUNK_TOKENS, MODEL, Scene

OPEN = SchedulerSettings(window=NoWindow())
"""Nothing waits for room."""
BREAKING = SchedulerSettings(window=NoWindow(), health=HealthRules(failures=1, cooldown=10.0))
"""A failure opens a breaker."""
NAMES = [*(name for name in POLICIES if "+" not in name), "preble+vtc_predict"]
INPUT = 8 * CHUNK_TOKENS
"""Tokens of "document"."""


def fleet(
    policy: str = "dlpm_home",
    *,
    prefill: tuple[str, ...] = ("p1",),
    decode: tuple[str, ...] = ("d1",),
    settings: SchedulerSettings = OPEN,
    connector: Connector = Connector.SGLANG,
) -> Scene:
    """Prefill and decode workers that must be called at once."""
    scene = Scene(policy, workers=(), settings=settings)
    join_all(scene, prefill, decode, connector)
    return scene


def join_all(
    scene: Scene, prefill: tuple[str, ...], decode: tuple[str, ...], connector: Connector = Connector.SGLANG
) -> None:
    for role, workers in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for worker in workers:
            scene.join(worker, role=role, connector=connector)


def sent(scene: Scene, request: RequestId) -> tuple[str, str]:
    """Return where the two parts of a request were sent last."""
    first, second = scene.prefilling[request], scene.dispatched[request]
    assert (first.leg, second.leg) == (Leg.PREFILL, Leg.DECODE)
    assert (first.partner, second.partner) == (second.worker, first.worker)
    return first.worker, second.worker


def loads(scene: Scene) -> dict[str, int]:
    return {state.worker.id: state.load.requests for state in scene.scheduler.fleet}


# The way of a request


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("connector", [Connector.SGLANG, Connector.MOONCAKE])
def test_both_workers_get_a_request_by_one_decision(policy: str, connector: Connector) -> None:
    """Both are busy with it at once; the prefill worker until it has answered, the decode worker until the end."""
    scene = fleet(policy, connector=connector)
    request = scene.arrive("ada", "document")
    assert sent(scene, request) == ("p1", "d1")
    assert loads(scene) == {"p1": 1, "d1": 1}
    scene.prefill(request)
    assert loads(scene) == {"p1": 0, "d1": 1}
    assert len(scene.scheduler.handoffs) == 0
    scene.start(request)
    scene.finish(request, output=7)
    assert (scene.scheduler.live, loads(scene)) == (0, {"p1": 0, "d1": 0})


def test_input_is_charged_at_the_prefill_and_output_at_the_decode() -> None:
    """As with one attempt after the other: one counter, by the prefill's usage, and nothing twice."""
    scene = fleet()
    request = scene.arrive("ada", "document", limit=50)
    assert scene.charged("ada") == INPUT
    scene.prefill(request, cached=3 * CHUNK_TOKENS)
    assert scene.charged("ada") == INPUT - 3 * CHUNK_TOKENS
    scene.progress(request, 10)
    scene.finish(request, output=12, cached=0)
    assert scene.charged("ada") == INPUT - 3 * CHUNK_TOKENS + 2 * 12
    bills = {attempt.worker.worker.id for attempt in scene.scheduler.attempts.values()}
    assert not bills


def test_a_short_answer_may_be_complete_before_the_prefill_worker_has_answered() -> None:
    """Then the decode worker's usage, which is that of the whole request, settles both."""
    scene = fleet()
    request = scene.arrive("ada", "document", limit=1)
    scene.feed(Finished(request, Usage(INPUT, 1, 2 * CHUNK_TOKENS)))
    assert scene.charged("ada") == INPUT - 2 * CHUNK_TOKENS + 2
    assert (scene.scheduler.live, loads(scene)) == (0, {"p1": 0, "d1": 0})


def test_a_request_waits_in_the_queue_until_a_decode_worker_has_room() -> None:
    """Not at the prefill worker, and not in a pool: the next one goes when a place at the decode worker is free."""
    scene = fleet(settings=SchedulerSettings(window=FixedWindow(requests=2)), prefill=("p1", "p2"))
    first, second, third = (scene.arrive("ada", text) for text in ("one", "two", "six"))
    assert scene.order == [first, second]
    scene.prefill(first)
    scene.prefill(second)
    assert third not in scene.dispatched
    scene.finish(first)
    assert sent(scene, third)[1] == "d1"


def test_a_model_without_room_to_decode_does_not_hold_up_another() -> None:
    """Whether a prompt can begin is asked for each model."""
    scene = Scene("dlpm_home", workers=(), settings=SchedulerSettings(window=FixedWindow(requests=4)))
    scene.join("p", "a", "b", role=Role.PREFILL, connector=Connector.SGLANG)
    scene.join("b1", "b", role=Role.DECODE, connector=Connector.SGLANG)
    waiting = scene.arrive("ada", "document", model="a")
    going = scene.arrive("ada", "document", model="b")
    assert sent(scene, going) == ("p", "b1")
    scene.join("a1", "a", role=Role.DECODE, connector=Connector.SGLANG)
    assert sent(scene, waiting) == ("p", "a1")


def test_a_prompt_goes_where_its_prefix_is_and_is_decoded_where_least_is() -> None:
    """Locality chooses the prefill worker only."""
    scene = fleet(prefill=("p1", "p2"), decode=("d1", "d2"))
    first, other = scene.arrive("ada", "document1"), scene.arrive("ada", "something")
    home, decoder = sent(scene, first)
    assert sent(scene, other) == ({"p1": "p2", "p2": "p1"}[home], {"d1": "d2", "d2": "d1"}[decoder])
    for request in (first, other):
        scene.prefill(request)
    scene.finish(other)
    again = scene.arrive("ada", "document2")
    assert sent(scene, again) == (home, {"d1": "d2", "d2": "d1"}[decoder])


def test_a_decode_worker_that_cannot_prefill_gets_no_whole_request() -> None:
    """An SGLang decode server would wait for a prefill server; a vLLM with Mooncake computes the prompt itself."""
    scene = fleet()
    assert scene.refusals[scene.arrive("ada", "document", whole=True)] is Refusal.NO_WORKER
    scene = fleet(connector=Connector.MOONCAKE)
    request = scene.arrive("ada", "document", whole=True)
    assert (scene.dispatched[request].worker, scene.dispatched[request].leg) == ("d1", Leg.WHOLE)


def test_requests_wait_while_no_prefill_worker_lives() -> None:
    """Without one, an SGLang decode server is of no use: the request is refused, as there is no worker."""
    scene = fleet(prefill=())
    assert scene.refusals[scene.arrive("ada", "document")] is Refusal.NO_WORKER


# What goes wrong


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
@pytest.mark.parametrize("accepted", [False, True])
def test_one_part_that_fails_ends_both(policy: str, leg: Leg, accepted: bool) -> None:
    """Both are sent again, the failed one elsewhere, and the client pays as if nothing had happened."""
    scene = fleet(policy, prefill=("p1", "p2"), decode=("d1", "d2"))
    request = scene.arrive("ada", "document", limit=50)
    before = sent(scene, request)
    scene.feed(Returned(request, accepted, Fault.BROKEN, leg=leg))
    after = sent(scene, request)
    failed = leg is Leg.DECODE
    assert after[failed] != before[failed]
    assert sum(loads(scene).values()) == 2
    scene.prefill(request)
    scene.finish(request, output=5)
    assert scene.charged("ada") == INPUT + 2 * 5
    assert scene.scheduler.live == 0
    assert not any(loads(scene).values())


def test_only_the_worker_that_failed_is_blamed() -> None:
    """Its partner is not ejected, however often it had to be stopped."""
    settings = SchedulerSettings(window=NoWindow(), health=HealthRules(failures=2, tries=9))
    scene = fleet(prefill=("p1", "p2"), decode=("d1", "d2"), settings=settings)
    for _ in range(4):
        request = scene.arrive("ada", "document")
        scene.feed(Failed(request, accepted=True, fault=Fault.BROKEN, leg=Leg.PREFILL))
    assert scene.scheduler.fleet.ejected.keys() <= {"p1", "p2"}
    assert scene.scheduler.fleet.ejected


def test_a_decode_worker_that_dies_amid_an_answer_costs_nothing_more() -> None:
    """The rest goes through prefill again, free, and only new output is charged."""
    scene = fleet(prefill=("p1", "p2"), decode=("d1", "d2"))
    request = scene.arrive("ada", "document", limit=50)
    scene.prefill(request)
    scene.progress(request, 4)
    _, died = sent(scene, request)
    scene.feed(Returned(request, accepted=True, fault=Fault.BROKEN, begun=True, leg=Leg.DECODE))
    assert sent(scene, request)[1] != died
    assert scene.charged("ada") == INPUT + 2 * 4
    scene.prefill(request)
    scene.finish(request, output=9)
    assert scene.charged("ada") == INPUT + 2 * 9


def test_a_request_that_every_decode_worker_failed_is_refused() -> None:
    """And one that could be decoded once a worker joins waits for it."""
    scene = fleet()
    request = scene.arrive("ada", "document")
    scene.feed(Returned(request, accepted=True, fault=Fault.BROKEN, leg=Leg.DECODE))
    assert scene.refusals == {request: Refusal.NO_RETRY}
    other = scene.arrive("ada", "document")
    scene.leave("d1")
    scene.feed(Returned(other, accepted=False, fault=Fault.BROKEN, leg=Leg.DECODE))
    assert other not in scene.refusals
    scene.join("d2", role=Role.DECODE, connector=Connector.SGLANG)
    assert sent(scene, other) == ("p1", "d2")


@pytest.mark.parametrize("connector", [Connector.SGLANG, Connector.MOONCAKE])
def test_a_request_waits_for_an_ejected_group_while_the_ranks_of_another_leave_one_by_one(connector: Connector) -> None:
    """The ranks that are still there have all failed it; the others come back when their breaker's time is over."""
    scene = Scene("dlpm_home", workers=(), settings=BREAKING)
    scene.join("p", role=Role.PREFILL, connector=connector)
    for group in "de":
        for rank in "01":
            scene.join(group + rank, role=Role.DECODE, connector=connector, barrier=group)
    for other in [scene.arrive("bob", text) for text in ("one", "two", "six", "ten")]:
        if sent(scene, other)[1].startswith("e"):
            scene.feed(Failed(other, accepted=False, fault=Fault.BROKEN, leg=Leg.DECODE))
        else:
            scene.cancel(other)
    assert set(scene.scheduler.fleet.ejected) == {"e0", "e1"}
    request = scene.arrive("ada", "document")
    died = [sent(scene, request)[1]]
    scene.feed(Returned(request, accepted=False, fault=Fault.BROKEN, leg=Leg.DECODE))
    died.append(sent(scene, request)[1])
    scene.leave(died[0])
    scene.feed(Returned(request, accepted=False, fault=Fault.BROKEN, leg=Leg.DECODE))
    assert sorted(died) == ["d0", "d1"]
    assert not scene.refusals
    scene.leave(died[1])
    assert sent(scene, request)[1] in ("e0", "e1")


@pytest.mark.parametrize("prefilled", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_pays_for_its_prompt_and_what_was_computed(prefilled: bool, streamed: bool) -> None:
    """While the prompt is computed there is no output, however fast the decode worker usually is."""
    scene = fleet()
    request = scene.arrive("ada", "document", limit=50, streamed=streamed)
    if prefilled:
        scene.prefill(request)
    else:
        scene.wait(60.0)
    scene.cancel(request)
    assert scene.charged("ada") == INPUT
    assert (scene.scheduler.live, loads(scene)) == (0, {"p1": 0, "d1": 0})


# When another run of the scheduler takes over


def take_over(first: Scene, *, saved: bool, policy: str = "dlpm_home") -> Scene:
    """Return a second run, held, which starts from what the first one saved, if it has saved anything."""
    second = Scene(policy, workers=(), settings=OPEN)
    second.requests = dict(first.requests)
    charged = tuple(first.scheduler.charged_requests()) if saved else ()
    if saved:
        restore(second.scheduler, list(saved_accounts(first.scheduler)), 0.0)
    second.feed(Held(charged))
    join_all(second, ("p1",), ("d1",))
    return second


def resumed(request: Request, leg: Leg, *, saved: bool) -> Resumed:
    worker, partner = ("p1", "d1") if leg is Leg.PREFILL else ("d1", "p1")
    return Resumed(request, WorkerId(worker), 0, saved=saved, leg=leg, partner=WorkerId(partner))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("prefilled_before", [False, True])
def test_both_attempts_survive_the_scheduler(saved: bool, prefilled_before: bool) -> None:
    """The next run is told of each that is open, and charges nothing twice."""
    first = fleet()
    request = first.arrive("ada", "document", limit=50)
    if prefilled_before and saved:
        first.prefill(request)
    second = take_over(first, saved=saved)
    if not (prefilled_before and saved):
        second.feed(resumed(first.requests[request], Leg.PREFILL, saved=saved))
    second.feed(resumed(first.requests[request], Leg.DECODE, saved=saved))
    second.feed(Released())
    assert second.scheduler.attempts.keys() == {request}
    for scene in (first, second):
        if scene.scheduler.prefills:
            scene.feed(Prefilled(request, Usage(INPUT, 1, 0)))
        scene.progress(request, 5)
        scene.feed(Finished(request, Usage(INPUT, 7, 0)))
        assert scene.scheduler.live == 0
        assert scene.charged("ada") == INPUT + 2 * 7
        assert not list(scene.scheduler.charged_requests())


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("cached", [0, INPUT])
def test_a_request_whose_front_never_learned_of_its_workers_is_sent_again(policy: str, cached: int) -> None:
    """What both were charged is taken back, and charged once for the new attempts, by what these find in the cache."""
    first = fleet(policy)
    if cached:
        before = first.arrive("bob", "document")
        first.prefill(before)
        first.finish(before)
    request = first.arrive("ada", "document", limit=50)
    second = take_over(first, saved=True, policy=policy)
    second.feed(Arrived(first.requests[request], again=True))
    second.feed(Released())
    second.wait(5.0)  # it looks as if they had been full
    assert sent(second, request) == ("p1", "d1")
    second.prefill(request)
    second.finish(request, output=3)
    assert second.charged("ada") == INPUT + 2 * 3
    assert MODEL in first.requests[request].model
