"""Health decides which workers to trust: circuit breakers, slow start, backoff, retry budget, silence timeouts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.health import (
    FULL_TRUST,
    Condition,
    Health,
    HealthRules,
    SilenceRules,
    SilenceTimeout,
)
from router.core.fleet.window import FEWEST_REQUESTS, FixedWindow
from router.core.fleet.worker_fleet import WorkerFleet
from router.core.model.commands import Refusal
from router.core.model.events import Failed, Fault, Returned, WorkerAnswered
from router.core.model.request import Request, RequestId, WorkerId
from router.core.policies.registry import POLICIES
from router.core.retries import RetryBudget
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, Scene

R = [RequestId(f"r{number}") for number in range(100)]
FAST = HealthRules(failures=2, cooldown=4.0, tries=3)
W1, W2, W3 = (WorkerId(name) for name in ("w1", "w2", "w3"))


def fail(health: Health, times: int, now: float = 0.0) -> float | None:
    """Return the outcome of the last of this many failures."""
    until = None
    for _ in range(times):
        until = health.on_failure(now)
    return until


def condition(health: Health) -> Condition:
    """Return the current condition; a function, so that mypy does not narrow it."""
    return health.condition


def trusts(health: Health) -> bool:
    """Return whether one more request may be sent; a function, so that mypy does not narrow it."""
    return health.trusted


def test_a_breaker_opens_when_half_of_the_last_calls_failed() -> None:
    """A breaker does not open before enough calls failed, nor for a few failures among many calls."""
    health = Health(HealthRules(failures=5))
    assert fail(health, 4) is None
    assert fail(health, 1, now=7.0) == 12.0
    assert condition(health) is Condition.OPEN
    assert not trusts(health)
    busy = Health(HealthRules(failures=5))
    for request in R[:30]:
        fail(busy, 1)
        for _ in range(2):
            busy.on_success(request)
    assert condition(busy) is Condition.CLOSED


def test_a_probe_closes_the_breaker_or_opens_it_for_longer() -> None:
    """One request is sent as a probe, and no other until it has its first token."""
    health = Health(FAST)
    assert fail(health, 2, now=10.0) == 14.0
    health.half_open()
    assert trusts(health)
    health.on_dispatch(R[0])
    assert not trusts(health)
    assert fail(health, 1, now=20.0) == 28.0, "twice as long"
    health.half_open()
    health.on_dispatch(R[1])
    health.on_success(R[0])
    assert condition(health) is Condition.HALF_OPEN, "an old request proves nothing"
    health.on_success(R[1])
    assert condition(health) is Condition.CLOSED


def test_trust_grows_with_each_first_token() -> None:
    """Each first token lets one more request be in flight unproven, until only the window limits them."""
    health = Health(FAST)
    health.half_open()
    sent = 0
    for round_ in range(1, 6):
        free = 0
        while health.trusted and free < 2 * FULL_TRUST:
            health.on_dispatch(R[sent])
            sent, free = sent + 1, free + 1
        assert free >= min(2 ** (round_ - 1), FULL_TRUST)
        for request in R[sent - free : sent]:
            health.on_success(request)
    other = Health(FAST)
    other.half_open()
    other.on_dispatch(R[0])
    other.on_end(R[0])
    assert trusts(other)


def test_a_breaker_may_be_switched_off() -> None:
    """A breaker with `failures=0` stays closed."""
    health = Health(HealthRules(failures=0))
    assert fail(health, 100) is None
    assert trusts(health)


@given(st.lists(st.booleans(), max_size=300), st.integers(0, 12))
def test_retries_are_a_share_of_the_requests_and_a_floor(attempts: list[bool], floor: int) -> None:
    """At no moment are there more retries than a share of the requests plus the floor."""
    budget = RetryBudget(0.1, floor)
    requests = retries = 0
    for is_request in attempts:
        if is_request:
            requests += 1
        else:
            retries += budget.take(0.0, requests)
        assert retries <= floor + 0.1 * requests + 1e-6


def test_the_floor_of_the_retry_budget_is_refilled() -> None:
    """The budget is refilled with time, up to the floor."""
    budget = RetryBudget(0.0, 5)
    assert [budget.take(0.0, 0) for _ in range(6)] == [True] * 5 + [False]
    assert [budget.take(4.0, 0) for _ in range(3)] == [True, True, False]
    assert sum(budget.take(1000.0, 0) for _ in range(9)) == 5


def test_silence_timeouts_follow_the_workers_slowest_times() -> None:
    """A timeout is ten times the slowest first token and at least the configured minimum, and decays slowly."""
    timeout = SilenceTimeout(SilenceRules(2.0, 1.0))
    assert (timeout.first_token, timeout.between_tokens) == (2.0, 1.0)
    timeout.on_first_token(3.0)
    timeout.on_tokens(10.0, 100)
    assert timeout.first_token == 30.0
    assert timeout.between_tokens == pytest.approx(10.0)
    assert timeout.whole(50) == pytest.approx(30.0 + 10.0 + 50.0)
    assert timeout.whole(None) is None
    for _ in range(500):
        timeout.on_first_token(0.001)
    assert timeout.first_token == 2.0
    never = SilenceTimeout(SilenceRules(0.0, 0.0))
    assert (never.first_token, never.between_tokens, never.whole(5)) == (None, None, None)


# In the scheduler


def test_a_worker_that_joins_again_keeps_what_is_known_of_its_silence() -> None:
    """A worker that joins again is as slow as before, so calls that take as long as before are not given up."""
    scene = new_scene("w1")
    request = scene.arrive("ada", "question")
    scene.wait(100.0)
    scene.start(request)
    scene.finish(request, 5)
    known = scene.scheduler.fleet[WorkerId("w1")].silence_timeout.first_token
    assert known == pytest.approx(1000.0)
    scene.leave("w1")
    scene.join("w1")
    assert scene.scheduler.fleet[WorkerId("w1")].silence_timeout.first_token == known


def new_scene(*workers: str, policy: str = "rr+fcfs", requests: int = 9, rules: HealthRules = FAST) -> Scene:
    """Return a scheduler with these workers."""
    settings = SchedulerSettings(window=FixedWindow(requests, 10**6), health=rules)
    return Scene(policy, workers=workers, settings=settings)


def give_back(
    scene: Scene, request: RequestId, fault: Fault = Fault.BROKEN, *, accepted: bool = True, begun: bool = False
) -> None:
    """Return a request that its worker did not answer, so that another worker may."""
    scene.feed(Returned(request, accepted, fault, begun=begun))


@pytest.mark.parametrize("policy", ["rr+fcfs", "d2lpm", "dlpm_home", "rpm", "preble", "rr+vtc"])
def test_a_failed_request_goes_to_a_worker_that_has_not_failed_it(policy: str) -> None:
    """A failed request goes there at once if there is room. When no worker is left it is refused, and nothing stays in
    flight.
    """
    scene = new_scene("w1", "w2", policy=policy)
    request = scene.arrive("ada", "doc")
    first = scene.worker_of(request)
    give_back(scene, request)
    second = scene.worker_of(request)
    assert {first, second} == {W1, W2}
    give_back(scene, request)
    assert scene.refusals == {request: Refusal.NO_RETRY}
    assert scene.scheduler.live == 0
    assert not scene.scheduler.attempts


@pytest.mark.parametrize(("accepted", "charged"), [(True, 96.0 + 2 * 7), (False, 96.0 + 2 * 7)])
def test_a_client_pays_for_its_prompt_once(accepted: bool, charged: float) -> None:
    """A retry is not charged again, whether the first worker computed the prompt or not."""
    scene = new_scene("w1", "w2")
    request = scene.arrive("ada", "doc")
    give_back(scene, request, accepted=accepted)
    scene.serve(request, 7)
    assert scene.charged("ada") == charged


def test_a_continued_answer_is_charged_once() -> None:
    """The prompt and 5 tokens at the first worker and 3 more at the second make 8 output tokens."""
    scene = new_scene("w1", "w2")
    request = scene.arrive("ada", "doc")
    scene.progress(request, 5)
    give_back(scene, request, begun=True)
    assert scene.charged("ada") == 96.0 + 2 * 5
    scene.progress(request, 6)
    assert scene.charged("ada") == 96.0 + 2 * 6
    scene.finish(request, 8)
    assert scene.charged("ada") == 96.0 + 2 * 8


def test_a_refused_connection_does_not_count_as_a_try() -> None:
    """A refused connection uses up neither the request's tries nor the retry budget, and no worker is asked twice."""
    scene = new_scene("w1", "w2", "w3", "w4", rules=HealthRules(failures=0, tries=2, budget=0.0, floor=1))
    request = scene.arrive("ada", "doc")
    asked = []
    for accepted in (False, True, False):
        asked.append(scene.worker_of(request))
        give_back(scene, request, accepted=accepted)
    asked.append(scene.worker_of(request))
    assert len(set(asked)) == 4
    give_back(scene, request)
    assert scene.refusals == {request: Refusal.NO_RETRY}
    one, other = scene.arrive("ada", "a"), scene.arrive("ada", "b")
    give_back(scene, one, accepted=False)
    give_back(scene, other)
    assert scene.refusals[other] == Refusal.NO_RETRY, "the budget was used up by the request that was taken"
    off = new_scene("w1", "w2", rules=HealthRules(tries=1))
    give_back(off, only := off.arrive("ada", "doc"), accepted=False)
    assert off.refusals == {only: Refusal.NO_RETRY}


def test_what_was_begun_and_then_fails_is_not_refunded() -> None:
    """An attempt that a worker began is charged, even if the last worker tried refused the connection."""
    scene = new_scene("w1", "w2")
    request = scene.arrive("ada", "doc")
    give_back(scene, request)
    give_back(scene, request, accepted=False)
    assert scene.charged("ada") == 96.0


def test_a_failed_request_goes_before_those_that_wait() -> None:
    """A failed request has had its turn and gets the first room at another worker."""
    scene = new_scene("w1", "w2", requests=1)
    first, second, _, waiting = [scene.arrive("ada", letter) for letter in "abcd"]
    give_back(scene, first)
    assert scene.scheduler.waiting == 2
    scene.serve(second)
    assert scene.worker_of(first) == W2
    assert waiting not in scene.dispatched
    scene.serve(first)
    assert scene.worker_of(waiting) == W2


def eject(scene: Scene, worker: WorkerId) -> None:
    """Let calls fail at a worker until its breaker opens."""
    while worker not in scene.scheduler.fleet.ejected:
        scene.feed(Failed(scene.arrive("zoe", "z", only=worker), accepted=True, fault=Fault.BROKEN))


@pytest.mark.parametrize("policy", ["rr+fcfs", "d2lpm", "dlpm_home", "rpm", "preble", "rr+vtc"])
def test_a_failed_request_waits_for_an_ejected_worker_as_one_in_the_queue_does(policy: str) -> None:
    """Its cooldown ends at a known time. The one in the queue goes to the worker that is in use once it has room."""
    scene = new_scene("w1", "w2", policy=policy, requests=1)
    eject(scene, W1)
    failed, waiting = scene.arrive("ada", "a"), scene.arrive("ada", "b")
    give_back(scene, failed)
    assert not scene.refusals
    assert scene.worker_of(waiting) == W2
    scene.wait(3.9)
    assert scene.worker_of(failed) == W2, "not sent again yet"
    scene.wait(0.2)
    assert scene.worker_of(failed) == W1
    scene.serve_all()
    assert scene.scheduler.live == 0


def test_a_failed_request_waits_for_an_ejected_worker_no_longer_than_it_may_wait() -> None:
    """Its time to live is that of all that wait."""
    settings = SchedulerSettings(window=FixedWindow(9, 10**6), health=FAST, waiting=WaitingLimits(time_to_live=3.0))
    scene = Scene("rr+fcfs", workers=("w1", "w2"), settings=settings)
    eject(scene, W1)
    request = scene.arrive("ada", "a")
    give_back(scene, request)
    scene.wait(2.9)
    assert not scene.refusals
    scene.wait(0.2)
    assert scene.refusals == {request: Refusal.EXPIRED}


@pytest.mark.parametrize("why", ["it left", "no tries are left"])
def test_a_failed_request_waits_for_no_worker_that_will_not_serve_it(why: str) -> None:
    """It is refused as soon as that is known."""
    scene = new_scene("w1", "w2", rules=replace(FAST, tries=1 if why == "no tries are left" else 3))
    eject(scene, W1)
    request = scene.arrive("ada", "a")
    give_back(scene, request)
    if why == "it left":
        assert not scene.refusals
        scene.leave("w1")
    assert scene.refusals[request] is Refusal.NO_RETRY


def test_a_failed_request_does_not_wait_for_a_worker_that_has_failed_it() -> None:
    """An ejected worker that comes back is not tried again."""
    scene = new_scene("w1", "w2", rules=replace(FAST, failures=1))
    request = scene.arrive("ada", "a")
    give_back(scene, request)
    assert len(scene.scheduler.fleet.ejected) == 1
    give_back(scene, request)
    assert scene.refusals == {request: Refusal.NO_RETRY}


def test_a_failed_request_does_not_wait_for_a_silent_worker() -> None:
    """Nobody knows whether it will ever answer."""
    scene = new_scene("w1", "w2", rules=HealthRules(silence=5.0))
    sent = {scene.worker_of(request): request for request in (scene.arrive("ada", "a"), scene.arrive("ada", "b"))}
    for _ in range(8):
        scene.wait(1.0)
        scene.feed(WorkerAnswered(W2))
    assert set(scene.scheduler.fleet.ejected) == {W1}
    give_back(scene, sent[W2])
    assert scene.refusals == {sent[W2]: Refusal.NO_RETRY}


def test_a_conversation_that_its_worker_failed_waits_for_no_other() -> None:
    """Only that worker stores what the request continues."""
    scene = new_scene("w1", "w2")
    eject(scene, W1)
    request = scene.arrive("ada", "a", only="w2")
    give_back(scene, request)
    assert scene.refusals == {request: Refusal.NO_RETRY}


@pytest.mark.parametrize(("chunks", "output", "goes"), [(19, 0, False), (20, 0, True), (20, 1, False), (21, 1, True)])
def test_a_failed_request_matches_no_prefix_still_in_prefill(chunks: int, output: int, goes: bool) -> None:
    """An SGLang worker computes a prefix again that its current batch computes. So the request takes as much of the
    window as if nothing was cached, plus the part of the answer it had. After the batch, almost everything is cached.
    """
    scene = Scene("rr+fcfs", workers=(), settings=SchedulerSettings(window=FixedWindow(9, chunks * CHUNK_TOKENS)))
    for worker in ("w1", "w2"):
        scene.join(worker, engine="sglang")
    computed, failed = scene.arrive("ada", "document 1"), scene.arrive("bob", "document 2")
    if output:
        scene.progress(failed, output)
    give_back(scene, failed, begun=output > 0)
    assert scene.scheduler.waiting == (0 if goes else 1)
    scene.start(computed)
    assert scene.worker_of(failed) == scene.worker_of(computed)


class CountingFleet(WorkerFleet):
    """Counts how often it is asked which workers serve a request, now or once they come back."""

    asked = 0

    def candidates(self, request: Request) -> Mapping[WorkerId, int]:
        self.asked += 1
        return super().candidates(request)

    def coming_back(self, route: str) -> Sequence[WorkerId]:
        self.asked += 1
        return super().coming_back(route)


def asked_while_waiting(waiting: int) -> int:
    """Return how often the scheduler asks for workers when an answer goes on, while so many failed requests wait for an
    ejected worker.
    """
    scene = new_scene("w1", "w2", requests=1000)
    eject(scene, W1)
    running = scene.arrive("ada", "q")
    for _ in range(waiting):
        give_back(scene, scene.arrive("ada", "a"), Fault.ERROR, accepted=False)
    assert scene.scheduler.waiting == waiting
    fleet = scene.scheduler.fleet
    fleet.__class__ = CountingFleet
    assert isinstance(fleet, CountingFleet)
    scene.progress(running, 1)
    return fleet.asked


@pytest.mark.interpreted("the test changes the class of an object")
def test_failed_requests_that_wait_for_an_ejected_worker_cost_nothing_until_the_fleet_changes() -> None:
    """Nobody looks for a worker for them at an event that concerns none."""
    assert asked_while_waiting(50) == asked_while_waiting(1)


def test_a_failed_request_stops_waiting_for_an_ejected_worker_that_falls_silent() -> None:
    """From then on nobody knows whether it will ever answer, though its cooldown is not over."""
    scene = new_scene("w1", "w2", rules=HealthRules(failures=1, cooldown=60.0, silence=5.0))
    scene.arrive("ada", "a", only="w1")
    eject(scene, W1)
    failed, later = scene.arrive("ada", "b"), scene.arrive("ada", "c")
    give_back(scene, failed, Fault.ERROR)
    assert not scene.refusals
    for _ in range(8):
        scene.wait(1.0)
        scene.feed(WorkerAnswered(W2))
    assert scene.refusals == {failed: Refusal.NO_RETRY}
    scene.feed(WorkerAnswered(W1))
    give_back(scene, later, Fault.ERROR)
    assert later not in scene.refusals, "it has answered"


def test_a_failed_request_waits_no_longer_than_others() -> None:
    """A failed request is refused if no other worker has room in time."""
    scene = new_scene("w1", "w2", requests=1)
    first = scene.arrive("ada", "a")
    scene.arrive("bob", "b")
    give_back(scene, first)
    scene.wait(1000.0)
    assert scene.refusals[first] == Refusal.EXPIRED
    assert not scene.scheduler._retries.requests


def test_retries_end_with_the_budget_and_continuations_do_not() -> None:
    """A widespread failure is not multiplied, but a stream under way is continued."""
    rules = HealthRules(failures=0, budget=0.0, floor=1)
    scene = new_scene("w1", "w2", rules=rules)
    requests = [scene.arrive("ada", letter) for letter in "abc"]
    give_back(scene, requests[0])
    give_back(scene, requests[1])
    assert scene.refusals == {requests[1]: Refusal.NO_RETRY}
    scene.progress(requests[2], 1)
    give_back(scene, requests[2], begun=True)
    assert requests[2] not in scene.refusals


@pytest.mark.parametrize("leaves", [False, True], ids=["breaker", "left"])
def test_requests_of_a_failed_worker_do_not_use_the_budget(leaves: bool) -> None:
    """Once nothing is sent to the worker any more, its requests go elsewhere whatever the retry budget."""
    scene = new_scene("w1", "w2", requests=200, rules=HealthRules(failures=5, budget=0.0, floor=4))
    sent = [scene.arrive("ada", f"{number:03}") for number in range(180)]
    there = [request for request in sent if scene.worker_of(request) == W1]
    assert len(there) == 90
    if leaves:
        scene.leave("w1")
    for request in there:
        give_back(scene, request)
    assert not scene.refusals
    assert {scene.worker_of(request) for request in there} == {W2}


def test_an_open_breaker_keeps_requests_away_until_a_probe_succeeds() -> None:
    """The worker's queue moves to other workers, and after the cooldown one request is sent as a probe."""
    scene = new_scene("w1", "w2", requests=2)
    for _ in range(2):
        request = scene.arrive("ada", "a")
        while scene.worker_of(request) != W1:
            request = scene.arrive("ada", "a")
        give_back(scene, request)
    assert set(scene.scheduler.fleet.ejected) == {W1}
    scene.serve_all()
    for letter in "abcd":
        request = scene.arrive("ada", letter)
        assert scene.worker_of(request) == W2
        scene.serve(request)
    scene.wait(5.0)
    there = [scene.arrive("ada", letter) for letter in "abcd"]
    probes = [request for request in there if request in scene.dispatched and scene.worker_of(request) == W1]
    assert len(probes) == 1
    scene.start(probes[0])
    assert scene.scheduler.fleet[W1].health.condition is Condition.CLOSED


def test_the_only_worker_of_a_model_is_never_ejected() -> None:
    """Such a worker is sent requests although it fails."""
    scene = new_scene("w1")
    for _ in range(9):
        give_back(scene, scene.arrive("ada", "a"))
    assert not scene.scheduler.fleet.ejected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("busy", [False, True])
def test_an_ejected_worker_is_readmitted_when_the_last_other_one_leaves(policy: str, busy: bool) -> None:
    """Whether or not something still runs at that one."""
    scene = new_scene("w1", "w2", policy=policy)
    eject(scene, W1)
    if busy:
        scene.arrive("ada", "a")
    scene.leave("w2")
    assert not scene.scheduler.fleet.ejected
    assert scene.worker_of(scene.arrive("ada", "z")) == W1


def test_an_ejected_worker_is_readmitted_for_a_new_model() -> None:
    """An ejected worker that is the only one of a new model is readmitted, although something still runs there."""
    scene = new_scene("w1", "w2", requests=3)
    there: list[RequestId] = []
    while len(there) < 3:
        request = scene.arrive("ada", "a")
        if scene.worker_of(request) == W1:
            there.append(request)
    for request in there[:2]:
        give_back(scene, request)
    assert set(scene.scheduler.fleet.ejected) == {W1}
    scene.join("w1", "another model")
    scene.finish(there[2])
    assert scene.worker_of(scene.arrive("ada", "b", model="another model")) == W1


def test_a_request_that_every_worker_fails_opens_no_breaker() -> None:
    """An engine's own error counts only when another worker has served the same request."""
    scene = new_scene("w1", "w2", "w3")
    for letter in "abcdef":
        request = scene.arrive("ada", letter)
        for _ in range(3):
            give_back(scene, request, Fault.ERROR)
        assert request in scene.refusals
    assert not scene.scheduler.fleet.ejected
    for letter in "abcdef":
        request = scene.arrive("ada", letter)
        if scene.worker_of(request) == W1:
            give_back(scene, request, Fault.ERROR)
        scene.serve(request)
    assert set(scene.scheduler.fleet.ejected) == {W1}


@pytest.mark.parametrize("streamed", [True, False])
def test_an_engines_error_counts_as_soon_as_another_answers(streamed: bool) -> None:
    """The error counts at the other worker's first token of a stream, and at the end of its answer
    without streaming.
    """
    scene = new_scene("w1", "w2")
    for letter in "abcdef":
        request = scene.arrive("ada", letter, streamed=streamed)
        if scene.worker_of(request) == W1:
            give_back(scene, request, Fault.ERROR)
        if streamed:
            scene.start(request)
        else:
            scene.finish(request)
    assert set(scene.scheduler.fleet.ejected) == {W1}


def test_trust_in_a_worker_that_comes_back_grows_slowly() -> None:
    """A returning worker gets one request first, and more as they start; a new worker is not limited."""
    scene = new_scene("w1", "w2")
    assert len([scene.arrive("ada", letter) for letter in "abcdef"]) == len(scene.dispatched)
    scene.serve_all()
    scene.leave("w2")
    scene.join("w2")
    sent = [scene.arrive("bob", letter) for letter in "ghijkl"]
    there = [request for request in sent if request in scene.dispatched and scene.worker_of(request) == W2]
    assert len(there) == 1
    scene.start(there[0])
    there = [request for request in sent if request in scene.dispatched and scene.worker_of(request) == W2]
    assert len(there) == 3


def test_a_worker_that_comes_back_without_metrics_is_not_filled_when_it_is_trusted() -> None:
    """Such a worker gets the short requests that it runs and a limited number that wait, since their tokens are no
    bound.
    """
    scene = Scene("rr+fcfs")
    scene.leave("w1")
    scene.join("w1")
    scene.feed(WorkerAnswered(W1))
    for number in range(200):
        scene.arrive("ada", chr(0x100 + number))
    places, ended, most = 4, 0, 0
    while ended < 60:
        running = scene.order[ended : ended + places]
        for request in running:
            scene.start(request)
        most = max(most, len(scene.order) - ended)
        scene.wait(0.1)
        for request in running:
            scene.finish(request, 3)
        ended += len(running)
    assert scene.scheduler.fleet[W1].health.trusted
    assert FULL_TRUST < most <= places + FEWEST_REQUESTS


def test_a_full_worker_gets_no_requests_during_its_backoff() -> None:
    """The refused request waits, is refunded, counts as no failure, and goes there again if no
    other worker takes it.
    """
    scene = new_scene("w1")
    request = scene.arrive("ada", "doc")
    give_back(scene, request, Fault.FULL, accepted=False)
    assert scene.charged("ada") == 0
    assert scene.scheduler.waiting == 1
    scene.wait(0.1)
    assert scene.scheduler.waiting == 1
    scene.wait(1.0)
    assert scene.scheduler.waiting == 0
    scene.start(request)
    scene.finish(request, 3, cached=0)
    assert scene.charged("ada") == 96.0 + 6
    assert not scene.refusals
