"""The metrics of hand-offs."""

from prometheus_client import CollectorRegistry

from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command
from router.core.model.events import (
    Arrived,
    Cancelled,
    Event,
    Failed,
    Fault,
    Finished,
    HandoffLost,
    Prefilled,
    Returned,
    Ticked,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.request import (
    ClientId,
    Connector,
    Leg,
    Request,
    RequestId,
    Role,
    Worker,
    WorkerId,
)
from router.core.scheduler_settings import SchedulerSettings
from router.telemetry.metrics.handoff_metrics import HandoffMetrics, HandoffOutcome
from tests.core.scenario import MODEL, Scene, key


def test_what_becomes_of_two_attempts_at_once_is_counted() -> None:
    """By outcome; a failed prefill is told from a decode worker that failed, and only prompts that were prefilled count
    again.
    """
    registry = CollectorRegistry()
    scene = Scene("dlpm_home", workers=(), settings=SchedulerSettings())
    metrics = HandoffMetrics(registry, scene.scheduler.handoffs)
    asked = [Request(RequestId(name), ClientId("ada"), MODEL, (key(name),), 10) for name in "abcd"]

    def feed(event: Event) -> None:
        metrics.observe(scene.now, event, scene.scheduler.handle(event, scene.now))

    for worker, role in (("p", Role.PREFILL), ("q", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE)):
        models = frozenset({MODEL})
        feed(WorkerJoined(Worker(WorkerId(worker), models, role=role, connector=Connector.SGLANG)))
    for request in asked:
        feed(Arrived(request))
    one, two, three, four = (request.id for request in asked)
    feed(Returned(one, accepted=True, fault=Fault.BROKEN, leg=Leg.PREFILL))
    feed(Prefilled(one, decoding=True))
    feed(Finished(one))
    feed(Prefilled(two, decoding=True))
    feed(Returned(two, accepted=True, fault=Fault.BROKEN, leg=Leg.DECODE))
    feed(Finished(two))
    feed(Cancelled(three))
    feed(Failed(four, accepted=False, leg=Leg.DECODE))
    outcomes = {
        outcome: registry.get_sample_value("d2lpm_handoffs_total", {"outcome": outcome}) for outcome in HandoffOutcome
    }
    assert {outcome.value: count for outcome, count in outcomes.items() if count} == {
        "decoded": 2,
        "failed": 1,
        "returned": 2,
        "cancelled": 1,
    }
    assert registry.get_sample_value("d2lpm_prefills_again_total") == 1


def test_what_becomes_of_hand_offs_is_counted() -> None:
    """By outcome, with their age at the dispatch to a decode worker, and with the prompts prefilled once more."""
    registry = CollectorRegistry()
    scene = Scene("dlpm_home", workers=(), settings=SchedulerSettings(window=FixedWindow(requests=1)))
    metrics = HandoffMetrics(registry, scene.scheduler.handoffs)
    commands: list[Command] = []

    def feed(event: Event) -> None:
        commands[:] = scene.scheduler.handle(event, scene.now)
        metrics.observe(scene.now, event, commands)

    def request(name: str, *, whole: bool = False) -> Request:
        return Request(RequestId(name), ClientId("ada"), MODEL, (key(name),), 10, whole=whole)

    for worker, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        feed(WorkerJoined(Worker(WorkerId(worker), frozenset({MODEL}), role=role)))
    feed(Arrived(request("a")))
    feed(Arrived(request("b", whole=True)))
    feed(Prefilled(RequestId("a")))
    assert registry.get_sample_value("d2lpm_handoff_pool_requests") == 1
    scene.now = 3.0
    feed(Finished(RequestId("b")))
    assert registry.get_sample_value("d2lpm_handoff_age_seconds_sum", {"model": MODEL}) == 3.0
    feed(HandoffLost(RequestId("a")))
    feed(Prefilled(RequestId("a")))
    feed(Returned(RequestId("a"), accepted=False, fault=Fault.FULL))
    scene.now = 9.0
    feed(Ticked())
    feed(Prefilled(RequestId("a")))
    feed(Finished(RequestId("a")))
    outcomes = {
        outcome: registry.get_sample_value("d2lpm_handoffs_total", {"outcome": outcome})
        for outcome in ("decoded", "expired", "lost", "returned", "cancelled")
    }
    assert outcomes == {"decoded": 1, "expired": 0, "lost": 1, "returned": 1, "cancelled": 0}
    assert registry.get_sample_value("d2lpm_prefills_again_total") == 2
    assert registry.get_sample_value("d2lpm_decoded_alone_total", {"reason": "one engine"}) == 1
    feed(WorkerLeft(WorkerId("p")))
    feed(Arrived(request("c")))
    assert registry.get_sample_value("d2lpm_decoded_alone_total", {"reason": "no prefill worker"}) == 1


def test_events_of_requests_are_observed_only_beside_workers_with_a_part() -> None:
    """From the first such worker on, until the last is gone and no request is left that came beside it."""
    scene = Scene("dlpm_home", workers=())
    metrics = HandoffMetrics(CollectorRegistry(), scene.scheduler.handoffs)

    def follows(event: Event) -> bool:
        metrics.observe(scene.now, event, scene.scheduler.handle(event, scene.now))
        return Arrived in metrics.event_types

    request = Request(RequestId("a"), ClientId("ada"), MODEL, (key("a"),), 10)
    assert not follows(WorkerJoined(Worker(WorkerId("w"), frozenset({MODEL}))))
    assert follows(WorkerJoined(Worker(WorkerId("d"), frozenset({MODEL}), role=Role.DECODE)))
    assert follows(Arrived(request))
    assert follows(WorkerLeft(WorkerId("d")))
    assert not follows(Finished(request.id))
