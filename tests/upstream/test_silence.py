"""A hung worker accepts connections but sends nothing; it gets no requests until it shows a sign of life."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.health import Condition, HealthRules
from router.core.fleet.service_rate import FIRST_SECONDS_PER_TOKEN
from router.core.fleet.window import FixedWindow
from router.core.fleet.worker_state import SILENCE_PREFILLS
from router.core.model.commands import Dispatch
from router.core.model.events import (
    Event,
    Failed,
    Fault,
    Progressed,
    Returned,
    Started,
    WorkerAnswered,
    WorkerJoined,
    WorkerReported,
)
from router.core.model.request import RequestId, Worker, WorkerId
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import MODEL, Scene
from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import called_first, scripted_engine

W1, W2 = WorkerId("w1"), WorkerId("w2")
LIMIT = 4.0


def new_scene(
    *workers: str, policy: str = "rr+fcfs", requests: int = 9, failures: int = 2, silence: float = LIMIT
) -> Scene:
    """Return a scheduler with these workers, each with room for this many requests."""
    rules = HealthRules(failures=failures, cooldown=10.0, silence=silence)
    return Scene(policy, workers=workers, settings=SchedulerSettings(window=FixedWindow(requests, 10**6), health=rules))


def send_to(scene: Scene, worker: WorkerId) -> RequestId:
    """Submit requests until one goes to this worker; finish the others."""
    while scene.worker_of(request := scene.arrive("ada", "a")) != worker:
        scene.serve(request)
    return request


def pass_time_with_w2_alive(scene: Scene, seconds: float) -> None:
    """Let time pass in which only the second worker answers its polls."""
    for _ in range(round(seconds / 0.5)):
        scene.wait(0.5)
        scene.feed(WorkerAnswered(W2))


def workers_of_six(scene: Scene) -> set[WorkerId]:
    """Submit six requests; return the workers that received one."""
    sent = [scene.arrive("ada", letter) for letter in "bcdefg"]
    return {scene.worker_of(request) for request in sent if request in scene.dispatched}


@pytest.mark.parametrize("policy", ["rr+fcfs", "d2lpm", "dlpm_home", "least_requests+fcfs", "preble", "rr+vtc"])
def test_a_silent_worker_is_sent_no_requests(policy: str) -> None:
    """The worker is silent from the end of its time limit on, and not before."""
    scene = new_scene("w1", "w2", policy=policy)
    send_to(scene, W1)
    pass_time_with_w2_alive(scene, LIMIT - 0.5)
    assert not scene.scheduler.fleet[W1].silent
    pass_time_with_w2_alive(scene, 0.5)
    assert scene.scheduler.fleet[W1].silent
    assert workers_of_six(scene) == {W2}


@pytest.mark.parametrize(
    "sign",
    [
        Started,
        lambda request: Progressed({request: 1}),
        lambda request: Failed(request, accepted=True, fault=Fault.ERROR),
        lambda request: Returned(request, accepted=False, fault=Fault.FULL),
        lambda _: WorkerAnswered(W1),
        lambda _: WorkerReported(W1, 1, 0),
        lambda _: WorkerJoined(Worker(W1, frozenset([MODEL]))),
    ],
    ids=["first token", "more tokens", "its error", "it is full", "a poll", "a report", "its models"],
)
def test_a_silent_worker_is_readmitted_at_its_first_sign_of_life(sign: Callable[[RequestId], Event]) -> None:
    """A sign of life readmits the worker without a probe, because the worker was not broken."""
    scene = new_scene("w1", "w2")
    request = send_to(scene, W1)
    pass_time_with_w2_alive(scene, LIMIT)
    assert set(scene.scheduler.fleet.ejected) == {W1}
    scene.feed(sign(request))
    assert not scene.scheduler.fleet.ejected
    scene.wait(1.0)
    sent = [scene.arrive("ada", letter) for letter in "bcdefg"]
    assert [scene.worker_of(request) for request in sent].count(W1) == 3


def test_the_end_step_of_request_is_a_sign_of_life() -> None:
    """The end of an answer without streaming is the only sign of life of its call."""
    scene = new_scene("w1", "w2")
    request = send_to(scene, W1)
    pass_time_with_w2_alive(scene, LIMIT)
    scene.finish(request, 3)
    assert workers_of_six(scene) == {W1, W2}


def test_any_sign_of_life_counts() -> None:
    """While a worker answers polls or continues one of its streams, no other call makes it silent."""
    scene = new_scene("w1")
    stream = scene.arrive("ada", "a")
    scene.arrive("bob", "b")
    for output in range(20):
        scene.wait(LIMIT - 0.1)
        scene.progress(stream, output + 1)
        assert not scene.scheduler.fleet[W1].silent
    for _ in range(20):
        scene.wait(LIMIT - 0.1)
        scene.feed(WorkerReported(W1, 2, 0))
        assert not scene.scheduler.fleet[W1].silent


def test_a_failure_without_an_answer_is_not_a_sign_of_life() -> None:
    """A connection that was given up, or reset by the kernel, shows nothing of the process behind it."""
    scene = new_scene("w1", "w2", failures=0)
    request = send_to(scene, W1)
    pass_time_with_w2_alive(scene, LIMIT)
    scene.feed(Returned(request, accepted=True, fault=Fault.BROKEN))
    assert scene.worker_of(request) == W2
    assert workers_of_six(scene) == {W2}, "although nothing runs there any more"


def test_an_idle_worker_is_not_silent() -> None:
    """The time limit begins with the first request in flight at the worker."""
    scene = new_scene("w1", "w2")
    scene.wait(100.0)
    request = send_to(scene, W1)
    pass_time_with_w2_alive(scene, LIMIT - 0.5)
    assert not scene.scheduler.fleet[W1].silent
    scene.serve(request)
    scene.wait(100.0)
    assert workers_of_six(scene) == {W1, W2}


def test_the_queue_of_a_silent_worker_is_reassigned() -> None:
    """Requests queued for the silent worker are dispatched to others as those have room."""
    scene = new_scene("w1", "w2", requests=1)
    first, second, third, fourth = [scene.arrive("ada", letter) for letter in "abcd"]
    assert scene.worker_of(first) == W1
    scene.serve(second)
    scene.serve(fourth)
    assert third not in scene.dispatched, "it waits for the first worker"
    pass_time_with_w2_alive(scene, LIMIT)
    assert scene.worker_of(third) == W2


def test_the_only_worker_keeps_its_queue() -> None:
    """No request is refused, and the whole queue is dispatched once the worker answers again."""
    scene = new_scene("w1")
    first = scene.arrive("ada", "a")
    scene.wait(LIMIT)
    others = [scene.arrive("ada", letter) for letter in "bc"]
    assert list(scene.dispatched) == [first]
    assert not scene.refusals
    scene.start(first)
    assert list(scene.dispatched) == [first, *others]


def test_when_all_are_silent_the_first_to_answer_takes_the_queues() -> None:
    """If all workers are silent, the first one that answers gets the waiting requests, also those of the others."""
    for first_alive in ("w1", "w2"):
        scene = new_scene("w1", "w2", requests=1)
        for letter in "ab":
            scene.arrive("ada", letter)
        waiting = [scene.arrive("ada", letter) for letter in "cd"]
        scene.wait(LIMIT)
        assert len(scene.dispatched) == 2
        for request in waiting:
            assert request not in scene.dispatched
        first = next(r for r in scene.order if scene.worker_of(r) == first_alive)
        scene.serve(first)
        for _ in range(2):
            (last,) = scene.order[-1:]
            assert last in waiting
            assert scene.worker_of(last) == first_alive
            waiting.remove(last)
            scene.serve(last)
        assert not waiting


def test_the_last_worker_of_a_model_keeps_its_queue() -> None:
    """When the other worker leaves, requests wait for the silent one instead of being refused."""
    scene = new_scene("w1", "w2")
    first = send_to(scene, W1)
    pass_time_with_w2_alive(scene, LIMIT)
    scene.leave("w2")
    waiting = scene.arrive("ada", "z")
    assert waiting not in scene.dispatched
    assert not scene.refusals
    scene.start(first)
    assert scene.worker_of(waiting) == W1


def test_the_breaker_opens_independently_of_silence() -> None:
    """A worker whose calls failed stays ejected for the cooldown although it answers again, and is then probed."""
    scene = new_scene("w1", "w2")
    there = [send_to(scene, W1) for _ in range(3)]
    pass_time_with_w2_alive(scene, LIMIT)
    for request in there[:2]:
        scene.feed(Returned(request, accepted=True, fault=Fault.BROKEN))
    for request in there[:2]:
        scene.serve(request)
    scene.feed(WorkerAnswered(W1))
    assert set(scene.scheduler.fleet.ejected) == {W1}
    scene.wait(10.0)
    assert set(scene.scheduler.fleet.ejected) == {W1}, "by then it is silent again"
    scene.feed(WorkerAnswered(W1))
    assert not scene.scheduler.fleet.ejected
    assert scene.scheduler.fleet[W1].health.condition is Condition.HALF_OPEN


def test_an_open_breaker_does_not_close_while_the_worker_is_silent() -> None:
    """An open breaker stays open after its cooldown until the worker shows a sign of life."""
    scene = new_scene("w1", "w2")
    there = [send_to(scene, W1) for _ in range(3)]
    for request in there[:2]:
        scene.feed(Returned(request, accepted=True, fault=Fault.BROKEN))
    pass_time_with_w2_alive(scene, 20.0)
    assert scene.scheduler.fleet[W1].health.condition is Condition.OPEN
    assert workers_of_six(scene) == {W2}
    scene.start(there[2])
    assert scene.scheduler.fleet[W1].health.condition is Condition.HALF_OPEN


def test_a_long_prefill_does_not_count_as_silence() -> None:
    """The time limit is extended by a multiple of the expected duration of the prefill."""
    scene = new_scene("w1", "w2")
    prompt = "a" * 4000
    request = scene.arrive("ada", prompt)
    assert scene.worker_of(request) == W1
    due = SILENCE_PREFILLS * 32 * len(prompt) * FIRST_SECONDS_PER_TOKEN
    assert due > 5 * LIMIT
    pass_time_with_w2_alive(scene, due - 1.0)
    assert not scene.scheduler.fleet[W1].silent
    pass_time_with_w2_alive(scene, 2.0)
    assert scene.scheduler.fleet[W1].silent


def test_a_slow_engine_is_judged_by_its_own_speed() -> None:
    """The time limit follows the measured speed: at 10 ms per token the same prompt may take longer."""
    scene = new_scene("w1")
    for letter in "abc":
        request = scene.arrive("ada", 10 * letter)
        scene.wait(3.2)
        scene.serve(request)
    scene.arrive("ada", 20 * "d")
    scene.wait(LIMIT + 6.4)
    assert not scene.scheduler.fleet[W1].silent
    scene.wait(SILENCE_PREFILLS * 6.4)
    assert scene.scheduler.fleet[W1].silent


def test_the_silence_timeout_can_be_switched_off() -> None:
    """With 0, a worker is never silent."""
    scene = new_scene("w1", "w2", silence=0.0)
    send_to(scene, W1)
    pass_time_with_w2_alive(scene, 500.0)
    assert workers_of_six(scene) == {W1, W2}


def test_a_silent_worker_sets_no_timer() -> None:
    """A silent worker sets no timer, because time alone cannot change its state."""
    scene = new_scene("w1", "w2")
    send_to(scene, W1)
    pass_time_with_w2_alive(scene, LIMIT)
    assert scene.wake_at is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "wait", "start", "progress", "finish", "give back", "cancel", "answer", "leave", "join"]
        ),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from(["rr+fcfs", "d2lpm", "dlpm_home"]))
def test_no_request_is_sent_to_a_silent_worker(steps: list[tuple[str, int]], policy: str) -> None:
    """A model of the signs of life confirms each dispatch, and nothing waits once all workers answer."""
    scene = new_scene("w1", "w2", "w3", policy=policy, requests=3)
    run = SilenceModel(scene)
    for kind, number in steps:
        run.step(kind, number)
    run.let_all_answer()
    assert not scene.scheduler.waiting or not list(scene.scheduler.fleet)


class SilenceModel:
    """Plays random steps and keeps, for each worker, the time since when it owes a sign of life."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.owes_since = dict.fromkeys(["w1", "w2", "w3"], 0.0)
        self.silent: set[str] = set()

    def step(self, kind: str, number: int) -> None:
        """Play one step and check every dispatch that follows."""
        running = self.running()
        worker = f"w{number % 3 + 1}"
        if kind == "arrive":
            self.check_dispatches(lambda: self.scene.arrive(f"client{number % 3}", "abcdefgh"[number]))
        elif kind == "wait":
            self.scene.now += number / 2
            self.record_silence()
            self.check_dispatches(lambda: self.scene.wait(0.0))
        elif kind == "answer":
            self.record_life(worker)
            self.check_dispatches(lambda: self.scene.feed(WorkerAnswered(WorkerId(worker))))
        elif kind == "join":
            self.record_life(worker)
            self.check_dispatches(lambda: self.scene.join(worker))
        elif kind == "leave":
            self.check_dispatches(lambda: self.scene.leave(worker))
        elif running:
            self.step_of_request(kind, running[number % len(running)])

    def step_of_request(self, kind: str, request: RequestId) -> None:
        """Play a step of a request in flight."""
        if kind not in ("give back", "cancel"):
            self.record_life(self.scene.worker_of(request))
        acts: dict[str, Callable[[], object]] = {
            "start": lambda: self.scene.start(request),
            "progress": lambda: self.scene.progress(request, 5),
            "finish": lambda: self.scene.finish(request, 5),
            "give back": lambda: self.scene.feed(Returned(request, accepted=True, fault=Fault.BROKEN)),
            "cancel": lambda: self.scene.cancel(request),
        }
        self.check_dispatches(acts[kind])

    def let_all_answer(self) -> None:
        """Let every worker answer, and finish all requests."""
        for worker in ("w1", "w2", "w3"):
            self.step("join", int(worker[1]) - 1)
        self.scene.wait(200.0)
        for worker in ("w1", "w2", "w3"):
            self.scene.feed(WorkerAnswered(WorkerId(worker)))
        self.scene.serve_all()

    def running(self) -> list[RequestId]:
        return list(self.scene.scheduler.attempts)

    def record_life(self, worker: str) -> None:
        self.silent.discard(worker)
        self.owes_since[worker] = self.scene.now

    def record_silence(self) -> None:
        """Record which workers have been silent for too long."""
        for state in self.scene.scheduler.fleet:
            if state.running and self.scene.now - self.owes_since[state.worker.id] >= LIMIT:
                self.silent.add(state.worker.id)

    def check_dispatches(self, act: Callable[[], object]) -> None:
        """Run an act and check that it dispatches nothing to a silent worker."""
        sent: list[Dispatch] = []
        before = {state.worker.id for state in self.scene.scheduler.fleet if state.running}
        known = dict(self.scene.dispatched)
        act()
        sent = [dispatch for dispatch in self.scene.dispatched.values() if known.get(dispatch.request) is not dispatch]
        for dispatch in sent:
            assert dispatch.worker not in self.silent
            if dispatch.worker not in before:
                before.add(dispatch.worker)
                self.owes_since[dispatch.worker] = self.scene.now


# On real sockets


async def test_a_hung_worker_is_skipped() -> None:
    """A worker that accepts connections and answers nothing is skipped, and used again once it answers."""
    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        running_router(first.url, second.url, policy="rr+fcfs", silence_timeout=1.0) as router,
        router.post(chat(stream=True)) as hanging,
    ):
        call, one, two = await called_first(first, second)
        one.ignores_polls = True
        state = router.scheduler.fleet[WorkerId(one.url.removeprefix("http://"))]
        await until(lambda: state.silent)
        reported = await router.get_json("/fairness")
        assert reported["workers"][state.worker.id]["breaker"] == "silent"
        for _ in range(4):
            async with router.post(chat()) as post:
                await (await two.call()).answer()
                assert b"yes" in await post.read()
        one.ignores_polls = False
        await call.answer("at last")
        assert b"at last" in await hanging.read()
        assert not state.silent
        async with router.post(chat()) as post, router.post(chat()) as other:
            await (await one.call()).answer()
            await (await two.call()).answer()
            await post.read()
            await other.read()
